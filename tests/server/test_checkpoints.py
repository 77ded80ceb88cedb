"""Checkpoints that were quantised before they were saved, in a real server."""

import json

import pytest

from harness.clients import generate, streams
from harness.repository import ROOT, STORIES, add_model
from harness.server import Server

FIXTURES = ROOT / "tests" / "fixtures" / "quantised"
NAMES = ["gptq", "gptq-act-order", "awq", "compressed-w8a8", "gguf-q4_0-split", "gguf-q4_k"]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    repository = tmp_path_factory.mktemp("checkpoints") / "repository"
    for name in NAMES:
        add_model(repository, name, {"gpt_model_path": FIXTURES / name})
    text = 'input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]'
    add_model(repository, "text", {"gpt_model_path": FIXTURES / "gguf-q4_k"}, fields=text)
    add_model(repository, "stories", checkpoint=STORIES)
    loads = [f"--load-model={name}" for name in [*NAMES, "stories"]]
    with Server(repository, "--model-control-mode=explicit", *loads) as server:
        yield server


@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_checkpoint_generates_what_transformers_does(quantised, name):
    expected = json.loads((FIXTURES / name / "expected.json").read_text())["prompts"]
    requests = [(prompt["prompt"], {"max_tokens": len(prompt["greedy"])}) for prompt in expected]
    answers = streams(quantised, name, requests)
    assert [answer.ids for answer in answers] == [prompt["greedy"] for prompt in expected]


def test_a_gguf_file_without_a_tokenizer_takes_no_text(quantised):
    reason = quantised.load("text")
    assert "tokenizer.json" in reason and "a GGUF file's own vocabulary is not read" in reason
    assert generate(quantised, "stories", "Once", max_tokens=1).text
