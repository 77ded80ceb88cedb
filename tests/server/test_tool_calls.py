"""Calls of functions in the formats of all families: streamed in pieces, they are those of an answer without a stream.

A guide with a single choice makes a tiny model write them, a byte a token."""

import json

import pytest

from harness.clients import generate, generate_stream
from harness.conversations import joined
from harness.repository import ROOT, add_model
from harness.server import Server

FIXTURE = ROOT / "tests" / "fixtures" / "classes" / "qwen3-reranker"
END_ID = 265
ARGUMENTS = r'{"city": "東京 \u00e9 \ud83d\ude00 \"x\\", "days": [1, 2.5e-3, {"a": null}], "e": {}}'
CALL = '{"name": "weather", "arguments": %s}' % ARGUMENTS
REPLIES = {
    "hermes": [f"So\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>"],
    "llama3_json": [CALL.replace("arguments", "parameters") + "; " + CALL],
    "mistral": [f"[TOOL_CALLS] [{CALL}, {CALL}]", f"a[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]f{{}}"],
    "deepseek_v3": [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>",
        f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
    ],
    "kimi_k2": [f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"],
    "granite": [f"<|tool_call|>[{CALL}, {CALL}]"],
    "openai": [f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"],
}
MARKED = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("tool_calls") / "repository"
    for name in [*REPLIES, "qwen3_coder"]:
        parameters = {"gpt_model_path": FIXTURE, "tokenizer_dir": FIXTURE, "tool_call_parser": name, "reasoning_parser": "none"}
        small = {"max_tokens_in_paged_kv_cache": 1024, "exclude_input_in_output": "true"}
        add_model(repository, name, parameters | small)
    with Server(repository) as server:
        yield server


def whole_and_streamed(server, name, reply):
    """The calls of an answer, and the pieces of the same in a stream; all else is equal."""
    options = {"guided_choice": json.dumps([reply]), "return_tool_calls": True, "max_tokens": 450, "end_id": END_ID}
    whole = generate(server, name, "a", **options)
    streamed = generate_stream(server, name, "a", **options)
    assert streamed.text == whole.text
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    pieces = [piece for part in streamed.tensors("tool_calls") for piece in json.loads(part)]
    return json.loads(whole.last.tensors["tool_calls"]), pieces


@pytest.mark.parametrize("name", REPLIES)
def test_pieces_make_the_calls_of_a_whole_answer(server, name):
    for reply in REPLIES[name]:
        whole, pieces = whole_and_streamed(server, name, reply)
        assert whole[0]["function"] == {"name": "weather", "arguments": ARGUMENTS}
        assert len(pieces) > 50, "a piece for nearly every token"
        assert joined(pieces) == whole


def test_calls_that_are_no_json_come_whole(server):
    whole, pieces = whole_and_streamed(server, "qwen3_coder", MARKED)
    assert pieces == [{**whole[0], "index": 0}]
    assert json.loads(whole[0]["function"]["arguments"]) == {"city": "Oslo"}
