"""Guided decoding: the output matches its guide, with the option names of both backends, alone and in a
batch."""

import json
import re

import pytest

from harness import clients
from harness.clients import Refused, generate, generate_stream, infer

pytestmark = pytest.mark.also_on_gpu
PROMPT = "Once upon a time, there was a brave fox named Finn."
SCHEMA = {
    # The demo model likes white space, and one of its servers has little memory.
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "colours": {"type": "array", "maxItems": 3, "items": {"enum": ["red", "green"]}},
    },
}
GRAMMAR = 'root ::= "(" root? ")" | [a-z]{1,5}'
CHOICES = ["yes", "no", "perhaps not"]


def is_of_schema(text):
    value = json.loads(text)
    assert list(value) == ["name", "age", "colours"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 20
    assert isinstance(value["age"], int) and 0 <= value["age"] <= 99
    assert len(value["colours"]) <= 3 and set(value["colours"]) <= {"red", "green"}


def is_of_grammar(text):
    while text.startswith("("):
        assert text.endswith(")")
        text = text[1:-1]
    assert re.fullmatch("[a-z]{0,5}", text)


def is_of_regex(text):
    assert re.fullmatch("[A-Z][a-z]{2,8} [0-9]+", text)


def is_a_choice(text):
    assert text in CHOICES


def nested(**members):
    return {"sampling_parameters": json.dumps({"temperature": 1.0, "max_tokens": 400, **members})}


# The guide that a client sends, and a check of its output.
GUIDES = {
    "json_schema": (
        {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)},
        is_of_schema,
    ),
    "regex": (
        {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[A-Z][a-z]{2,8} [0-9]+"},
        is_of_regex,
    ),
    "ebnf_grammar": (
        {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": GRAMMAR},
        is_of_grammar,
    ),
    "guided_json": ({"guided_json": json.dumps(SCHEMA)}, is_of_schema),
    "guided_choice": ({"guided_choice": json.dumps(CHOICES)}, is_a_choice),
    "structured_outputs": ({"structured_outputs": json.dumps({"choice": CHOICES})}, is_a_choice),
    "vLLM, json": (nested(structured_outputs={"json": SCHEMA}), is_of_schema),
    "vLLM, guided_grammar": (nested(guided_grammar=GRAMMAR), is_of_grammar),
    "vLLM, guided_regex": (nested(guided_regex="[A-Z][a-z]{2,8} [0-9]+"), is_of_regex),
}


def options(guide, seed):
    given, check = GUIDES[guide]
    given = dict(given)
    if "sampling_parameters" not in given:
        given.update(temperature=1.0, max_tokens=400)
    return {**given, "seed": seed}, check


@pytest.mark.parametrize("guide", GUIDES)
def test_every_protocol_gives_the_same_text_and_it_matches_its_guide(server, guide):
    given, check = options(guide, 3)
    whole = generate(server, "stories", PROMPT, exclude_input_in_output=True, **given)
    check(whole.text)
    assert whole.finish_reason == "end_id"
    stream = generate_stream(server, "stories", PROMPT, **given)
    answers = {
        "stream": stream,
        "infer": infer(server, "stories_full", PROMPT, exclude_input_in_output=True, **given),
        "few blocks": generate(server, "stories_tight", PROMPT, exclude_input_in_output=True, **given),
        "oldest": generate(server, "stories_oldest", PROMPT, exclude_input_in_output=True, **given),
    }
    for way, answer in answers.items():
        assert (way, answer.text, answer.ids, answer.finish_reason) == (way, whole.text, whole.ids, "end_id")
    assert [len(r.ids) for r in stream.responses] == [1] * len(stream.ids)


def test_concurrent_requests_get_what_they_get_alone(server):
    asked = {}
    for seed in range(8):
        for guide in GUIDES:
            asked[guide, seed], _ = options(guide, seed)
        asked[None, seed] = {"max_tokens": 40, "seed": seed, "top_k": 9}
        asked["bad", seed] = {"guided_regex": "(" * (seed + 1)}
    requests = [(PROMPT, given) for given in asked.values()]
    answers = clients.streams(server, "stories_tight", requests, may_fail=True)
    for (guide, seed), answer in zip(asked, answers):
        if guide == "bad":
            assert isinstance(answer, Refused) and "cannot be used" in str(answer)
            continue
        given, check = options(guide, seed) if guide else ({"max_tokens": 40, "seed": seed, "top_k": 9}, lambda _: None)
        check(answer.text)
        if seed < 2:
            alone = generate(server, "stories", PROMPT, exclude_input_in_output=True, **given)
            assert (guide, seed, alone.text, alone.ids) == (guide, seed, answer.text, answer.ids)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"guided_json": '{"type": "strnig"}'}, "strnig"),
        ({"guided_regex": "a("}, "regex"),
        ({"guided_grammar": 'root ::= "a" other'}, "no rule 'other'"),
        ({"guided_grammar": "start: " + "(" * 8_000}, "cannot be used"),
        ({"guided_regex": "a" * 70_000}, "70000 bytes"),
        ({"guided_regex": "a", "guided_choice": '["b"]'}, "more than one guide"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_decoding_guide_type": "regex"}, "give both"),
        ({"guided_regex": "a", "min_tokens": 5}, "no token is allowed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_guide_is_an_error_of_its_own_request(server, given, words):
    with pytest.raises(Refused, match=re.escape(words)):
        generate(server, "stories", PROMPT, **given)
    assert generate(server, "stories", PROMPT, max_tokens=2).last.num_output_tokens == 2


@pytest.mark.parametrize("model", ["stories", "stories_full", "stories_oldest"])
def test_an_ambiguous_guide_names_its_cause_also_when_its_grammar_is_cached(server, model):
    grammar = "root ::= s\ns ::= [a-zA-Z ,.] | s s | s s s"
    expected = "its rule 's' can begin with itself and end with itself.*write 's ::= \\[a-zA-Z ,.\\]\\+'"
    for _ in range(2):
        with pytest.raises(Refused, match=expected):
            generate(server, model, PROMPT, guided_grammar=grammar, max_tokens=120, temperature=1.0, seed=38)


def test_models_without_logits_or_text_cannot_be_guided(server):
    with pytest.raises(Refused, match="synthetic runner has no logits"):
        generate(server, "synthetic", [1], guided_regex="a")


@pytest.mark.cancelling
def test_cancelling_a_guided_request_does_not_affect_the_server(server):
    async def main():
        async with clients.grpc(server) as client:
            for seed in range(10):
                regex = f"[a-z ]{{200}}{seed}"
                stream = clients.GrpcStream(
                    client, "stories", PROMPT, guided_regex=regex, stream=True, max_tokens=300, temperature=1.0
                )
                try:
                    async for _ in stream:
                        stream.cancel()
                except Refused:
                    pass

    clients.run(main())
    assert generate(server, "stories", PROMPT, guided_choice='["a"]', exclude_input_in_output=True).text == "a"
