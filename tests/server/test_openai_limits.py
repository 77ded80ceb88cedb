"""Limits of the server with OpenAI's API on what all clients have together: connections, and bytes of bodies."""

import contextlib
import http.client
import json
import select

import pytest

from harness.front import Front
from harness.repository import STORIES, add_model
from harness.server import Server

# Longer than any answer would take if it came. The test passes if it waits in vain.
LONG_S = 0.5


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_limits") / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    with Server(repository) as server:
        yield server


def test_a_connection_beyond_the_limit_waits_until_another_one_closes(server):
    health = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    with Front(server, "--max-connections=2") as front, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(front.sent(health)) for _ in range(2))
        for connection in (first, second):
            # The connection stays open behind its answer.
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with front.sent(health) as third:
            assert select.select([third], [], [], LONG_S)[0] == []
            first.close()
            assert third.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_bodies_have_a_limit_together(server):
    body = json.dumps({"model": "stories", "prompt": "a" * 900_000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    limits = ["--max-request-bytes=1000000", "--max-body-bytes=1000000"]
    with Front(server, *limits) as front:

        def answer():
            return front.call("POST", "/v1/completions", {"model": "stories", "prompt": "a" * 300_000})

        with front.sent(head.encode() + body[:800_000]) as slow:
            # Until the front has read what was sent: then there is no room for another.
            while (refused := answer()).status != 429:
                assert refused.json["error"]["code"] == "context_length_exceeded", refused
            assert "Retry-After" in {name.title() for name in refused.headers}, refused.headers
            slow.sendall(body[800_000:])
            response = http.client.HTTPResponse(slow)
            response.begin()
            assert json.loads(response.read())["error"]["code"] == "context_length_exceeded"
        assert answer().json["error"]["code"] == "context_length_exceeded"
