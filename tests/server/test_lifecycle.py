"""Models that are unloaded, and servers that stop, while requests run: every accepted request is answered."""

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import pathlib
import time

import numpy
import pytest
from tritonclient.utils import InferenceServerException

from harness import clients
from harness.clients import GrpcStream, generate
from harness.repository import FULL_ANSWER, QUEUED, STORIES, add_model, add_synthetic
from harness.server import Server, assert_blocks_come_back, num_pending, num_requests, until
from harness.synthetic import ENDLESS, ENDLESS_SEQ_LEN, Gate, continuation

NUM_STREAMS = 16


@pytest.fixture
def gate(tmp_path):
    """The gate that holds the requests in flight of `explicit`'s models."""
    return Gate(tmp_path / "gate", num_steps=1)


@pytest.fixture
def explicit(repository, gate, deployment):
    """A server for a single test, which loads its models itself."""
    deployment.add_synthetic(repository, "synthetic", {"synthetic_gate": gate.file})
    deployment.add_synthetic(repository, "full", {"synthetic_gate": gate.file}, fields=FULL_ANSWER)
    with deployment.server(repository, "--model-control-mode=explicit") as server:
        yield server


async def held_streams(client, gate):
    """Streams that have received their first token, as tasks that return all tokens; they continue when the
    gate opens. The model's steps are counted from its load."""
    gate.allow(1)
    first = await started_streams(client, range(1))
    others = asyncio.create_task(started_streams(client, range(1, NUM_STREAMS)))
    num_steps = itertools.count(2)

    def have_started():
        """Allows another step, which takes the requests that have arrived."""
        gate.allow(next(num_steps))
        return others.done()

    await until(have_started)
    return first + await others


async def started_streams(client, numbers=range(NUM_STREAMS), model="synthetic", max_tokens=100):
    """Streams that have received their first token, as tasks that return all tokens."""

    async def one(n, started):
        tokens = []
        async for response in GrpcStream(client, model, [n], max_tokens=max_tokens, stream=True):
            tokens += response.ids or []
            started.set()
        return tokens

    started = [asyncio.Event() for _ in numbers]
    tasks = [asyncio.create_task(one(n, event)) for n, event in zip(numbers, started)]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), clients.TIMEOUT_S)
    return tasks


async def assert_all_right(tasks, max_tokens=100):
    for n, tokens in enumerate(await asyncio.wait_for(asyncio.gather(*tasks), clients.TIMEOUT_S)):
        assert tokens == continuation([n], max_tokens)


def test_an_unload_lets_running_streams_finish_and_takes_no_new_ones(explicit, gate):
    assert explicit.load("synthetic") is None

    async def main():
        async with clients.grpc(explicit) as client:
            tasks = await held_streams(client, gate)
            await asyncio.to_thread(explicit.unload, "synthetic")
            with pytest.raises(clients.Refused, match="synthetic"):
                await clients.stream(client, "synthetic", [1], max_tokens=1)
            gate.open()
            await assert_all_right(tasks)

    clients.run(main())
    explicit.wait_for_state("synthetic", "UNAVAILABLE")
    assert explicit.load("synthetic") is None
    assert generate(explicit, "synthetic", [7], max_tokens=3).ids[-3:] == continuation([7], 3)


def test_a_reload_under_load_loses_no_requests(explicit, gate):
    assert explicit.load("synthetic") is None

    async def main():
        async with clients.grpc(explicit) as client:
            for _ in range(4):
                tasks = await held_streams(client, gate)
                await asyncio.to_thread(explicit.unload, "synthetic")
                gate.open()
                await assert_all_right(tasks)
                await asyncio.to_thread(explicit.wait_for_state, "synthetic", "UNAVAILABLE")
                assert await asyncio.to_thread(explicit.load, "synthetic") is None

    clients.run(main())


def num_instances(server):
    """How many instances have not been deleted: each has a thread that sends its responses."""
    num = 0
    for thread in pathlib.Path(f"/proc/{server.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            num += (thread / "comm").read_text().startswith("inflight-respon")
    return num


def test_loading_a_model_over_itself_does_not_affect_the_old_one(explicit, deployment, repository, tmp_path):
    # Old and new overlap, and have metrics with the same labels, which once corrupted the server's heap.
    def configure(number):
        gate = Gate(tmp_path / f"gate{number}")
        parameters = {"synthetic_gate": gate.file, "synthetic_step_us": 1000 + number}
        deployment.add_synthetic(repository, "synthetic", parameters)
        return gate

    gate = configure(0)
    assert explicit.load("synthetic") is None

    async def main():
        nonlocal gate
        async with clients.grpc(explicit) as client:
            tasks = []
            for number in range(1, 9):
                tasks += await held_streams(client, gate)
                of_the_old = gate
                gate = configure(number)
                assert await asyncio.to_thread(explicit.load, "synthetic") is None
                # Instances compute one at a time, so a held instance blocks the others.
                of_the_old.open()
            gate.open()
            for first in range(0, len(tasks), NUM_STREAMS):
                await assert_all_right(tasks[first : first + NUM_STREAMS])
            # The old instances are deleted shortly after their last request; the new one must not be
            # affected.
            await until(lambda: num_instances(explicit) == 1)
            await assert_all_right(await started_streams(client))

    clients.run(main())


def test_unloading_a_model_frees_its_memory(repository):
    add_model(repository, "stories", checkpoint=STORIES)

    def resident_kib(server):
        status = open(f"/proc/{server.process.pid}/status").read()
        return int(status.split("VmRSS:")[1].split()[0])

    with Server(repository, "--model-control-mode=explicit") as server:
        sizes = []
        for _ in range(8):
            assert server.load("stories") is None
            generate(server, "stories", "Once", max_tokens=5)
            server.unload("stories")
            server.wait_for_state("stories", "UNAVAILABLE")
            sizes.append(resident_kib(server))
        # The allocator may keep memory of the first loads; later loads must not add anything of the model's
        # size.
        assert sizes[-1] - sizes[2] < 8 * 1024, sizes


def test_a_server_that_stops_finishes_its_streams_and_exits_cleanly(explicit, gate):
    assert explicit.load("synthetic") is None

    async def main():
        async with clients.grpc(explicit) as client:
            tasks = await held_streams(client, gate)
            stopping = await begun_stop(explicit, gate)
            await assert_all_right(tasks)
            return await stopping

    assert clients.run(main()) == 0


def test_a_server_that_stops_finishes_a_whole_answer_and_exits_cleanly(explicit, gate):
    assert explicit.load("full") is None
    # The first step reads the pipe, and a pipe can only be opened for writing while it is open for reading.
    gate.open()
    os.mkfifo(gate.file)

    async def main():
        async with clients.grpc(explicit) as client:
            whole = asyncio.create_task(clients.stream(client, "full", [3], max_tokens=100, stream=False))
            with await asyncio.to_thread(open, gate.file, "w"):
                stopping = await begun_stop(explicit, gate)
            assert (await whole).ids[-100:] == continuation([3], 100)
            return await stopping

    assert clients.run(main()) == 0


async def begun_stop(server, gate):
    """Stops the server while requests are held, and then releases them; returns a task for the exit
    status."""
    stopping = asyncio.create_task(asyncio.to_thread(server.stop))
    await until(lambda: "Timeout 30: Found" in server.log())
    gate.open()
    return stopping


def test_a_server_without_requests_stops_at_once(explicit):
    assert explicit.load("synthetic") is None
    start = time.monotonic()
    assert explicit.stop() == 0
    # Its exit timeout, for which it would wait if a request never ended, is 30 s.
    assert time.monotonic() - start < 15


def test_a_server_without_metrics_serves(repository):
    add_synthetic(repository, "synthetic")
    with Server(repository, "--allow-metrics=false") as server:
        assert generate(server, "synthetic", [7], max_tokens=3).ids[-3:] == continuation([7], 3)


def num_steps(server, model):
    """Number of steps that the model has computed, from the metrics."""
    labels = (("general_type", "iteration_counter"), ("model", model), ("version", "1"))
    return server.metrics().get(("nv_trt_llm_general_metrics", labels), 0)


def wait_for_steps(server, model, count):
    """Waits until the metrics show `count` computed steps."""
    deadline = time.monotonic() + 10
    while num_steps(server, model) < count:
        assert time.monotonic() < deadline, f"{num_steps(server, model)} steps"
        time.sleep(0.05)


@pytest.mark.parametrize("fields", ["", FULL_ANSWER], ids=["decoupled", "full answer"])
def test_a_warmed_up_model_computes_before_its_first_request(repository, fields):
    warmup = """
    model_warmup {
      name: "two, three times" batch_size: 2 count: 3
      inputs { key: "input_ids" value { data_type: TYPE_INT32 dims: [ 4 ] zero_data: true } }
    }
    """
    add_synthetic(repository, "synthetic", {"default_max_tokens": 5}, fields=fields + warmup)
    with Server(repository) as server:
        wait_for_steps(server, "synthetic", 15)
        assert generate(server, "synthetic", [7], max_tokens=3).ids[-3:] == continuation([7], 3)
        successes = ("nv_inference_request_success", (("model", "synthetic"), ("version", "1")))
        assert server.metrics()[successes] == 1, "the warm-up is not counted"


@pytest.mark.deployments("iterative")
def test_a_gap_between_two_slots_is_not_treated_as_a_warm_up(explicit, gate):
    """Triton fills it with a copy of another request, which has no sequence either."""
    assert explicit.load("synthetic") is None

    async def main():
        async with clients.grpc(explicit) as client:
            below = aiter(GrpcStream(client, "synthetic", [1], max_tokens=20, stream=True))
            await anext(below)
            above = asyncio.create_task(clients.stream(client, "synthetic", [2], max_tokens=100))
            await until(lambda: num_pending(explicit, "synthetic") == 1)
            gate.open()
            async for _ in below:
                pass
            return await above

    assert clients.run(main()).ids == continuation([2], 100)
    assert_blocks_come_back(explicit, "synthetic")
    assert 100 <= num_steps(explicit, "synthetic") < 130


def test_a_model_can_be_warmed_up_with_a_custom_text(repository):
    warmup = """
    model_warmup {
      name: "text" batch_size: 1
      inputs { key: "text_input" value { data_type: TYPE_STRING dims: [ 1 ] input_data_file: "prompt" } }
    }
    """
    version = add_model(repository, "stories", {"default_max_tokens": 8}, fields=warmup, checkpoint=STORIES)
    files = version.parent / "warmup"
    files.mkdir()
    text = b"Once upon a time"
    (files / "prompt").write_bytes(len(text).to_bytes(4, "little") + text)
    with Server(repository) as server:
        wait_for_steps(server, "stories", 8)
        assert generate(server, "stories", "Once", max_tokens=5).text


def test_a_warm_up_request_that_cannot_be_served_is_skipped_with_a_warning(repository):
    """An error response would crash server 2.51."""
    fields = """
    input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
    input { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] }
    model_warmup {
      name: "no tokens" batch_size: 1
      inputs { key: "text_input" value { data_type: TYPE_STRING dims: [ 1 ] zero_data: true } }
      inputs { key: "max_tokens" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }
    }
    """
    add_model(repository, "stories", fields=fields, checkpoint=STORIES)
    with Server(repository) as server:
        assert "a request of the model_warmup is not served" in server.log()
        assert generate(server, "stories", "Once", max_tokens=5).text


def test_two_instances_share_the_load(repository, deployment):
    pair = "instance_group { count: 2 kind: KIND_CPU } max_batch_size: 8"
    deployment.add_synthetic(repository, "synthetic", fields=pair)
    with deployment.server(repository) as server:

        async def main():
            async with clients.grpc(server) as client:
                await assert_all_right(await started_streams(client))

        clients.run(main())


@pytest.mark.parametrize("fields", ["", QUEUED], ids=["iterative", "queued"])
def test_requests_of_an_unloaded_model_end_after_the_drain_timeout(repository, fields):
    drained = {"max_seq_len": ENDLESS_SEQ_LEN, "drain_timeout_seconds": 1}
    add_synthetic(repository, "drained", drained, fields=f"max_batch_size: 1 {fields}")

    async def main():
        async with clients.grpc(server) as client:
            running = asyncio.create_task(clients.stream(client, "drained", [1], max_tokens=ENDLESS))
            await until(lambda: num_requests(server, "drained", "active") == 1)
            waiting = asyncio.create_task(clients.stream(client, "drained", [2], max_tokens=ENDLESS))
            await until(lambda: num_pending(server, "drained") == 1)
            await asyncio.to_thread(server.unload, "drained")
            assert server.http("GET", "/v2/models/drained/ready")[0] != 200
            with pytest.raises(clients.Refused, match="drained"):
                await clients.stream(client, "drained", [3], max_tokens=1)
            with pytest.raises(InferenceServerException) as refused:
                await client.infer("drained", [clients.tensor("input_ids", numpy.array([[3]], numpy.int32), "INT32")])
            # Triton's own status for a model without versions: the request does not reach the backend.
            assert "NOT_FOUND" in refused.value.status()
            return await asyncio.gather(running, waiting)

    with Server(repository) as server:
        running, waiting = clients.run(main())
        assert running.finish_reason == waiting.finish_reason == "timed_out"
        assert len(running.ids) > 0
        assert running.ids == continuation([1], len(running.ids))
        assert waiting.ids == []
        server.wait_for_state("drained", "UNAVAILABLE")
        assert server.load("drained") is None
        assert generate(server, "drained", [7], max_tokens=3).ids[-3:] == continuation([7], 3)


@pytest.mark.parametrize("fields", ["", QUEUED], ids=["iterative", "queued"])
def test_requests_of_a_server_that_stops_end_after_the_drain_timeout(repository, fields):
    drained = {"max_seq_len": ENDLESS_SEQ_LEN, "drain_timeout_seconds": 2}
    add_synthetic(repository, "drained", drained, fields=fields)

    async def main():
        async with clients.grpc(server) as client:
            responses = aiter(GrpcStream(client, "drained", [1], max_tokens=ENDLESS, stream=True))
            answer = clients.Answer([await anext(responses)])
            stopped = asyncio.create_task(asyncio.to_thread(server.stop))
            with pytest.raises(InferenceServerException) as exiting:
                while await client.is_server_ready():
                    await asyncio.sleep(0.01)
            assert "UNAVAILABLE" in exiting.value.status()
            with pytest.raises(clients.Refused, match="(?i)server|drained"):
                await clients.stream(client, "drained", [2], max_tokens=1)
            answer.responses += [response async for response in responses]
            return answer, await stopped

    with Server(repository) as server:
        answer, status = clients.run(main())
        assert status == 0
        assert answer.finish_reason == "timed_out"
        assert answer.ids == continuation([1], len(answer.ids))


@pytest.mark.cancelling
@pytest.mark.parametrize("fields", ["", QUEUED], ids=["iterative", "queued"])
def test_a_server_whose_exit_timeout_passes_ends_with_status_1(repository, fields):
    """Streams of both endpoints are in flight then. Server 2.51 destroys the HTTP endpoint under one, and waits for
    ever for the other."""
    parameters = {"max_seq_len": ENDLESS_SEQ_LEN, "synthetic_step_us": 100}
    add_synthetic(repository, "endless", parameters, fields=fields)
    server = Server(repository, "--exit-timeout-secs=1")
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=clients.TIMEOUT_S)
    body = {"input_ids": [1, 2], "max_tokens": ENDLESS, "stream": True}
    connection.request("POST", "/v2/models/endless/generate_stream", json.dumps(body))
    assert connection.getresponse().readline().startswith(b"data: ")

    async def main():
        async with clients.grpc(server) as client:
            responses = aiter(GrpcStream(client, "endless", [1], max_tokens=ENDLESS, stream=True))
            await anext(responses)
            return await asyncio.to_thread(server.stop)

    try:
        assert clients.run(main()) == 1, server.log_tail()
    finally:
        connection.close()
        server.process.kill()
        server.process.wait()
    assert "Exit timeout expired" in server.log()
