"""The policies of Triton's queue, and its gauge of waiting requests: the ideas of Triton's own tests `L0_model_queue`,
`L0_batcher` and `L0_metrics`."""

import asyncio
import json
import time

import pytest

from harness import clients
from harness.clients import Refused, generate
from harness.repository import ALLOW_OLDEST, add_synthetic
from harness.server import Server, num_pending, num_requests, until
from harness.synthetic import ENDLESS_SEQ_LEN, continuation

ONE = "max_batch_size: 1 dynamic_batching {{ {} }}"
IDLE = "max_sequence_idle_microseconds: 3600000000"


def oldest(num_slots):
    """The fields of a model whose batcher holds so many sequences."""
    return (
        f"{ALLOW_OLDEST} max_batch_size: 1 sequence_batching {{ iterative_sequence: true {IDLE} "
        f"oldest {{ max_candidate_sequences: {num_slots} }} }}"
    )


POLICIES = {
    "strict": ONE.format("default_queue_policy { default_timeout_microseconds: 400000 }"),
    "lenient": ONE.format("default_queue_policy { default_timeout_microseconds: 400000 allow_timeout_override: true }"),
    "levels": ONE.format("priority_levels: 1000000 default_priority_level: 500000"),
    "two_policies": ONE.format(
        "priority_levels: 2 default_priority_level: 2 default_queue_policy { max_queue_size: 3 } "
        "priority_queue_policy { key: 1 value { max_queue_size: 1 } }"
    ),
    "hurried": "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 3000000 }",
    "direct": f"max_batch_size: 1 sequence_batching {{ iterative_sequence: true {IDLE} }}",
    "oldest": oldest(1),
    "four_slots": oldest(4),
}


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    repository = tmp_path_factory.mktemp("policies") / "repository"
    for name, fields in POLICIES.items():
        add_synthetic(repository, name, {"max_seq_len": ENDLESS_SEQ_LEN}, fields=fields)
    with Server(repository) as server:
        yield server


async def queued(server, client, model, requests):
    """Requests, `(prompt, options)` each, as tasks; they wait in Triton, in this order."""
    tasks = []
    for prompt, options in requests:
        tasks.append(asyncio.create_task(clients.stream(client, model, prompt, **options)))
        await until(lambda: num_pending(server, model) == len(tasks))
    return tasks


def num_batches(server, model, size):
    """How many batches of a size Triton has passed to a model."""
    status, body = server.http("GET", f"/v2/models/{model}/stats")
    assert status == 200, body
    [stats] = json.loads(body)["model_stats"]
    return sum(int(batches["compute_infer"]["count"]) for batches in stats["batch_stats"] if batches["batch_size"] == size)


@pytest.mark.parametrize("model", ["strict", "lenient"])
@pytest.mark.cancelling
def test_a_request_cannot_raise_the_time_limit_of_the_queue(policies, model):
    """`allow_timeout_override` lets it lower the limit only."""

    async def main():
        async with clients.grpc(policies) as client:
            async with clients.in_flight(client, model, [1]):
                for options in ({}, {"timeout": 60_000_000}):
                    with pytest.raises(Refused, match="Request timeout expired"):
                        await clients.stream(client, model, [3], max_tokens=5, **options)
            # Until the running one has ended, it would wait as well.
            await until(lambda: num_requests(policies, model, "active") == 0)
            return await clients.stream(client, model, [3], max_tokens=5)

    assert clients.run(main()).ids == continuation([3], 5)


@pytest.mark.cancelling
def test_a_million_levels_are_in_order(policies):
    priorities = [0, 999_999, 1_000_000, 1, 2, 499_999]

    async def main():
        async with clients.grpc(policies) as client:
            async with clients.in_flight(client, "levels", [1]):
                options = {"max_tokens": 3, "return_perf_metrics": True}
                requests = [([n], {"priority": priority, **options}) for n, priority in enumerate(priorities)]
                waiting = await queued(policies, client, "levels", requests)
            return await asyncio.gather(*waiting)

    started = [int(it.last.tensors["first_scheduled_time_ns"].item()) for it in clients.run(main())]
    # The first has the default.
    levels = [priority or 500_000 for priority in priorities]
    by_start = sorted(levels, key=lambda level: started[levels.index(level)])
    assert by_start == sorted(levels)


@pytest.mark.cancelling
def test_each_level_has_its_own_policy(policies):
    async def main():
        async with clients.grpc(policies) as client:
            async with clients.in_flight(client, "two_policies", [1]):
                requests = [([n], {"priority": priority, "max_tokens": 3}) for n, priority in enumerate((1, 2, 2, 2))]
                waiting = await queued(policies, client, "two_policies", requests)
                for priority in (1, 2):
                    with pytest.raises(Refused, match="Exceeds maximum queue size"):
                        await clients.stream(client, "two_policies", [9], max_tokens=3, priority=priority)
            return await asyncio.gather(*waiting)

    assert [answer.ids for answer in clients.run(main())] == [continuation([n], 3) for n in range(4)]


def test_a_batch_below_the_preferred_size_starts_when_the_delay_is_over(policies):
    """The delay begins with the first request: the second one, sent later, starts with it."""

    async def main():
        async with clients.grpc(policies) as client:

            def send(n):
                return asyncio.create_task(clients.stream(client, "hurried", [n], max_tokens=3))

            both_wait = False

            def has_met_or_missed(first):
                nonlocal both_wait
                both_wait = num_pending(policies, "hurried") == 2
                return both_wait or first.done()

            # On a slow machine, the delay may be over before the second request is there.
            while not both_wait:
                num_pairs, sent = num_batches(policies, "hurried", 2), time.monotonic()
                first = send(0)
                await until(lambda: num_pending(policies, "hurried") == 1 or first.done())
                later = send(1)
                await until(lambda: has_met_or_missed(first))
                assert (await first).ids == continuation([0], 3)
                assert time.monotonic() - sent >= 3
                assert (await later).ids == continuation([1], 3)
            # Triton counts a batch once for each response.
            assert num_batches(policies, "hurried", 2) > num_pairs

    clients.run(main())


@pytest.mark.parametrize("model", ["levels", "direct", "oldest"])
@pytest.mark.cancelling
def test_the_gauge_counts_the_requests_that_wait(policies, model):
    """`nv_inference_pending_request_count`."""

    async def main():
        async with clients.grpc(policies) as client:
            async with clients.in_flight(client, model, [1]):
                waiting = await queued(policies, client, model, [([n], {"max_tokens": 3}) for n in range(5)])
                assert num_pending(policies, model) == 5
            answers = await asyncio.gather(*waiting)
            assert num_pending(policies, model) == 0
            return answers

    assert [answer.ids for answer in clients.run(main())] == [continuation([n], 3) for n in range(5)]


@pytest.mark.cancelling
def test_a_slot_is_free_although_triton_has_answered_its_cancelled_request(policies):
    """The batcher of `oldest` keeps the slot of a request that is cancelled in its queue, which happens to some of
    these. It also loses a slot once in some thousand cancellations, whatever the backend does."""

    async def main():
        async with clients.grpc(policies) as client:
            for n in range(100):
                async with clients.in_flight(client, "four_slots", [n]):
                    pass
                answer = await clients.stream(client, "four_slots", [n], max_tokens=3)
                assert answer.ids == continuation([n], 3)

    clients.run(main())


def test_a_request_alone_is_served_although_its_queue_could_hold_it_back(policies):
    assert generate(policies, "hurried", [7], max_tokens=3).ids[-3:] == continuation([7], 3)
