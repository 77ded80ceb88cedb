"""What the README tells a user to type does what it says."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from harness import clients
from harness.clients import generate
from harness.repository import ROOT

README = (ROOT / "README.md").read_text()
HTTP, GRPC = "localhost:8000", "localhost:8001"


def blocks(language):
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def curl_commands():
    """The arguments of every curl command."""
    commands = []
    for block in blocks("sh"):
        for word in shlex.split(block, comments=True):
            if word == "curl":
                commands.append([])
            elif commands:
                commands[-1].append(word)
    return commands


CURL_COMMANDS = curl_commands()


def test_the_readmes_examples_are_found():
    assert len(CURL_COMMANDS) >= 3
    assert len(blocks("python")) == 1


def test_the_python_example_prints_the_story(server):
    (example,) = blocks("python")
    assert GRPC in example
    printed = subprocess.run(
        [sys.executable, "-c", example.replace(GRPC, server.grpc_url)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=clients.TIMEOUT_S,
        check=True,
    ).stdout
    options = {"max_tokens": 60, "stop": '["The end"]', "exclude_input_in_output": True}
    assert printed and printed == generate(server, "stories_full", "Once upon a time", **options).text


@pytest.mark.parametrize("arguments", CURL_COMMANDS, ids=range(len(CURL_COMMANDS)))
def test_a_curl_example_is_answered(server, arguments):
    (url,) = (word for word in arguments if word.startswith(HTTP))
    body = arguments[arguments.index("-d") + 1]
    status, answer = server.http("POST", url.removeprefix(HTTP), body)
    assert status == 200, answer
    if url.endswith("/generate_stream"):
        events = [line.removeprefix("data: ") for line in answer.decode().splitlines() if line]
        responses = [json.loads(event) for event in events]
        assert len(responses) > 1
    else:
        responses = [json.loads(answer)]
    reasons = responses[-1]["finish_reason"]
    # Of several sequences each has one.
    assert set(reasons if isinstance(reasons, list) else [reasons]) <= {"length", "end_id"}
    assert any(response["text_output"] for response in responses)
