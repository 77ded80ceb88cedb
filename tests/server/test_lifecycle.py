"""Models that are unloaded, and servers that stop, while requests run: every accepted request is answered."""

import asyncio
import time

import pytest

from harness import clients
from harness.clients import GrpcStream, generate
from harness.repository import FULL_ANSWER, STORIES, add_model, add_synthetic
from harness.server import Server
from harness.synthetic import continuation

NUM_STREAMS = 16


@pytest.fixture
def explicit(repository):
    """A server of the test's own, whose models the test loads."""
    add_synthetic(repository, "synthetic", {"synthetic_step_us": 5000})
    add_synthetic(repository, "full", {"synthetic_step_us": 5000}, fields=FULL_ANSWER)
    with Server(repository, "--model-control-mode=explicit") as server:
        yield server


async def started_streams(client, model="synthetic", max_tokens=100):
    """Streams that have their first token, as tasks that give all tokens."""

    async def one(n, started):
        tokens = []
        async for response in GrpcStream(client, model, [n], max_tokens=max_tokens, stream=True):
            tokens += response.ids or []
            started.set()
        return tokens

    started = [asyncio.Event() for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(one(n, event)) for n, event in enumerate(started)]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), clients.TIMEOUT_S)
    return tasks


async def assert_all_right(tasks, max_tokens=100):
    for n, tokens in enumerate(await asyncio.wait_for(asyncio.gather(*tasks), clients.TIMEOUT_S)):
        assert tokens == continuation([n], max_tokens)


def test_an_unload_lets_running_streams_finish_and_takes_no_new_ones(explicit):
    assert explicit.load("synthetic") is None

    async def main():
        async with clients.grpc(explicit) as client:
            tasks = await started_streams(client)
            await asyncio.to_thread(explicit.unload, "synthetic")
            with pytest.raises(clients.Refused):
                await clients.stream(client, "synthetic", [1], max_tokens=1)
            await assert_all_right(tasks)

    clients.run(main())
    explicit.wait_for_state("synthetic", "UNAVAILABLE")
    assert explicit.load("synthetic") is None
    assert generate(explicit, "synthetic", [7], max_tokens=3).ids[-3:] == continuation([7], 3)


def test_a_reload_under_load_loses_no_request(explicit):
    assert explicit.load("synthetic") is None

    async def main():
        async with clients.grpc(explicit) as client:
            for _ in range(4):
                tasks = await started_streams(client)
                await asyncio.to_thread(explicit.unload, "synthetic")
                await assert_all_right(tasks)
                await asyncio.to_thread(explicit.wait_for_state, "synthetic", "UNAVAILABLE")
                assert await asyncio.to_thread(explicit.load, "synthetic") is None

    clients.run(main())


def test_a_model_that_is_loaded_over_itself_hurts_nothing_of_the_old_one(explicit, repository):
    # Old and new overlap, and have metrics of the same labels: that once corrupted the server's heap.
    assert explicit.load("synthetic") is None

    async def main():
        async with clients.grpc(explicit) as client:
            tasks = []
            for round_number in range(8):
                tasks += await started_streams(client)
                add_synthetic(repository, "synthetic", {"synthetic_step_us": 1000 + round_number})
                assert await asyncio.to_thread(explicit.load, "synthetic") is None
            for first in range(0, len(tasks), NUM_STREAMS):
                await assert_all_right(tasks[first : first + NUM_STREAMS])
            # The old ones are gone a moment after their last request; then the new one is still whole.
            await asyncio.sleep(1.5)
            await assert_all_right(await started_streams(client))

    clients.run(main())


def test_a_models_memory_comes_back_when_it_is_unloaded(repository):
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
        # The allocator may keep what the first loads have used; later ones add nothing the size of a model.
        assert sizes[-1] - sizes[2] < 8 * 1024, sizes


def test_a_server_that_stops_finishes_its_streams_and_exits_cleanly(explicit):
    assert explicit.load("synthetic") is None
    assert explicit.load("full") is None

    async def main():
        async with clients.grpc(explicit) as client:
            whole = asyncio.create_task(clients.stream(client, "full", [3], max_tokens=100, stream=False))
            tasks = await started_streams(client)
            stopping = asyncio.create_task(asyncio.to_thread(explicit.stop))
            await assert_all_right(tasks)
            assert (await whole).ids[-100:] == continuation([3], 100)
            return await stopping

    assert clients.run(main()) == 0


def test_a_server_without_requests_stops_at_once(explicit):
    assert explicit.load("synthetic") is None
    start = time.monotonic()
    assert explicit.stop() == 0
    assert time.monotonic() - start < 5


def test_metrics_that_are_off_are_no_reason_not_to_serve(repository):
    add_synthetic(repository, "synthetic")
    with Server(repository, "--allow-metrics=false") as server:
        assert generate(server, "synthetic", [7], max_tokens=3).ids[-3:] == continuation([7], 3)


@pytest.mark.parametrize("fields", ["", FULL_ANSWER], ids=["decoupled", "full answer"])
def test_a_warmed_up_model_loads_and_serves(repository, fields):
    warmup = """
    model_warmup {
      name: "one" batch_size: 1
      inputs { key: "input_ids" value { data_type: TYPE_INT32 dims: [ 4 ] zero_data: true } }
    }
    """
    add_synthetic(repository, "synthetic", fields=fields + warmup)
    with Server(repository) as server:
        assert generate(server, "synthetic", [7], max_tokens=3).ids[-3:] == continuation([7], 3)


def test_two_instances_share_the_load(repository):
    add_synthetic(repository, "synthetic", fields="instance_group { count: 2 kind: KIND_CPU } max_batch_size: 8")
    with Server(repository) as server:

        async def main():
            async with clients.grpc(server) as client:
                await assert_all_right(await started_streams(client))

        clients.run(main())
