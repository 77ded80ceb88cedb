"""More requests than slots: Triton keeps them in a backlog, and their own timeouts act there."""

import asyncio

import pytest

from harness import clients
from harness.synthetic import continuation


def test_a_backlog_is_worked_off_in_order_and_every_answer_is_right(server):
    async def main():
        finished = []
        async with clients.grpc(server) as client:

            async def one(n):
                await asyncio.sleep(0.01 * n)
                answer = await clients.stream(client, "one_slot", [n], max_tokens=10 + n)
                finished.append(n)
                return answer

            return finished, await asyncio.gather(*(one(n) for n in range(24)))

    finished, answers = clients.run(main())
    assert finished == list(range(24))
    for n, answer in enumerate(answers):
        assert answer.ids == continuation([n], 10 + n)


def test_a_timeout_in_the_backlog_fails_that_request_alone(server):
    async def main():
        async with clients.grpc(server) as client:
            running = asyncio.create_task(clients.stream(client, "one_slot", [1], max_tokens=200))
            await asyncio.sleep(0.1)
            patient = asyncio.create_task(clients.stream(client, "one_slot", [2], max_tokens=10))
            await asyncio.sleep(0.05)
            with pytest.raises(clients.Refused, match="timeout"):
                await clients.stream(client, "one_slot", [3], max_tokens=10, timeout=100_000)
            return await running, await patient

    running, patient = clients.run(main())
    assert running.ids == continuation([1], 200)
    assert patient.ids == continuation([2], 10)


def test_a_timeout_that_passes_while_running_ends_the_answer_early(server):
    async def main():
        async with clients.grpc(server) as client:
            return await clients.stream(client, "one_slot", [5], max_tokens=4000, timeout=300_000)

    answer = clients.run(main())
    assert answer.finish_reason == "timed_out"
    assert answer.ids == continuation([5], len(answer.ids))
    assert 1 <= len(answer.ids) <= 100
