"""Requests of maximum size: their cost in server memory."""

import json
import pathlib

import pytest

from harness import clients
from harness.clients import Refused, generate
from harness.repository import STORIES, add_model
from harness.server import Server

PROMPT = "Once upon a time"
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    repository = tmp_path_factory.mktemp("large") / "repository"
    deployment.add_model(repository, "stories", checkpoint=STORIES)
    with deployment.server(repository) as server:
        yield server


class Peak:
    """Peak memory of a server, above its memory at the start."""

    def __init__(self, server):
        self.folder = pathlib.Path("/proc", str(server.process.pid))
        # Resets the peak to the current memory.
        (self.folder / "clear_refs").write_text("5")
        self.before = self._read("VmHWM")

    def _read(self, name):
        lines = (self.folder / "status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(name))
        return int(line.split()[1]) * 1024

    def grown(self):
        return self._read("VmHWM") - self.before


def refused(server, name, text):
    """The memory that a rejected request adds to the server, and its error."""
    peak = Peak(server)
    with pytest.raises(Refused) as refusal:
        generate(server, "stories", "" if name == "messages" else PROMPT, **{name: text})
    return peak.grown(), str(refusal.value)


# Options are parsed before a driver has the request.
@pytest.mark.deployments("iterative")
@pytest.mark.parametrize("name", ["messages", "guided_json", "allowed_token_ids", "sampling_parameters", "stop"])
def test_an_option_that_is_too_large_costs_no_memory_beyond_tritons(server, name):
    # JSON that takes many times its size in memory once parsed.
    text = json.dumps([{"role": "user", "content": ""}] * (24 * MEBIBYTE // 34))
    assert len(text) > 23 * MEBIBYTE
    # An unknown option's value is never parsed. The memory that Triton takes depends on which of its threads
    # reads a request, and on what earlier requests left behind.
    triton = max(refused(server, "no_such_option", text)[0] for _ in range(4))
    tries = [refused(server, name, text) for _ in range(3)]
    for _, message in tries:
        assert f"option '{name}' has more than" in message, message
    ours = min(grown for grown, _ in tries)
    assert ours < triton + 8 * MEBIBYTE, (ours, triton)


def test_log_probabilities_that_could_not_fit_are_rejected_before_they_run(repository):
    add_model(repository, "small", {"logits_memory_bytes": MEBIBYTE}, checkpoint=STORIES)
    with Server(repository) as small:
        few = {"max_tokens": 20, "logprobs": 20, "ignore_eos": True}
        assert len(json.loads(generate(small, "small", PROMPT, **few).responses[0].tensors["logprobs"])) == 20
        for options in ({"max_tokens": 1000}, {"max_tokens": 100, "n": 10, "temperature": 1.0}):
            words = "the log-probabilities of 1000 tokens, .* logits_memory_bytes is 1048576; lower max_tokens"
            with pytest.raises(Refused, match=words):
                generate(small, "small", PROMPT, **{**few, **options})


def test_log_probabilities_take_a_few_times_their_text(repository):
    """A tree of JSON would take ten times as much memory as the text that is made of it."""
    add_model(repository, "stories", checkpoint=STORIES)
    options = {"n": 8, "temperature": 1.0, "max_tokens": 900, "ignore_eos": True}
    with Server(repository) as server:
        # The blocks of the cache are written for the first time.
        generate(server, "stories", PROMPT, **options)
        peak = Peak(server)
        (response,) = generate(server, "stories", PROMPT, logprobs=20, **options).responses
        num_bytes = sum(map(len, response.tensors["logprobs"]))
        assert num_bytes > 8 * 900 * 21 * 40
        # The entries of all tokens, the text, and Triton's own copies of it on the way to the client.
        assert peak.grown() < 9 * num_bytes, (peak.grown(), num_bytes)


def test_a_large_streamed_response_does_not_delay_other_requests(server):
    options = {"n": 4, "temperature": 1.0, "max_tokens": 60, "logprobs": 20, "ignore_eos": True}

    async def main():
        async with clients.grpc(server) as client:
            whole = await clients.stream(client, "stories", PROMPT, stream=False, **options)
            streamed = await clients.stream(client, "stories", PROMPT, stream_interval=60, **options)
        return whole, streamed

    whole, streamed = clients.run(main())
    entries = [
        [json.loads(text) for text in response.arrays["logprobs"][0]] for response in streamed.responses if response.arrays
    ]
    sizes = [sum(len(token) for row in rows for token in row) for rows in entries]
    # 300, and the tokens of 4 rows in one step.
    assert max(sizes) <= 300 + 4 * 21, sizes
    (expected,) = (
        [json.loads(text) for text in response.arrays["logprobs"][0]] for response in whole.responses if response.arrays
    )
    assert [sum(rows, []) for rows in zip(*entries)] == expected
