"""More requests than slots: Triton keeps them in a backlog, and their own timeouts act there."""

import asyncio
import contextlib
import time

import pytest

from harness import clients
from harness.synthetic import continuation

PENDING = ("nv_inference_pending_request_count", (("model", "one_slot"), ("version", "1")))


def test_a_backlog_is_worked_off_in_order_and_every_answer_is_right(server):
    async def main():
        async with clients.grpc(server) as client:
            waiting = []
            async with occupied_slot(client):
                for n in range(24):
                    options = {"max_tokens": 10 + n, "return_perf_metrics": True}
                    waiting.append(asyncio.create_task(clients.stream(client, "one_slot", [n], **options)))
                    await until_backlog_is(server, n + 1)
            return await asyncio.gather(*waiting)

    answers = clients.run(main())
    for n, answer in enumerate(answers):
        assert answer.ids == continuation([n], 10 + n)
    started = [int(answer.last.tensors["first_scheduled_time_ns"].item()) for answer in answers]
    assert started == sorted(started)


def test_a_timeout_in_the_backlog_fails_that_request_alone(server):
    async def main():
        async with clients.grpc(server) as client:
            async with occupied_slot(client):
                patient = asyncio.create_task(clients.stream(client, "one_slot", [2], max_tokens=10))
                await until_backlog_is(server, 1)
                with pytest.raises(clients.Refused, match="timeout"):
                    await clients.stream(client, "one_slot", [3], max_tokens=10, timeout=100_000)
            return await patient

    assert clients.run(main()).ids == continuation([2], 10)


def test_a_timeout_that_passes_while_running_ends_the_answer_early(server):
    async def main():
        async with clients.grpc(server) as client:
            return await clients.stream(client, "one_slot", [5], max_tokens=4000, timeout=300_000)

    answer = clients.run(main())
    assert answer.finish_reason == "timed_out"
    assert answer.ids == continuation([5], len(answer.ids))
    assert 1 <= len(answer.ids) <= 100


@contextlib.asynccontextmanager
async def occupied_slot(client):
    """Holds the slot with a request that would take 20 s, and cancels it at the end."""
    stream = clients.GrpcStream(client, "one_slot", [1], stream=True, max_tokens=4000)
    responses = aiter(stream)
    await anext(responses)
    yield
    stream.cancel()
    with pytest.raises(clients.Refused, match="cancelled"):
        async for _ in responses:
            pass


async def until_backlog_is(server, length):
    """Returns when that many requests wait for the slot: one that is sent then comes after them."""
    deadline = time.monotonic() + 10
    while server.metrics().get(PENDING) != length:
        assert time.monotonic() < deadline, server.metrics()
        await asyncio.sleep(0.002)
