"""OpenAI's own client for Node, as it comes from npm, against the server with OpenAI's API."""

import pathlib

import pytest

from harness import node
from harness.conversations import add_calling_model
from harness.front import Front
from harness.repository import ROOT, STORIES, add_model
from harness.server import Server, assert_blocks_come_back

pytestmark = pytest.mark.complete

EMBEDDINGS = ROOT / "tests" / "fixtures" / "embeddings" / "qwen3"


def test_the_client_for_node(repository, tmp_path):
    add_model(repository, "stories", checkpoint=STORIES)
    add_calling_model(repository, "chat")
    parameters = {"task": "embed", "gpt_model_path": EMBEDDINGS, "tokenizer_dir": EMBEDDINGS}
    add_model(repository, "qwen3", parameters)
    keys = tmp_path / "keys"
    keys.write_text("sk-two\n")
    with (
        Server(repository) as server,
        Front(server) as front,
        Front(server, f"--api-key-file={keys}") as locked,
        Front(server, "--max-requests=1") as narrow,
    ):
        script = pathlib.Path(__file__).parent / "node" / "openai.mjs"
        node.run_tests(script, FRONT=front.url, LOCKED_FRONT=locked.url, NARROW_FRONT=narrow.url)
        # It has left a stream, and an answer that it waited for.
        assert_blocks_come_back(server, "stories")
