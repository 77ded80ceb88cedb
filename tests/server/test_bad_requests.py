"""Requests that cannot be served: a clear error for their client, and no other effect."""

import asyncio
import json

import numpy
import pytest

from harness import clients
from harness.clients import GrpcStream, Refused, generate, tensor
from harness.synthetic import ENDLESS, continuation


@pytest.fixture(autouse=True)
def bystander(server):
    """A request before and one after: neither is affected."""
    assert generate(server, "synthetic", [1], max_tokens=5).ids[-5:] == continuation([1], 5)
    yield
    assert generate(server, "synthetic", [2], max_tokens=5).ids[-5:] == continuation([2], 5)
    assert server.is_ready()


OPTIONS = [
    ("max_tokens", 0, "1 or more"),
    ("max_tokens", -5, "1 or more"),
    ("max_tokens", 2**40, "integer"),
    ("max_tokens", "many", "integer"),
    ("max_tokens", 1.5, "integer"),
    ("max_tokens", True, "integer"),
    ("min_tokens", -1, "0 or more"),
    ("temperature", -0.1, "from 0"),
    ("temperature", "hot", "number"),
    ("temperature", "nan", "number"),
    ("temperature", 1e30, "number"),
    ("top_k", -2, "or more"),
    ("top_p", -0.01, "from 0 to 1"),
    ("top_p", 1.01, "from 0 to 1"),
    ("min_p", 2, "from 0 to 1"),
    ("seed", -2, "from 0"),
    ("repetition_penalty", 0, "above 0"),
    ("presence_penalty", 1e9, "number"),
    ("frequency_penalty", "inf", "number"),
    ("logit_bias", "[1]", "JSON object"),
    ("logit_bias", '{"1": 1e9}', "JSON object"),
    ("logit_bias", '{"999999": 1}', "vocabulary"),
    ("end_id", -2, "token id"),
    ("end_id", 999999, "vocabulary"),
    ("ignore_eos", 7, "true or false"),
    ("stop", "[1]", "text"),
    ("stop", "x" * 1000, "text"),
    ("bad_words", json.dumps(["x"] * 1000), "text"),
    ("stream", "perhaps", "true or false"),
    ("messages", "{}", "JSON list"),
    ("messages", '[{"role": "tooth fairy", "content": "hello"}]', "tooth fairy"),
    ("sampling_parameters", "{", "JSON object"),
    ("timeout", -1, "0 or more"),
]


@pytest.mark.parametrize("name, value, expected", OPTIONS, ids=lambda value: str(value)[:24])
@pytest.mark.parametrize("model", ["stories", "stories_full"])
def test_an_option_out_of_range_is_rejected_with_its_value_and_range(server, model, name, value, expected):
    with pytest.raises(Refused) as refused:
        generate(server, model, "" if name == "messages" else "Once", **{name: value})
    message = str(refused.value)
    assert name in message and expected in message
    assert len(message) < 500


@pytest.mark.parametrize(
    "name, nearest", [("temprature", "temperature"), ("maxtokens", "max_tokens"), ("top-k", "top_k")]
)
def test_an_unknown_option_is_rejected_with_the_nearest_name(server, name, nearest):
    with pytest.raises(Refused, match=f"unknown option '{name}'.*'{nearest}'"):
        generate(server, "stories", "Once", **{name: 1})


def test_an_empty_prompt_is_rejected(server):
    with pytest.raises(Refused, match="the prompt is empty"):
        generate(server, "synthetic", [])


def test_an_empty_text_has_the_tokens_that_the_tokenizer_adds(server):
    assert generate(server, "stories", "", max_tokens=4).text


def test_a_prompt_over_max_seq_len_is_rejected_with_both_numbers(server):
    with pytest.raises(Refused, match="1024"):
        generate(server, "stories", "Once upon a time. " * 1000)
    with pytest.raises(Refused, match="5000.*4096"):
        generate(server, "synthetic", [1] * 5000)


def test_a_text_that_cannot_fit_is_rejected_before_it_is_tokenised(server):
    """The demo model has 1024 positions, and its longest token has 13 bytes."""
    with pytest.raises(Refused, match="10000000 bytes.*1024 tokens of at most 13 bytes"):
        generate(server, "stories", "once upon " * 1_000_000)


def test_a_prompt_that_can_never_fit_the_cache_is_rejected_and_does_not_block_others(server):
    with pytest.raises(Refused, match="256"):
        generate(server, "synthetic_tight", [1] * 256)


@pytest.mark.parametrize("id", [-1, 32000, 2**31 - 1, -(2**31)])
def test_a_token_outside_the_vocabulary_is_rejected(server, id):
    with pytest.raises(Refused, match=rf"{id}.*31999"):
        generate(server, "synthetic", [1, id, 2])


def refused_over_grpc(server, model, inputs, **options):
    """The error of a request with these tensors."""

    async def main():
        async with clients.grpc(server) as client:
            with pytest.raises(Refused) as refused:
                await clients.stream(client, model, inputs, **options)
            return str(refused.value)

    return clients.run(main())


def texts(*rows):
    return numpy.array([[row] for row in rows], dtype=object)


def test_text_that_is_not_utf8_is_rejected(server):
    error = refused_over_grpc(server, "stories", b"Once \xff\xfe upon")
    assert "UTF-8" in error


@pytest.mark.parametrize(
    "model, inputs",
    {
        "batch of two": ("stories", [tensor("text_input", texts(b"a", b"b"), "BYTES")]),
        "two texts": ("stories", [tensor("text_input", numpy.array([[b"a", b"b"]], dtype=object), "BYTES")]),
        "no batch dimension": ("stories", [tensor("text_input", numpy.array([b"a"], dtype=object), "BYTES")]),
        "numbers for text": ("stories", [tensor("text_input", numpy.array([[1]], dtype=numpy.int32), "INT32")]),
        "another name": ("stories", [tensor("prompt", texts(b"a"), "BYTES")]),
        "an input too many": (
            "stories",
            [tensor("text_input", texts(b"a"), "BYTES"), tensor("stream", numpy.array([[True]]), "BOOL")],
        ),
        "text for ids": ("synthetic", [tensor("input_ids", texts(b"a"), "BYTES")]),
        "64-bit ids": ("synthetic", [tensor("input_ids", numpy.array([[1]], dtype=numpy.int64), "INT64")]),
        "a batch of id rows": ("synthetic", [tensor("input_ids", numpy.ones((2, 3), dtype=numpy.int32), "INT32")]),
        "ids in a matrix": ("synthetic", [tensor("input_ids", numpy.ones((1, 2, 2), dtype=numpy.int32), "INT32")]),
    }.values(),
    ids=lambda value: "",
)
def test_a_tensor_with_the_wrong_name_shape_or_type_is_rejected(server, model, inputs):
    names = [input.name() for input in inputs]
    error = refused_over_grpc(server, model, inputs)
    assert any(name in error for name in [*names, "batch"]), error


def test_a_request_id_in_flight_is_rejected_and_usable_again_afterwards(server):
    async def main():
        async with clients.grpc(server) as client:
            first = GrpcStream(client, "endless", [1], request_id="mine", max_tokens=ENDLESS, stream=True)
            tokens = []
            stopped = None
            async for response in first:
                tokens += response.ids or []
                if stopped is None:
                    with pytest.raises(Refused, match="'mine' is already in flight"):
                        await clients.stream(client, "endless", [2], request_id="mine", max_tokens=5)
                    stop = clients.stream(client, "endless", [1], request_id="mine", stream=False, **{"stop": True})
                    stopped = asyncio.create_task(stop)
            await stopped
            assert tokens == continuation([1], len(tokens))
            again = await clients.stream(client, "endless", [2], request_id="mine", max_tokens=5)
            assert again.ids == continuation([2], 5)

    clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))


@pytest.mark.deployments("iterative")
def test_a_sequence_id_in_flight_is_rejected_without_harm_to_the_first(server):
    """Triton assigns a second START with a live correlation id to the slot of the first."""

    async def one(client, prompt, max_tokens, started=None):
        sequence = {"sequence_id": 4242, "sequence_start": True}
        options = {"request_id": str(prompt[0]), "sequence": sequence, "max_tokens": max_tokens, "stream": True}
        answer = []
        async for response in GrpcStream(client, "endless", prompt, **options):
            answer += response.ids or []
            if started:
                started.set()
        return answer

    async def main():
        async with clients.grpc(server) as client:
            started = asyncio.Event()
            first = asyncio.create_task(one(client, [1], ENDLESS, started))
            await started.wait()
            with pytest.raises(Refused, match="another request of this sequence id is in flight"):
                await asyncio.wait_for(one(client, [2], 5), 20)
            await clients.stream(client, "endless", [1], request_id="1", stream=False, **{"stop": True})
            tokens = await asyncio.wait_for(first, clients.TIMEOUT_S)
            assert len(tokens) > 0 and tokens == continuation([1], len(tokens))
            assert await asyncio.wait_for(one(client, [2], 5), 20) == continuation([2], 5)

    clients.run(main())


def test_a_storm_of_bad_requests_does_not_disturb_the_good_ones(server):
    async def main():
        async with clients.grpc(server) as client:

            async def bad(n):
                options = [{"temprature": 1}, {"max_tokens": 0}, {"top_p": 7.0}, {"end_id": 10**6}][n % 4]
                with pytest.raises(Refused, match=f"'{[*options][0]}'"):
                    await clients.stream(client, "synthetic", [n], **options)

            async def good(n):
                answer = await clients.stream(client, "synthetic", [n], max_tokens=100)
                assert answer.ids == continuation([n], 100)

            await asyncio.gather(*(bad(n) if n % 3 else good(n) for n in range(120)))

    clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))
