"""Anthropic's own client for Node, as it comes from npm, against the server with Anthropic's API."""

import json
import pathlib

import pytest

from harness import node
from harness.conversations import REPLY, add_calling_model
from harness.front import Front
from harness.repository import STORIES, add_model
from harness.server import Server, assert_blocks_come_back

pytestmark = pytest.mark.complete


def test_the_client_for_node(repository, tmp_path):
    add_model(repository, "stories", checkpoint=STORIES)
    add_calling_model(repository, "chat")
    keys = tmp_path / "keys"
    keys.write_text("sk-two\n")
    script = pathlib.Path(__file__).parent / "node" / "anthropic.mjs"
    with Server(repository) as server, Front(server) as front, Front(server, f"--api-key-file={keys}") as locked:
        node.run_tests(script, FRONT=front.url, LOCKED_FRONT=locked.url, REPLY=json.dumps(REPLY))
        # It has left a stream.
        assert_blocks_come_back(server, "stories")
