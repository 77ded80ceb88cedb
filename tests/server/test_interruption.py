"""Priorities, stop requests and request ids: the order of requests, and ending them from outside."""

import asyncio

import pytest

from harness import clients
from harness.clients import GrpcStream, Refused
from harness.server import num_requests, until
from harness.synthetic import ENDLESS, ENDLESS_SEQ_LEN, continuation


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    add_synthetic = deployment.add_synthetic
    repository = tmp_path_factory.mktemp("interruption") / "repository"
    slow = {"synthetic_step_us": 3000, "max_seq_len": ENDLESS_SEQ_LEN}
    add_synthetic(repository, "slow", slow)
    add_synthetic(repository, "two_instances", slow, fields="instance_group [ { count: 2, kind: KIND_CPU } ]")
    add_synthetic(repository, "overlap", {**slow, "enable_trt_overlap": "true"})
    add_synthetic(repository, "one_by_one", {**slow, "max_num_requests": 1})
    add_synthetic(repository, "lockstep", {**slow, "gpt_model_type": "V1"})
    with deployment.server(repository) as server:
        yield server


async def stop(client, model, request_id):
    """A stop request: the same request id, and stop=true."""
    return await clients.stream(client, model, [1], request_id=request_id, stream=False, stop=True)


@pytest.mark.parametrize("model", ["slow", "overlap"])
def test_a_stop_request_ends_the_request_with_its_id_within_a_few_steps(server, model):
    async def main():
        async with clients.grpc(server) as client:
            tokens = []
            other = asyncio.create_task(clients.stream(client, model, [9], max_tokens=40, request_id="other"))
            async for response in GrpcStream(client, model, [5], request_id="me", max_tokens=ENDLESS, stream=True):
                tokens += response.ids or []
                if len(tokens) == 5:
                    stopped = asyncio.create_task(stop(client, model, "me"))
                if response.finish_reason:
                    assert response.finish_reason == "cancelled"
            assert tokens == continuation([5], len(tokens))
            assert 5 <= len(tokens) < 60
            answer = await stopped
            assert (answer.ids, answer.finish_reason) == ([], "cancelled")
            assert (await other).ids == continuation([9], 40)
            # The id can be used again immediately.
            again = await clients.stream(client, model, [5], request_id="me", max_tokens=4)
            assert again.ids == continuation([5], 4)

    clients.run(main())


def test_a_stop_request_reaches_the_instance_that_has_its_target(server):
    num_targets = 6

    async def main():
        async with clients.grpc(server) as client:
            begun = asyncio.Semaphore(0)

            async def endless(number):
                stream = GrpcStream(client, "two_instances", [number], request_id=f"me {number}", max_tokens=ENDLESS, stream=True)
                num_responses = 0
                async for response in stream:
                    num_responses += 1
                    if num_responses == 1:
                        begun.release()
                    if response.finish_reason:
                        return response.finish_reason

            running = [asyncio.create_task(endless(number)) for number in range(num_targets)]
            for _ in running:
                await begun.acquire()
            for number in range(num_targets):
                await stop(client, "two_instances", f"me {number}")
            assert await asyncio.gather(*running) == ["cancelled"] * num_targets

    clients.run(main())


def test_a_stop_request_for_an_unknown_id_does_nothing_and_one_without_an_id_is_rejected(server):
    async def main():
        async with clients.grpc(server) as client:
            assert (await stop(client, "slow", "nobody")).ids == []
            with pytest.raises(Refused, match="has none"):
                await stop(client, "slow", "")
            # A client of other backends sends it with every request.
            answer = await clients.stream(client, "slow", [7], max_tokens=2, **{"stop": False})
            assert answer.ids == continuation([7], 2)

    clients.run(main())


# Triton's queue holds back what could not start, and has priorities of its own (test_queue.py).
@pytest.mark.deployments("iterative")
@pytest.mark.cancelling
def test_the_smaller_priority_number_is_served_first(server):
    async def main():
        async with clients.grpc(server) as client:
            order = []

            async def one(name, **options):
                await clients.stream(client, "one_by_one", [3], max_tokens=20, **options)
                order.append(name)

            others = []
            async with clients.in_flight(client, "one_by_one", [3]):
                for name, options in [
                    ("last", {"request_priority": 5}),
                    ("third", {}),
                    ("second", {"request_priority": -1}),
                    ("fourth", {}),
                ]:
                    others.append(asyncio.create_task(one(name, **options)))
                    await until(lambda: num_requests(server, "one_by_one", "waiting") == len(others))
            await asyncio.gather(*others)
            assert order == ["second", "third", "fourth", "last"]

    clients.run(main())


async def one_batch(server, client, *requests):
    """The answers of requests in one batch: they wait in the backend while another request runs."""
    id = "the one before"
    before = clients.stream(client, "lockstep", [1], max_tokens=ENDLESS, stream=False, request_id=id)
    before = asyncio.create_task(before)
    await until(lambda: num_requests(server, "lockstep", "active") == 1)
    answers = asyncio.gather(*requests)
    await until(lambda: num_requests(server, "lockstep", "waiting") == len(requests))
    await stop(client, "lockstep", id)
    await before
    return await answers


# Which requests are in one batch is up to Triton's queue with the other driver.
@pytest.mark.deployments("iterative")
def test_in_lockstep_the_answers_of_a_batch_are_sent_together_without_streaming(server):
    async def main():
        async with clients.grpc(server) as client:
            loop = asyncio.get_running_loop()
            times = {}

            async def one(max_tokens):
                answer = await clients.stream(client, "lockstep", [2], max_tokens=max_tokens, stream=False)
                times[max_tokens] = loop.time()
                assert answer.ids[-max_tokens:] == continuation([2], max_tokens)

            await one_batch(server, client, one(2), one(40))
            # Both waited for the first request and ran together, and their answers came together despite a
            # difference of 38 steps of 3 ms.
            assert abs(times[2] - times[40]) < 0.05
            with pytest.raises(Refused, match="V1"):
                await clients.stream(client, "lockstep", [2], max_tokens=3)

    clients.run(main())


@pytest.mark.deployments("iterative")
def test_in_lockstep_a_complete_answer_waits_for_its_batch_only_until_its_timeout(server):
    async def main():
        async with clients.grpc(server) as client:
            loop = asyncio.get_running_loop()

            async def one(max_tokens, **options):
                answer = await clients.stream(
                    client,
                    "lockstep",
                    [2],
                    max_tokens=max_tokens,
                    stream=False,
                    exclude_input_in_output=True,
                    **options,
                )
                return answer, loop.time()

            # All have to wait at a time before the first one's limit passes, on a busy machine too.
            limit = {"timeout": 2_000_000}
            long, short, late = await one_batch(server, client, one(1000), one(2, **limit), one(2000, **limit))
            for (answer, _), num_tokens in ((short, 2), (long, 1000)):
                assert (answer.ids, answer.finish_reason) == (continuation([2], num_tokens), "length")
            # 1000 steps of 3 ms.
            assert short[1] < long[1] - 0.2
            assert late[0].finish_reason == "timed_out"
            assert late[0].ids == continuation([2], len(late[0].ids))

    clients.run(main())
