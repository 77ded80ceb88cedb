"""Models with `dynamic_batching`: requests wait in Triton's own queue, and its settings act on them."""

import asyncio

import numpy
import pytest

from harness import clients
from harness.clients import GrpcStream, Refused, generate, tensor
from harness.repository import FULL_ANSWER, QUEUED, add_synthetic
from harness.server import Server, assert_blocks_come_back, num_pending, until
from harness.synthetic import ENDLESS, ENDLESS_SEQ_LEN, Gate, continuation

# One request at a time, so that those behind it wait in the queue.
ONE = "max_batch_size: 1 dynamic_batching {{ {} }}"
QUEUES = {
    "plain": ONE.format(""),
    "levels": ONE.format("priority_levels: 3 default_priority_level: 2"),
    # The engine runs one at a time, and Triton hands over one at a time.
    "levels_of_eight": "max_batch_size: 8 dynamic_batching { priority_levels: 3 default_priority_level: 2 "
    "preferred_batch_size: [ 1 ] }",
    "short": ONE.format("default_queue_policy { max_queue_size: 2 }"),
    "impatient": ONE.format(
        "default_queue_policy { default_timeout_microseconds: 600000000 allow_timeout_override: true }"
    ),
    "pushes_back": ONE.format(
        "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 600000000 "
        "allow_timeout_override: true }"
    ),
    "wide": f"max_batch_size: 8 {QUEUED}",
    "wide_full": f"max_batch_size: 8 {QUEUED} {FULL_ANSWER}",
    "in_order": f"max_batch_size: 8 dynamic_batching {{ preserve_ordering: true }} {FULL_ANSWER}",
    "fours": "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 4 ] "
    "max_queue_delay_microseconds: 600000000 }",
}


@pytest.fixture(scope="module")
def queues(tmp_path_factory):
    repository = tmp_path_factory.mktemp("queues") / "repository"
    for name, fields in QUEUES.items():
        parameters = {"max_seq_len": ENDLESS_SEQ_LEN}
        if name == "levels_of_eight":
            parameters["max_num_requests"] = 1
        add_synthetic(repository, name, parameters, fields=fields)
    with Server(repository) as server:
        yield server


def value(server, family, model, **labels):
    """One of Triton's own metrics of a model."""
    labels = {"model": model, "version": "1", **labels}
    return server.metrics().get((family, tuple(sorted(labels.items()))), 0)


async def queued(server, client, model, requests):
    """Requests, `(prompt, options)` each, as tasks; they are in Triton's queue, in this order."""
    tasks = []
    for prompt, options in requests:
        tasks.append(asyncio.create_task(clients.stream(client, model, prompt, **options)))
        await until(lambda: num_pending(server, model) == len(tasks))
    return tasks


def start_time(answer):
    return int(answer.last.tensors["first_scheduled_time_ns"].item())


def end_time(answer):
    """When the backend had the last token: clients may see the ends of two streams in another order."""
    return int(answer.last.tensors["last_token_time_ns"].item())


@pytest.mark.parametrize("model", ["levels", "levels_of_eight"])
@pytest.mark.cancelling
def test_a_higher_priority_that_arrives_later_starts_earlier(queues, model):
    async def main():
        async with clients.grpc(queues) as client:
            async with clients.in_flight(client, model, [1]):
                # The second has the default, 2.
                waiting = await queued(
                    queues,
                    client,
                    model,
                    [
                        ([n], {"priority": priority, "max_tokens": 5, "return_perf_metrics": True})
                        for n, priority in enumerate((3, 0, 1, 3, 1))
                    ],
                )
            return await asyncio.gather(*waiting)

    answers = clients.run(main())
    for n, answer in enumerate(answers):
        assert answer.ids == continuation([n], 5)
    started = [start_time(answers[n]) for n in (2, 4, 1, 0, 3)]
    assert started == sorted(started)


@pytest.mark.parametrize(("priorities", "first_ended"), [((2, 1), 1), ((1, 1), 0)])
def test_with_max_utilization_a_higher_priority_that_arrives_later_pauses_a_lower_one(
    repository, tmp_path, priorities, first_ended
):
    gate = Gate(tmp_path / "gate", num_steps=1)
    # Either request grows to four blocks, and there are six.
    blocks = {"max_seq_len": 64, "tokens_per_block": 16, "max_tokens_in_paged_kv_cache": 96}
    pauses = {"batch_scheduler_policy": "max_utilization", "synthetic_gate": gate.file}
    add_synthetic(repository, "pauses", {**blocks, **pauses}, fields=QUEUES["wide"])

    async def main():
        async with clients.grpc(server) as client:

            async def one(n):
                options = {"max_tokens": 60, "request_priority": priorities[n], "return_perf_metrics": True}
                return await clients.stream(client, "pauses", [n] * 4, **options)

            early = asyncio.create_task(one(0))
            await until(lambda: value(server, "nv_trt_llm_request_metrics", "pauses", request_type="active") == 1)
            late = asyncio.create_task(one(1))
            await until(lambda: server.log().count("pauses_0: a batch of 1 requests") == 2)
            gate.open()
            return await asyncio.gather(early, late)

    with Server(repository, "--log-verbose=1") as server:
        answers = clients.run(main())
    for n, answer in enumerate(answers):
        assert answer.ids == continuation([n] * 4, 60)
    assert min((0, 1), key=lambda n: end_time(answers[n])) == first_ended


@pytest.mark.cancelling
def test_requests_beyond_max_queue_size_are_refused(queues):
    async def main():
        async with clients.grpc(queues) as client:
            async with clients.in_flight(client, "short", [1]):
                waiting = await queued(queues, client, "short", [([n], {"max_tokens": 5}) for n in range(2)])
                with pytest.raises(Refused, match="Exceeds maximum queue size"):
                    await clients.stream(client, "short", [9], max_tokens=5)
            return await asyncio.gather(*waiting)

    assert [answer.ids for answer in clients.run(main())] == [continuation([n], 5) for n in range(2)]


@pytest.mark.cancelling
def test_a_request_whose_time_in_the_queue_is_over_is_refused_alone(queues):
    async def main():
        async with clients.grpc(queues) as client:
            async with clients.in_flight(client, "impatient", [1]) as running:
                waiting = await queued(queues, client, "impatient", [([2], {"max_tokens": 5})])
                with pytest.raises(Refused, match="Request timeout expired"):
                    await clients.stream(client, "impatient", [3], max_tokens=5, timeout=100_000)
                await anext(running)
            return await waiting[0]

    assert clients.run(main()).ids == continuation([2], 5)


@pytest.mark.cancelling
def test_with_the_action_delay_it_is_served_after_the_others(queues):
    async def main(timeout_s):
        async with clients.grpc(queues) as client:
            async with clients.in_flight(client, "pushes_back", [1]):
                options = {"max_tokens": 5, "return_perf_metrics": True}
                late = {"timeout": int(timeout_s * 1e6), **options}
                waiting = await queued(queues, client, "pushes_back", [([2], late), ([3], options)])
                # Its time has begun, and is over after this.
                await asyncio.sleep(timeout_s)
            return await asyncio.gather(*waiting)

    # In the backend, the time begins again: on a slow machine it may not be enough for five tokens.
    timeout_s, delayed = 0.25, None
    while delayed is None or delayed.finish_reason == "timed_out":
        timeout_s *= 2
        delayed, other = clients.run(main(timeout_s))
    assert (delayed.ids, other.ids) == (continuation([2], 5), continuation([3], 5))
    assert start_time(other) < start_time(delayed)


def test_preserve_ordering_holds_answers_back(queues):
    async def main():
        async with clients.grpc(queues) as client:

            def one(prompt, max_tokens, **options):
                options = {"max_tokens": max_tokens, "stream": False, "exclude_input_in_output": True, **options}
                return clients.stream(client, "in_order", prompt, **options)

            long = asyncio.create_task(one([1], ENDLESS, request_id="long"))
            await until(lambda: value(queues, "nv_trt_llm_request_metrics", "in_order", request_type="active") == 1)
            short = asyncio.create_task(one([2], 3))
            await until(lambda: value(queues, "nv_inflight_e2e_seconds_count", "in_order") == 1)
            # It has ended, and its answer waits.
            assert not short.done() and not long.done()
            stop = one([1], 1, request_id="long", **{"stop": True})
            return await asyncio.gather(long, short, stop)

    long, short, _ = clients.run(main())
    assert (long.finish_reason, short.ids) == ("cancelled", continuation([2], 3))


@pytest.mark.cancelling
def test_without_it_a_short_answer_does_not_wait_for_a_long_one(queues):
    async def main():
        async with clients.grpc(queues) as client, clients.in_flight(client, "wide", [1]):
            return await clients.stream(client, "wide", [2], max_tokens=3, stream=False)

    assert clients.run(main()).ids[-3:] == continuation([2], 3)


def test_a_preferred_batch_starts_together(queues):
    async def main():
        async with clients.grpc(queues) as client:
            options = {"max_tokens": 5, "return_perf_metrics": True}
            waiting = await queued(queues, client, "fours", [([n], options) for n in range(3)])
            return await asyncio.gather(*waiting, clients.stream(client, "fours", [3], **options))

    answers = clients.run(main())
    assert [answer.ids for answer in answers] == [continuation([n], 5) for n in range(4)]
    started = list(map(start_time, answers))
    # In one step, of 1 ms: the server's clock and the backend's are compared for each request by itself.
    assert max(started) - min(started) < 1000


@pytest.mark.cancelling
def test_a_request_that_is_cancelled_in_the_queue_never_starts(queues):
    async def main():
        async with clients.grpc(queues) as client:
            async with clients.in_flight(client, "levels", [1]):
                cancelled = GrpcStream(client, "levels", [2], max_tokens=ENDLESS, stream=True)
                read = asyncio.create_task(anext(aiter(cancelled)))
                await until(lambda: num_pending(queues, "levels") == 1)
                cancelled.cancel()
                with pytest.raises(Refused):
                    await read
                other = asyncio.create_task(clients.stream(client, "levels", [3], max_tokens=5))
                await until(lambda: num_pending(queues, "levels") == 2)
            return await other

    # An endless one before it would hold it for ever.
    assert clients.run(main()).ids == continuation([3], 5)


@pytest.mark.parametrize("model", ["plain", "levels"])
@pytest.mark.cancelling
def test_a_running_request_that_is_cancelled_makes_room_at_once(queues, model):
    async def main():
        async with clients.grpc(queues) as client:
            stream = GrpcStream(client, model, [1, 2], max_tokens=ENDLESS, stream=True)
            responses = aiter(stream)
            await anext(responses)
            waiting = asyncio.create_task(clients.stream(client, model, [3, 4], max_tokens=20))
            await until(lambda: num_pending(queues, model) == 1)
            stream.cancel()
            with pytest.raises(Refused) as refused:
                async for _ in responses:
                    pass
            return refused.value, await waiting

    error, answer = clients.run(main())
    assert "CANCELLED" in f"{error.status} {error}".upper()
    assert answer.ids == continuation([3, 4], 20)
    assert_blocks_come_back(queues, model)


@pytest.mark.parametrize("model", ["wide", "wide_full"])
def test_many_at_once_are_all_answered_and_counted(queues, model):
    families = "nv_inference_request_success", "nv_inference_queue_duration_us"
    before = [value(queues, family, model) for family in families]
    plain = {"exclude_input_in_output": True}
    requests = [
        ([n], {"max_tokens": 1 + n % 40, "stream": model == "wide" and n % 2 == 0, **plain}) for n in range(200)
    ]
    answers = clients.streams(queues, model, requests)
    for (prompt, options), answer in zip(requests, answers):
        assert answer.ids == continuation(prompt, options["max_tokens"])
    num_answered, waited_us = (value(queues, family, model) - earlier for family, earlier in zip(families, before))
    assert num_answered == 200
    # Of 200 requests of 20 steps on average, 8 run at a time, and a step takes 1 ms: the last waits for half a second.
    assert waited_us > 200_000
    assert_blocks_come_back(queues, model)


def test_a_batch_in_one_request_is_refused(queues):
    async def main():
        async with clients.grpc(queues) as client:
            prompts = tensor("input_ids", numpy.array([[1, 2], [3, 4]], dtype=numpy.int32), "INT32")
            await clients.stream(client, "wide", [prompts], max_tokens=5)

    with pytest.raises(Refused, match="a batch of 2; a request is one prompt"):
        clients.run(main())


def test_an_unload_lets_running_and_queued_requests_finish(repository, tmp_path):
    gate = Gate(tmp_path / "gate", num_steps=1)
    levels = ONE.format("priority_levels: 2 default_priority_level: 1")
    add_synthetic(repository, "held", {"synthetic_gate": gate.file}, fields=levels)

    async def main():
        async with clients.grpc(server) as client:
            # The first token has been computed, and the second step waits.
            first = GrpcStream(client, "held", [0], max_tokens=20, stream=True)
            responses = aiter(first)
            ids = (await anext(responses)).ids
            waiting = await queued(server, client, "held", [([n], {"max_tokens": 5}) for n in range(1, 6)])
            await asyncio.to_thread(server.unload, "held")
            with pytest.raises(Refused, match="has no available versions"):
                await clients.stream(client, "held", [1], max_tokens=1)
            gate.open()
            async for response in responses:
                ids = ids + (response.ids or [])
            return ids, await asyncio.gather(*waiting)

    with Server(repository) as server:
        ids, answers = clients.run(main())
        assert ids == continuation([0], 20)
        assert [answer.ids for answer in answers] == [continuation([n], 5) for n in range(1, 6)]
        server.wait_for_state("held", "UNAVAILABLE")
        assert server.load("held") is None
        assert generate(server, "held", [7], max_tokens=3).ids[-3:] == continuation([7], 3)


def test_a_server_that_stops_finishes_the_running_requests(repository, tmp_path):
    gate = Gate(tmp_path / "gate", num_steps=1)
    add_synthetic(repository, "held", {"synthetic_gate": gate.file}, fields=QUEUES["wide"])

    async def main():
        async with clients.grpc(server) as client:
            stream = GrpcStream(client, "held", [0], max_tokens=20, stream=True)
            responses = aiter(stream)
            ids = (await anext(responses)).ids
            stopped = asyncio.create_task(asyncio.to_thread(server.stop))
            gate.open()
            async for response in responses:
                ids = ids + (response.ids or [])
            return ids, await stopped

    with Server(repository) as server:
        assert clients.run(main()) == (continuation([0], 20), 0)


def test_the_warm_up_is_served_and_a_bad_one_does_not_end_the_server(repository):
    warm_up = (
        'model_warmup [{{ name: "w" batch_size: 3 count: 2 inputs {{ key: "input_ids" value: {{ '
        "data_type: TYPE_INT32 dims: [ {} ] zero_data: true }} }} }}]"
    )
    add_synthetic(repository, "warm", fields=f"{QUEUES['wide']} {warm_up.format(5)}")
    add_synthetic(repository, "too_long", {"max_seq_len": 64}, fields=f"{QUEUES['wide']} {warm_up.format(100)}")
    with Server(repository) as server:
        for model in ("warm", "too_long"):
            assert generate(server, model, [7], max_tokens=3).ids[-3:] == continuation([7], 3)
            assert value(server, "nv_inference_request_success", model) == 1
        assert server.log().count("a request of the model_warmup is not served") == 6


def test_a_step_that_fails_answers_all_requests_until_the_model_is_loaded_again(repository):
    add_synthetic(repository, "fails", {"synthetic_fail_after": 5}, fields=QUEUES["wide"])
    with Server(repository) as server:
        requests = [([n], {"max_tokens": 20, "stream": n % 2 == 0}) for n in range(24)]
        answers = clients.streams(server, "fails", requests, may_fail=True)
        assert all(isinstance(answer, Refused) for answer in answers)
        # Those that ran, and those that Triton handed over later.
        assert all("told to fail" in str(answer) for answer in answers)
        with pytest.raises(Refused, match="unload the model and load it again"):
            generate(server, "fails", [1], max_tokens=1)
        server.unload("fails")
        server.wait_for_state("fails", "UNAVAILABLE")
        assert server.load("fails") is None
        assert generate(server, "fails", [7], max_tokens=3).ids[-3:] == continuation([7], 3)
