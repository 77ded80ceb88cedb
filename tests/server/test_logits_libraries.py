"""Logits post-processors in shared libraries, in a real server: the examples in C and in Rust, and processors
that break the rules."""

import asyncio
import json
import os
import re
import subprocess
import time

import numpy
import pytest

from harness import clients
from harness.clients import GrpcStream, Refused, generate, tensor
from harness.libraries import BAD_TABLE, C_EXAMPLE, MISBEHAVING, compile_c
from harness.repository import ROOT, STORIES
from harness.synthetic import Gate

PROMPT = "Once upon a time, there was a brave fox named Finn."
LIBRARY = "logits_post_processor_library"
CLIENT_ID_AS_TENSOR = """
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "client_id" data_type: TYPE_UINT64 dims: [ 1 ] optional: true }
]
max_batch_size: 8
dynamic_batching { }
"""


def compile_rust():
    """The library of the Rust example."""
    command = ["cargo", "build", "--package", "logits-processors-example", "--message-format=json"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    artifacts = (json.loads(line) for line in output.splitlines())
    files = (name for one in artifacts for name in one.get("filenames", ()))
    return next(name for name in files if name.endswith("logits_processors_example.so"))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory, deployment):
    add_model = deployment.add_model
    folder = tmp_path_factory.mktemp("libraries")
    repository = folder / "repository"
    c = compile_c(C_EXAMPLE, folder / "example.so")
    rogue = compile_c(MISBEHAVING, folder / "misbehaving.so")
    add_model(repository, "c", {LIBRARY: c}, checkpoint=STORIES)
    add_model(repository, "rust", {LIBRARY: compile_rust()}, checkpoint=STORIES)
    add_model(repository, "rogue", {LIBRARY: rogue}, checkpoint=STORIES)
    add_model(repository, "tensors", {LIBRARY: rogue}, fields=CLIENT_ID_AS_TENSOR, checkpoint=STORIES)
    with deployment.server(repository) as server:
        yield server


def named(name, arguments=""):
    return {"logits_post_processor_name": name, "logits_post_processor_args": str(arguments)}


def ids(server, model, **options):
    options = {"max_tokens": 30, **options}
    return generate(server, model, PROMPT, exclude_input_in_output=True, **options).ids


def test_the_examples_do_what_they_document(libraries):
    free = ids(libraries, "c")
    often = max(free, key=free.count)
    assert free.count(often) > 1
    capped = ids(libraries, "c", **named("at_most", f"{often} 1"))
    assert capped.count(often) == 1
    recent = ids(libraries, "rust", **named("avoid_recent", 8))
    assert all(recent[n] not in recent[max(0, n - 8) : n] for n in range(len(recent)))
    assert ids(libraries, "rust", **named("avoid_recent_batched", 8)) == recent
    once = ids(libraries, "c", **named("avoid_last"))
    assert once == ids(libraries, "c", **named("avoid_last_batched")) == ids(libraries, "rust", **named("avoid_recent", 1))


@pytest.mark.parametrize(
    "model, name, arguments, words",
    [
        ("c", "at_most", "many", "rejected by 'at_most': 'many' is not TOKEN COUNT"),
        ("rust", "avoid_recent", "0", "'0' is not a number of tokens, 1 or above"),
        ("rust", "avoid_recent", "5000", "logits post-processor 'avoid_recent': the vocabulary has only 1536 tokens"),
        ("c", "avoid_lost", "", "did you mean 'avoid_last'?"),
        ("rogue", "refuses", "", "rejected by 'refuses': never"),
        ("rogue", "fails", "3", "logits post-processor 'fails': enough after 3 tokens"),
        ("rogue", "fails_batched", "3", "logits post-processor 'fails_batched': enough after 3 tokens"),
        ("rogue", "fails_silently", "", "it returned status -3 without a reason"),
        ("rogue", "shouts", "", "xxxx"),
        ("rogue", "writes_before", "", "'writes_before': it wrote outside of the logits"),
        ("rogue", "writes_behind", "", "'writes_behind': it wrote outside of the logits"),
        ("rogue", "writes_behind_batched", "", "it wrote outside of the logits"),
        ("rogue", "makes_nan", "", "it set the logit of token 5 to NaN"),
        ("rogue", "rules_all_out", "", "no token is allowed: the logits post-processor"),
    ],
)
def test_a_processors_failure_is_an_error_of_its_own_request(libraries, model, name, arguments, words):
    given = {**named(name, arguments), "max_tokens": 10}
    with pytest.raises(Refused, match=re.escape(words)):
        generate(libraries, model, PROMPT, **given)
    # Responses that a stream has already received stay valid.
    stream = clients.GenerateStream(libraries, model, PROMPT, stream=True, **given)
    tokens = []
    try:
        with pytest.raises(Refused, match=re.escape(words)):
            for response in stream:
                tokens += response.ids
    finally:
        stream.close()
    assert len(tokens) == (3 if arguments == "3" else 0)
    assert len(ids(libraries, model, max_tokens=2)) == 2


def test_concurrent_requests_get_what_they_get_alone(libraries):
    kinds = [
        {},
        named("nothing"),
        named("fails", 9),
        named("fails_batched", 5),
        named("writes_behind_batched"),
        named("writes_before"),
        named("makes_nan"),
        named("sleeps", 300),
        {**named("nothing"), "guided_regex": "[a-z ]+"},
        named("force_tokens", '{"tokens": [300, 301], "start": 2}'),
    ]

    def options(kind, seed):
        return {"max_tokens": 25, "temperature": 1.0, "seed": seed, **kinds[kind]}

    def outcome(answer):
        return re.sub(r"^\[.*?\] ", "", str(answer)) if isinstance(answer, Refused) else (answer.ids, answer.text)

    asked = [(kind, seed) for seed in range(4) for kind in range(len(kinds))]
    requests = [(PROMPT, options(*it)) for it in asked]
    answers = clients.streams(libraries, "rogue", requests, may_fail=True)

    num_refused = 0
    for (kind, seed), answer in zip(asked, answers):
        try:
            alone = generate(libraries, "rogue", PROMPT, exclude_input_in_output=True, **options(kind, seed))
        except Refused as refused:
            alone = refused
            num_refused += 1
        assert (kind, seed, outcome(answer)) == (kind, seed, outcome(alone))
    assert num_refused == 5 * 4


def test_a_processor_gets_the_client_id_which_need_not_be_unique(libraries):
    """The first token encodes the client's id: 0 for none, otherwise its last three digits plus one."""
    asked = [None, 0, 41, 41, 2**64 - 1]
    told = [0, 1, 42, 42, 616]
    hold = {"max_tokens": 4, "ignore_eos": True, **named("tells")}

    async def by_parameter(client, client_id):
        # Triton's own integers are signed.
        given = {} if client_id is None else {"client_id": client_id if client_id < 2**63 else str(client_id)}
        return await clients.stream(client, "rogue", PROMPT, **hold, **given)

    async def by_tensor(client, client_id):
        inputs = [tensor("text_input", numpy.array([[PROMPT.encode()]], dtype=object), "BYTES")]
        if client_id is not None:
            inputs.append(tensor("client_id", numpy.array([[client_id]], dtype=numpy.uint64), "UINT64"))
        stream = GrpcStream(client, "tensors", inputs, stream=True, **hold)
        return clients.Answer([response async for response in stream])

    async def main(way):
        async with clients.grpc(libraries) as client:
            return await asyncio.gather(*(way(client, client_id) for client_id in asked))

    for way in (by_parameter, by_tensor):
        firsts = [answer.ids[0] for answer in clients.run(main(way))]
        assert [(first - firsts[0]) % 1536 for first in firsts] == told

    for wrong in (-1, "me", 1.5):
        with pytest.raises(Refused, match="option 'client_id': .* is not an integer from 0 to 18446744073709551615"):
            generate(libraries, "rogue", PROMPT, client_id=wrong, max_tokens=1)


def test_a_processor_gets_the_request_id(libraries):
    async def main():
        async with clients.grpc(libraries) as client:
            given = {"max_tokens": 6, **named("tells")}
            one = await clients.stream(client, "rogue", PROMPT, request_id="abc", **given)
            other = await clients.stream(client, "rogue", PROMPT, request_id="wxyz", **given)
            none = await clients.stream(client, "rogue", PROMPT, **given)
            return one.ids, other.ids, none.ids

    one, other, none = clients.run(main())
    # Each character of the id adds five to the first token; without an id, the value is that of 99
    # characters.
    assert (other[0] - one[0]) % 1536 == 5
    assert (none[0] - one[0]) % 1536 == 5 * 96


@pytest.mark.cancelling
def test_a_cancelled_request_destroys_its_state(libraries, tmp_path):
    diary = tmp_path / "diary"

    def count(what):
        return sum(line.startswith(what) for line in diary.read_text().splitlines())

    async def main():
        async with clients.grpc(libraries) as client:
            for kind in ("notes", "notes_batched"):
                stream = GrpcStream(
                    client, "rogue", PROMPT, max_tokens=400, ignore_eos=True, stream=True, **named(kind, diary)
                )
                seen = 0
                async for _ in stream:
                    seen += 1
                    if seen == 5:
                        stream.cancel()
                        break
            await clients.stream(client, "rogue", PROMPT, max_tokens=5, **named("notes", diary))

    clients.run(main())
    deadline = time.monotonic() + 10
    while count("destroy") < 3:
        assert time.monotonic() < deadline, diary.read_text()
        time.sleep(0.05)
    assert (count("create"), count("destroy")) == (3, 3)
    assert 5 <= count("batch") < 200


def test_a_slow_processor_delays_its_step_but_not_finished_answers(libraries):
    async def main():
        async with clients.grpc(libraries) as client:
            slow = clients.stream(client, "rogue", PROMPT, max_tokens=5, **named("sleeps", 50_000))
            free = clients.stream(client, "rogue", PROMPT, max_tokens=5)
            start = time.monotonic()
            return await asyncio.gather(slow, free), time.monotonic() - start

    (slow, free), seconds = clients.run(main())
    assert slow.ids == free.ids and seconds >= 0.2


@pytest.mark.also_on_gpu
def test_a_library_is_opened_and_closed_with_its_model(repository, deployment):
    add_model = deployment.add_model
    folder = add_model(repository, "model", {LIBRARY: "processors.so"}, checkpoint=STORIES).parent
    library = folder / "processors.so"

    def put(source):
        # Replaces the open file by a rename; never writes into it.
        compile_c(source, folder / "new.so")
        os.replace(folder / "new.so", library)

    put(MISBEHAVING)
    with deployment.server(repository, "--model-control-mode=explicit", "--load-model=model") as server:
        free = ids(server, "model")
        assert ids(server, "model", **named("nothing")) == free
        assert str(library) in open(f"/proc/{server.process.pid}/maps").read()

        # A request in flight keeps it open.
        gate = Gate(repository / "gate", num_steps=1)
        stream = GenerateWhile(server, "model", max_tokens=200, ignore_eos=True, **named("waits", gate.file))
        server.unload("model")
        gate.open()
        assert len(stream.rest()) == 200
        server.wait_for_state("model", "UNAVAILABLE")
        deadline = time.monotonic() + 10
        while str(library) in open(f"/proc/{server.process.pid}/maps").read():
            assert time.monotonic() < deadline, "the library is still open"
            time.sleep(0.05)

        put(C_EXAMPLE)
        assert server.load("model") is None
        with pytest.raises(Refused, match="no post-processor 'nothing'"):
            ids(server, "model", **named("nothing"))
        assert ids(server, "model", **named("avoid_last")) != []
        server.unload("model")
        server.wait_for_state("model", "UNAVAILABLE")

        compile_c(BAD_TABLE, folder / "new.so", "-DWRONG=VERSION")
        os.replace(folder / "new.so", library)
        assert "built for version 1 of inflight_logits_processor.h" in server.load("model")
        library.write_text("This is no library.")
        assert "file too short" in server.load("model")
        library.unlink()
        assert "No such file" in server.load("model")
        for others, words in [
            ({"gpt_model_type": "V1"}, "with gpt_model_type V1 there are no logits post-processors"),
            ({"runner": "synthetic"}, "the synthetic runner has no logits"),
        ]:
            add_model(repository, "model", {LIBRARY: "processors.so", **others})
            assert words in server.load("model")
        assert server.is_alive()


class GenerateWhile:
    """A running stream."""

    def __init__(self, server, model, **options):
        self._stream = clients.GenerateStream(server, model, PROMPT, stream=True, **options)
        self._responses = iter(self._stream)
        self._tokens = list(next(self._responses).ids)

    def rest(self):
        """All of its tokens."""
        for response in self._responses:
            self._tokens += response.ids
        self._stream.close()
        return self._tokens
