"""Random bodies for the server with OpenAI's API, reproducible by seed, and guides that cost much."""

import dataclasses
import json
import random

from contents import ADAPTERS, END_ID, GRAMMAR, PROMPTS, SCHEMA, STRUCTURE, TOOLS, VOCAB_SIZE

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclasses.dataclass(frozen=True)
class Body:
    """A request's path, and the fields of its body but for the model and those of a stream, as JSON. Equal bodies have
    equal answers."""

    path: str
    fields: str
    # An adapter of the model, which belongs to its name.
    adapter: str | None = None
    # Not for streams.
    whole_only: bool = False
    # The name of a guide that costs much. Its request may be refused as busy.
    guide: str | None = None

    def of(self, model, **more):
        """The complete body of a request to a model."""
        name = model if self.adapter is None else f"{model}:{self.adapter}"
        return {"model": name, **json.loads(self.fields), **more}


def bodies(seed, size):
    """`size` bodies. The first ones cycle through all kinds."""
    rng = random.Random(f"bodies {seed}")
    made = [_body(rng, KINDS[n % len(KINDS)]) for n in range(size)]
    rng.shuffle(made)
    return made


def _body(rng, kind):
    path = rng.choice([COMPLETIONS, CHAT])
    fields = {"max_tokens": rng.randint(1, 40)}
    made = kind(rng)
    path = made.pop("path", path)
    whole_only = made.pop("whole_only", False)
    adapter = made.pop("adapter", None)
    if path == COMPLETIONS:
        fields["prompt"] = rng.choice(PROMPTS)[: rng.randint(9, 120)]
    else:
        fields["messages"] = _messages(rng)
    fields.update(made)
    return Body(path, json.dumps(fields), adapter, whole_only)


def _messages(rng):
    subject = rng.choice(["a fox", "an owl", "a bear", "Zoë 🦊"])
    content = f"Tell me a story about {subject}."
    if rng.random() < 0.2:
        content = [{"type": "text", "text": "Tell me a story"}, {"type": "text", "text": f" about {subject}."}]
    messages = [{"role": "user", "content": content}]
    if rng.random() < 0.3:
        messages += [{"role": "assistant", "content": "Once upon a time."}, {"role": "user", "content": "And then?"}]
    return messages


def _sampling(rng):
    """The same answer each time."""
    return rng.choice([{}, {"temperature": rng.choice([0.5, 1.0, 1.7]), "seed": rng.randrange(2**31)}])


def _greedy(rng):
    return {}


def _sampled(rng):
    options = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"frequency_penalty": 0.7, "presence_penalty": -0.5}]
    return {"temperature": 1.0, "seed": rng.randrange(2**31), **rng.choice(options)}


def _several(rng):
    made = {"temperature": 1.0, "seed": rng.randrange(1000), "n": rng.randint(2, 4), "max_tokens": rng.randint(1, 20)}
    if rng.random() < 0.3:
        made |= {"path": COMPLETIONS, "best_of": made["n"] + 1, "whole_only": True}
    return made


def _prompts(rng):
    """Several prompts in a request, as texts or as ids."""
    several = [rng.choice(PROMPTS)[: rng.randint(9, 60)] for _ in range(rng.randint(2, 5))]
    ids = [[1, *(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 20)))] for _ in range(rng.randint(1, 3))]
    return {"path": COMPLETIONS, "prompt": rng.choice([several, ids, ids[0]]), "max_tokens": rng.randint(1, 20), **_sampling(rng)}


def _log_probs(rng):
    if rng.random() < 0.5:
        return {"path": COMPLETIONS, "logprobs": rng.randint(0, 5), "echo": rng.random() < 0.3, **_sampling(rng)}
    return {"path": CHAT, "logprobs": True, "top_logprobs": rng.randint(0, 5), **_sampling(rng)}


def _ending(rng):
    return {"stop": rng.choice([". ", ["was", "e", " he "], ["never said"]]), **_sampling(rng)}


def _biased(rng):
    return {"logit_bias": {str(rng.randrange(3, VOCAB_SIZE)): rng.choice([-100, 5.5]) for _ in range(4)}}


def _answer_format(rng):
    """A form of the answer, and guides in the options of others."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": rng.random() < 0.5}}
    some = [
        {"path": CHAT, "response_format": form},
        {"path": CHAT, "response_format": {"type": "json_object"}},
        {"path": CHAT, "response_format": STRUCTURE},
        {"guided_regex": "[A-Z][a-z]{2,8} [0-9]+"},
        {"guided_choice": ["a fox", "an owl", "a frog"]},
        {"guided_grammar": GRAMMAR},
    ]
    return {**rng.choice(some), **_sampling(rng)}


def _functions(rng):
    named = {"type": "function", "function": {"name": "tell"}}
    return {
        "path": CHAT,
        "tools": TOOLS,
        "tool_choice": rng.choice(["auto", "none", "required", named]),
        "parallel_tool_calls": rng.random() < 0.5,
        "max_tokens": rng.randint(1, 60),
        **_sampling(rng),
    }


def _adapted(rng):
    return {"adapter": str(rng.choice(ADAPTERS))}


def _seasoned(rng):
    some = [
        {"priority": rng.randint(-3, 3)},
        {"cache_salt": f"tenant {rng.randint(1, 3)}"},
        {"ignore_eos": True},
        {"min_tokens": rng.randint(0, 8)},
        {"stop_token_ids": [END_ID, rng.randrange(3, VOCAB_SIZE)]},
        {"user": "somebody", "metadata": None},
        {"repetition_penalty": 1.2},
    ]
    return {**rng.choice(some), **_sampling(rng)}


def _refused(rng):
    """What is refused, always with the same words."""
    return rng.choice(
        [
            {"temprature": 1},
            {"max_tokens": 0, "path": CHAT},
            {"top_p": 7.0},
            {"n": 0},
            {"n": 129},
            {"guided_regex": "(((("},
            {"path": CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 7}}}},
            {"path": CHAT, "messages": []},
            {"path": CHAT, "messages": [{"role": "system", "content": "The template knows no such role."}]},
            {"path": CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            {"path": CHAT, "tools": [{"type": "function"}]},
            {"path": CHAT, "functions": []},
            {"path": COMPLETIONS, "prompt": []},
            {"path": COMPLETIONS, "prompt": [[-5]]},
            {"path": COMPLETIONS, "prompt": "once upon " * 5000},
            {"path": COMPLETIONS, "prompt": ["a"] * 200},
            {"path": COMPLETIONS, "suffix": "the end"},
            {"logit_bias": {"fox": 1}},
            {"stop": ["x" * 300]},
            {"adapter": "nobody"},
        ]
    )


KINDS = [
    _greedy,
    _sampled,
    _several,
    _prompts,
    _log_probs,
    _ending,
    _biased,
    _answer_format,
    _functions,
    _adapted,
    _seasoned,
    _refused,
]


def _alike(num_alternatives):
    """A schema of arrays in arrays, each of any of so many forms that are all the same."""
    form = {"$ref": "#/$defs/a"}
    alternative = {"type": "array", "items": form, "minItems": 1}
    return {"$defs": {"a": {"anyOf": [alternative] * num_alternatives}}, **form}


def _lexemes(count):
    """A grammar of words that begin alike."""
    names = " | ".join(f"T{n}" for n in range(count))
    words = (f"T{n}: /[a-zA-Z ]*{chr(97 + n % 26)}[a-z ]{{0,{n}}}/\n" for n in range(count))
    return f"start: ({names})*\n{''.join(words)}"


def _form(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def _grammar(text):
    return {"guided_grammar": text}


# Guides that once held the steps of all requests. Each is answered, or refused with words that say why.
GUIDES = {
    "86 bytes": _grammar('root ::= s\ns ::= [a-zA-Z ,.] | s s | s s s | "(" s ")" | t\nt ::= s t | t s | s | [a-z]'),
    "two of itself": _grammar("root ::= s\ns ::= [a-zA-Z ,.] | s s"),
    "two or three of itself": _grammar("root ::= s\ns ::= [a-zA-Z ,.] | s s | s s s"),
    "sentences": _grammar("root ::= sentence+\nsentence ::= part+ [.!?] | part+\npart ::= [a-zA-Z ,']+"),
    "expressions": _grammar('root ::= e\ne ::= e "+" e | e "*" e | e e | "(" e ")" | [a-z0-9 ]'),
    "options of options": _grammar("root ::= a+\na ::= b+ | b+ a\nb ::= [a-z ]+ | [a-z] b"),
    "200 words that begin alike": _grammar(_lexemes(200)),
    "400 alternatives that are alike": _form(_alike(400)),
    "60 alternatives that are alike": _form(_alike(60)),
    "900 properties": _form({"type": "object", "properties": {f"{chr(97 + n % 26)}{n}": {"type": "string"} for n in range(900)}}),
}
# How often each occurs among the bodies of costly guides, with different seeds.
SEEDS_OF_A_GUIDE = 2


def costly_bodies(seed):
    """Requests with each of the guides that cost much."""
    rng = random.Random(f"guides {seed}")
    made = []
    for name, guide in GUIDES.items():
        for _ in range(SEEDS_OF_A_GUIDE):
            fields = {"temperature": 1.0, "seed": rng.randrange(100), "max_tokens": rng.choice([20, 40, 120]), **guide}
            if "response_format" in guide or rng.random() < 0.5:
                made.append(Body(CHAT, json.dumps({**fields, "messages": _messages(rng)}), guide=name))
            else:
                made.append(Body(COMPLETIONS, json.dumps({**fields, "prompt": rng.choice(PROMPTS)[:60]}), guide=name))
    return made
