"""More requests than slots: Triton keeps them in a backlog, where their own timeouts apply."""

import asyncio

import pytest

from harness import clients
from harness.server import num_pending, until
from harness.synthetic import ENDLESS, continuation


@pytest.mark.cancelling
def test_a_backlog_is_served_in_order_and_every_answer_is_right(server):
    async def main():
        async with clients.grpc(server) as client:
            waiting = []
            async with clients.in_flight(client, "one_slot", [1]):
                for n in range(24):
                    options = {"max_tokens": 10 + n, "return_perf_metrics": True}
                    waiting.append(asyncio.create_task(clients.stream(client, "one_slot", [n], **options)))
                    await until(lambda: num_pending(server, "one_slot") == n + 1)
            return await asyncio.gather(*waiting)

    answers = clients.run(main())
    for n, answer in enumerate(answers):
        assert answer.ids == continuation([n], 10 + n)
    started = [int(answer.last.tensors["first_scheduled_time_ns"].item()) for answer in answers]
    assert started == sorted(started)


# In Triton's queue a request's own timeout needs the policy's `allow_timeout_override` (test_queue.py).
@pytest.mark.deployments("iterative")
@pytest.mark.cancelling
def test_a_timeout_in_the_backlog_fails_that_request_alone(server):
    async def main():
        async with clients.grpc(server) as client:
            async with clients.in_flight(client, "one_slot", [1]):
                patient = asyncio.create_task(clients.stream(client, "one_slot", [2], max_tokens=10))
                await until(lambda: num_pending(server, "one_slot") == 1)
                with pytest.raises(clients.Refused, match="timeout"):
                    await clients.stream(client, "one_slot", [3], max_tokens=10, timeout=100_000)
            return await patient

    assert clients.run(main()).ids == continuation([2], 10)


def test_a_timeout_that_passes_while_running_ends_the_answer_early(server):
    async def main():
        async with clients.grpc(server) as client:
            return await clients.stream(client, "one_slot", [5], max_tokens=ENDLESS, timeout=300_000)

    answer = clients.run(main())
    assert answer.finish_reason == "timed_out"
    assert answer.ids == continuation([5], len(answer.ids))
    assert 1 <= len(answer.ids) <= 100
