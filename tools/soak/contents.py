"""Random prompts and options, reproducible by seed, with every documented option."""

import dataclasses
import json
import random
import re

from harness.repository import ROOT

VOCAB_SIZE = 1536
END_ID = 2
PROMPTS = [
    "Once upon a time, there was a brave fox named Finn. Every evening, he liked to look at the stars.",
    "Once upon a time, there was a shy owl named Vera. She lived in a cottage with a red door.",
    "Long ago, a sleepy bear named Björn lived by the shore of a wide lake. One day, he found a map.",
    "Tell me a story about a robot. The robot is called Zoë, and it likes to dance.",
    "Mina and Oscar went to the market. They bought a red apple, a silver bell and a pot of jam.",
    "yes no yes no yes no yes no yes no yes no yes no yes",
    "日本語 and emoji 🦊🦊 are not of these stories, but they are bytes.",
]
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "required": ["name", "age"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
}
STRUCTURE = {
    "type": "structural_tag",
    "triggers": [" the"],
    "structures": [{"begin": " the <", "schema": {"type": "integer", "minimum": 0, "maximum": 99}, "end": ">"}],
}
TOOLS = [{"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}]
# The names of the adapters that models.py writes.
ADAPTERS = range(6)
# A longer output can be derived in more ways, so that its guide is slow.
AMBIGUOUS = "root ::= s\ns ::= [a-zA-Z ,.] | s s"
GRAMMAR = 'root ::= "(" root? ")" | [a-z]{1,5}'


@dataclasses.dataclass(frozen=True)
class Content:
    """A request's content: the prompt, text or ids, and the options. Equal contents have equal answers."""

    prompt: str | tuple
    options: tuple
    # Not for streams: some options apply to whole answers only.
    whole_only: bool = False
    # Whether each response of a stream has the complete rows.
    has_beams: bool = False

    @property
    def is_ids(self):
        return not isinstance(self.prompt, str)


def documented_options():
    """The names of all options, from the generated table in the documentation."""
    text = (ROOT / "docs/src/request-options.md").read_text()
    table = text.partition("<!-- options:")[2].partition("<!-- /options -->")[0]
    cells = (line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    return [re.findall(r"`([^`]+)`", cell) for cell in cells]


# Options for clients with a specific purpose: clients.py and rude.py send them. (`stop: true` is one of them,
# but `stop` is also a stop word.)
BY_CLIENTS = {"timeout", "stream", "streaming", "stream_interval"}


def pool(seed, size):
    """`size` contents. The first ones cycle through all kinds, so that a small pool also has each of them."""
    rng = random.Random(f"contents {seed}")
    aliases = {names[0]: names for names in documented_options()}
    made = [_content(rng, KINDS[n % len(KINDS)], aliases) for n in range(size)]
    rng.shuffle(made)
    return made


def names_of(contents):
    """The options in contents, including those in their `sampling_parameters`."""
    names = set()
    for content in contents:
        for name, value in content.options:
            names.add(name)
            if name == "sampling_parameters":
                names |= json.loads(value).keys()
    return names


def _content(rng, kind, aliases):
    if kind is _ids:
        return _ids(rng)
    options = {"max_tokens": rng.randint(1, 40), "exclude_input_in_output": True}
    flags = {}
    made = kind(rng)
    for flag in ("whole_only", "has_beams"):
        flags[flag] = made.pop(flag, False)
    prompt = made.pop("prompt", None)
    if prompt is None:
        prompt = rng.choice(PROMPTS)[: rng.randint(9, 120)]
    options.update(made)
    if not flags["has_beams"]:
        options.update(_seasoning(rng))
    options = {rng.choice(aliases.get(name, [name])): value for name, value in options.items()}
    return Content(prompt, tuple(sorted(options.items())), **flags)


def _ids(rng):
    ids = tuple(rng.randrange(32000) for _ in range(rng.randint(1, 40)))
    options = {rng.choice(["max_tokens", "request_output_len"]): rng.randint(1, 60), "exclude_input_in_output": True}
    if rng.random() < 0.5:
        options["input_lengths"] = rng.randint(1, len(ids))
    return Content(ids, tuple(sorted(options.items())))


def _seasoning(rng):
    """Options that can be combined with all others."""
    some = [
        lambda: {"priority": rng.randint(-3, 3)},
        lambda: {"cache_salt": f"tenant {rng.randint(1, 3)}"},
        lambda: {"kv_cache_reuse": rng.random() < 0.5},
        lambda: {"client_id": rng.randrange(2**62)},
        lambda: {"lora_name": str(rng.choice(ADAPTERS))},
        lambda: {"lora_task_id": rng.choice(ADAPTERS)},
        lambda: {"add": None},
        lambda: {"min_tokens": rng.randint(0, 8)},
        lambda: {"skip_special_tokens": rng.random() < 0.5, "spaces_between_special_tokens": rng.random() < 0.5},
        lambda: {"truncate_prompt_tokens": rng.randint(1, 12)},
        lambda: {"num_draft_tokens": rng.randint(0, 4)},
        lambda: {"draft_input_ids": json.dumps([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))])},
        lambda: {"ignore_eos": True},
        lambda: {"return_stop_reason": True},
        lambda: {"return_num_input_tokens": rng.random() < 0.5},
    ]
    options = {}
    for make in rng.sample(some, rng.choice([0, 1, 1, 2])):
        options.update(make())
    options.pop("add", None)
    if "lora_name" in options:
        # An adapter is named in one way.
        options.pop("lora_task_id", None)
    return options


def _some_tokens(rng, count):
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def _greedy(rng):
    return {}


def _sampled(rng):
    return {
        "temperature": rng.choice([0.5, 0.8, 1.0, 1.7]),
        "seed": rng.randrange(2**62),
        **rng.choice([{}, {"top_k": rng.randint(-1, 50)}, {"top_p": 0.9}, {"min_p": 0.05}, {"typical_p": 0.9}]),
    }


def _decaying(rng):
    return {
        "temperature": 1.0,
        "seed": rng.randrange(100),
        "top_p": 0.95,
        "top_p_decay": 0.9,
        "top_p_min": 0.1,
        "top_p_reset_ids": json.dumps(_some_tokens(rng, 2)),
    }


def _penalised(rng):
    return {
        "repetition_penalty": rng.choice([0.8, 1.3]),
        "presence_penalty": rng.choice([-1.0, 1.5]),
        "frequency_penalty": 0.5,
        "prompt_ignore_length": rng.randint(0, 9),
        "no_repeat_ngram_size": rng.randint(0, 4),
    }


def _biased(rng):
    kind = rng.randrange(4)
    if kind == 0:
        return {"logit_bias": json.dumps({str(id): rng.choice([-100, 5.5]) for id in _some_tokens(rng, 5)})}
    if kind == 1:
        return {"embedding_bias": json.dumps([round(rng.uniform(-2, 2), 2) for _ in range(VOCAB_SIZE)])}
    if kind == 2:
        return {"embedding_bias_words": '["fox", " the"]', "embedding_bias_weights": "[3.5, -20]"}
    return {"allowed_token_ids": json.dumps(sorted(set(_some_tokens(rng, 40)) | {END_ID}))}


def _ending(rng):
    return {
        **rng.choice([{"end_id": rng.choice(_some_tokens(rng, 3))}, {"end_ids": json.dumps(_some_tokens(rng, 3))}]),
        "stop_token_ids": json.dumps(_some_tokens(rng, 4)),
        "stop": json.dumps([rng.choice([". ", "was", "e", " he "]), "never said"]),
        "include_stop_str_in_output": rng.random() < 0.5,
        "return_stop_reason": True,
    }


def _words(rng):
    ids = _some_tokens(rng, 3)
    return {
        "bad_words": json.dumps(["fox", "the"]),
        "stop_words_list": json.dumps([ids, [1, 3, -1]]),
        "bad_words_list": json.dumps([ids, [2, 3, -1]]),
    }


def _guided(rng):
    return {
        "max_tokens": 60,
        **rng.choice(
            [
                {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)},
                {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[A-Z][a-z]{2,8} [0-9]+"},
                {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": GRAMMAR},
                {"structured_outputs": json.dumps({"choice": ["yes", "no", "perhaps"]})},
                {"guided_json": json.dumps(SCHEMA)},
                {"guided_regex": "(fox|owl)( and (fox|owl)){0,3}"},
                {"guided_choice": '["a fox", "an owl", "a frog"]'},
                {"guided_grammar": GRAMMAR},
                {"guided_grammar": AMBIGUOUS, "max_tokens": 16},
                {"structural_tag": json.dumps(STRUCTURE)},
            ]
        ),
        **rng.choice([{}, {"temperature": 1.0, "seed": rng.randrange(100)}]),
    }


def _several(rng):
    options = {"temperature": 1.0, "seed": rng.randrange(1000), "max_tokens": rng.randint(1, 20), "n": rng.randint(2, 4)}
    if rng.random() < 0.3:
        options |= {"best_of": options["n"] + 1, "whole_only": True}
    if rng.random() < 0.5:
        options["pad_id"] = rng.randrange(VOCAB_SIZE)
    return options


def _beams(rng):
    width = rng.randint(2, 4)
    return {
        "max_tokens": rng.randint(1, 20),
        **rng.choice([{"beam_width": width}, {"use_beam_search": True, "best_of": width, "n": 2}]),
        "length_penalty": rng.choice([0.0, 1.0, 2.5]),
        "early_stopping": rng.choice([True, False, "never"]),
        "beam_search_diversity_rate": rng.choice([0.0, 0.5]),
        "has_beams": True,
    }


def _with_outputs(rng):
    return {
        "return_log_probs": True,
        "return_cumulative_logprob": True,
        "logprobs": rng.randint(0, 5),
        "return_logprobs": True,
        "prompt_logprobs": rng.randint(0, 3),
        # Errors are compared across protocols.
        "return_error_code": False,
        "return_output_ids_json": rng.random() < 0.7,
        "return_num_output_tokens": rng.random() < 0.7,
        "return_finish_reason": rng.random() < 0.7,
        "return_perf_metrics": rng.random() < 0.5,
        # The demo model writes neither.
        "return_reasoning_content": False,
        "return_tool_calls": False,
    }


def _logits(rng):
    return {"max_tokens": rng.randint(1, 8), "return_context_logits": True, "return_generation_logits": True}


def _post_processed(rng):
    tokens = _some_tokens(rng, 6)
    name, arguments = rng.choice(
        [
            ("force_tokens", {"tokens": tokens, "start": rng.randint(0, 3)}),
            ("ban_tokens", {"tokens": tokens}),
            ("ban_first_tokens", {"tokens": tokens, "count": 3}),
            ("allow_first_tokens", {"tokens": tokens, "count": 2}),
        ]
    )
    return {"logits_post_processor_name": name, "logits_post_processor_args": json.dumps(arguments)}


def _conversation(rng):
    messages = [{"role": "user", "content": f"Tell me a story about {rng.choice(['a fox', 'an owl', 'a bear'])}."}]
    some = [
        {},
        {"tools": json.dumps(TOOLS), "tool_choice": rng.choice(["auto", "none"]), "parallel_tool_calls": rng.random() < 0.5},
        {"documents": json.dumps([{"title": "Foxes", "text": "They are red."}])},
        {"chat_template_kwargs": json.dumps({"enable_thinking": False}), "chat_template": "default"},
        {"add_generation_prompt": False},
    ]
    options = rng.choice(some)
    if rng.random() < 0.3:
        messages.append({"role": "assistant", "content": "Once upon a time"})
        options = {"continue_final_message": True}
    return {"prompt": "", "messages": json.dumps(messages), **options}


def _nested(rng):
    nested = {"temperature": 0.9, "seed": rng.randrange(50), "stop": ["never said"], "logit_bias": {"300": 2}}
    return {"sampling_parameters": json.dumps(nested)}


def _echo(rng):
    return {"exclude_input_in_output": False, "whole_only": True}


def _without_outputs(rng):
    return {"detokenize": False}


def _refused(rng):
    """A request that is rejected, always with the same text."""
    return rng.choice(
        [
            {"temprature": 1},
            {"max_tokens": 0},
            {"top_p": 7.0},
            {"end_id": 10**6},
            {"logit_bias": "[1]"},
            {"guided_regex": "(((("},
            {"guided_json": '{"type": 7}'},
            {"prompt": ""},
            {"n": 3},
            {"dimensions": 8},
            {"normalize": True},
            {"text_pair": "fox"},
            {"raw_scores": True},
            {"token_type_ids": "[0]"},
            {"beam_width": 3, "guided_regex": "a+"},
            {"logits_post_processor_name": "ban_token"},
            {"messages": "{}", "prompt": ""},
            {"stop": json.dumps(["x" * 300])},
            {"seed": -1},
            {"draft_input_ids": "[-5]"},
            {"prompt_token_ids": "[-5]"},
            {"prompt_only": 3},
            {"allowed_token_ids": "[]"},
            {"prompt": "once upon " * 5000},
        ]
    )


KINDS = [
    _greedy,
    _sampled,
    _decaying,
    _penalised,
    _biased,
    _ending,
    _words,
    _guided,
    _several,
    _beams,
    _with_outputs,
    _logits,
    _post_processed,
    _conversation,
    _nested,
    _echo,
    _without_outputs,
    _refused,
    _ids,
]
