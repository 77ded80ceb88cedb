"""Options as input tensors, as the clients of TensorRT-LLM's and of vLLM's backends send them."""

import asyncio
import json
import re

import numpy
import pytest

from harness import clients
from harness.clients import GrpcStream, Refused, generate, tensor
from harness.repository import ALLOW_OLDEST, ROOT, STORIES
from harness.server import num_pending, until
from harness.synthetic import ENDLESS, ENDLESS_SEQ_LEN, continuation

PROMPT = "Once upon a time, there was a brave fox named Finn."
# The inputs that the documentation tells users to declare.
(DOCUMENTED,) = re.findall(r"^```\n(input \[.*?)^```$", (ROOT / "docs/src/clients.md").read_text(), re.M | re.S)
INPUTS, DOCUMENTED_SCHEDULER = re.fullmatch("(.*)(dynamic_batching.*)", DOCUMENTED, re.S).groups()
ITERATIVE = "sequence_batching {{ iterative_sequence: true max_sequence_idle_microseconds: 3600000000 {} }}"
DIRECT = ITERATIVE.format("direct { }")
OLDEST = f"{ALLOW_OLDEST} {ITERATIVE.format('oldest { max_candidate_sequences: 64 }')}"
IDS = """
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true },
  { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "beam_width" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "streaming" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "stop" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
"""
# A model in the form that clients of TensorRT-LLM's `tensorrt_llm` model expect.
TENSORRT_LLM = """
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true },
  { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "stop_words_list" data_type: TYPE_INT32 dims: [ 2, -1 ] allow_ragged_batch: true optional: true },
  { name: "bad_words_list" data_type: TYPE_INT32 dims: [ 2, -1 ] allow_ragged_batch: true optional: true },
  { name: "embedding_bias" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true optional: true },
  { name: "beam_width" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
]
"""
VOCAB_SIZE = 1536
TYPES = {
    "max_tokens": ("INT32", numpy.int32),
    "end_id": ("INT32", numpy.int32),
    "pad_id": ("INT32", numpy.int32),
    "top_k": ("INT32", numpy.int32),
    "top_p": ("FP32", numpy.float32),
    "temperature": ("FP32", numpy.float32),
    "repetition_penalty": ("FP32", numpy.float32),
    "presence_penalty": ("FP32", numpy.float32),
    "seed": ("UINT64", numpy.uint64),
    "stream": ("BOOL", bool),
    "beam_width": ("INT32", numpy.int32),
    "exclude_input_in_output": ("BOOL", bool),
    "stop_words": ("BYTES", object),
    "bad_words": ("BYTES", object),
    "input_lengths": ("INT32", numpy.int32),
    "request_output_len": ("INT32", numpy.int32),
    "streaming": ("BOOL", bool),
    "stop": ("BOOL", bool),
    "stop_words_list": ("INT32", numpy.int32),
    "bad_words_list": ("INT32", numpy.int32),
    "embedding_bias": ("FP32", numpy.float32),
}


@pytest.fixture(scope="module")
def tensor_server(tmp_path_factory, deployment):
    add_model, add_synthetic = deployment.add_model, deployment.add_synthetic
    scheduler = DOCUMENTED_SCHEDULER if deployment.queued else OLDEST
    repository = tmp_path_factory.mktemp("tensors") / "repository"
    add_model(repository, "stories", fields=INPUTS + scheduler, checkpoint=STORIES)
    add_model(repository, "tensorrt_llm", {"max_beam_width": 4}, fields=TENSORRT_LLM + scheduler, checkpoint=STORIES)
    slow = {"synthetic_step_us": 5000, "max_seq_len": ENDLESS_SEQ_LEN}
    # If inputs are optional and no scheduler is configured, it is `dynamic_batching`.
    add_synthetic(repository, "ids", slow, fields=IDS)
    add_synthetic(repository, "ids_direct", slow, fields=IDS + DIRECT)
    with deployment.server(repository) as server:
        yield server


def tensors(prompt, **options):
    """A request's inputs: the prompt, and each option as [[value]], or unchanged if it is an array."""
    if isinstance(prompt, str):
        inputs = [tensor("text_input", numpy.array([[prompt.encode()]], dtype=object), "BYTES")]
    else:
        inputs = [tensor("input_ids", numpy.array([prompt], dtype=numpy.int32), "INT32")]
    for name, value in options.items():
        datatype, dtype = TYPES[name]
        if isinstance(value, numpy.ndarray):
            row = value
        else:
            row = [word.encode() for word in value] if isinstance(value, list) else [value]
        inputs.append(tensor(name, numpy.array([row], dtype=dtype), datatype))
    return inputs


async def answer(client, model, prompt, request_id="", **options):
    stream = GrpcStream(client, model, tensors(prompt, **options), request_id=request_id)
    return clients.Answer([response async for response in stream])


def alone(server, model, prompt, **options):
    async def main():
        async with clients.grpc(server) as client:
            return await asyncio.wait_for(answer(client, model, prompt, **options), clients.TIMEOUT_S)

    return clients.run(main())


# Built in the same way as by TensorRT-LLM's end_to_end_grpc_client.py and Triton's OpenAI frontend.
REQUESTS = [
    {"max_tokens": 30, "stream": False, "beam_width": 1, "temperature": 1.0, "seed": 3},
    {"max_tokens": 30, "stream": True, "beam_width": 1, "temperature": 0.7, "stop_words": ["forest", "sea"]},
    {"max_tokens": 25, "stream": True, "end_id": 2, "pad_id": 2, "exclude_input_in_output": True},
    {"max_tokens": 20, "stream": False, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "bad_words": ["dragon"]},
    {"max_tokens": 20, "stream": False, "stop_words": [""], "bad_words": [""], "presence_penalty": 0.5},
    {},
]


@pytest.mark.parametrize("options", REQUESTS, ids=str)
def test_a_tensor_means_the_same_as_the_parameter_of_its_name(tensor_server, options):
    by_tensors = alone(tensor_server, "stories", PROMPT, **options)
    lists = {name: json.dumps(value) for name, value in options.items() if isinstance(value, list)}

    async def by_parameters():
        async with clients.grpc(tensor_server) as client:
            return await clients.stream(client, "stories", PROMPT, **{"stream": False, **options, **lists})

    expected = clients.run(by_parameters())
    assert (by_tensors.text, by_tensors.ids) == (expected.text, expected.ids)
    assert len(by_tensors.ids) > 5


def test_requests_with_different_inputs_run_together_and_get_what_they_get_alone(tensor_server):
    expected = [alone(tensor_server, "stories", PROMPT, **options) for options in REQUESTS]

    async def main():
        async with clients.grpc(tensor_server) as client:
            together = (answer(client, "stories", PROMPT, **options) for options in REQUESTS * 4)
            return await asyncio.wait_for(asyncio.gather(*together), clients.TIMEOUT_S)

    for got, wanted in zip(clients.run(main()), expected * 4):
        assert (got.text, got.ids) == (wanted.text, wanted.ids)


def test_a_generate_body_can_have_lists(tensor_server):
    plain = generate(tensor_server, "stories", PROMPT, max_tokens=40, exclude_input_in_output=True)
    word = plain.text.split()[3]
    body = {"stop_words": ["nowhere", word], "bad_words": [""], "max_tokens": 40, "exclude_input_in_output": True}
    stopped = generate(tensor_server, "stories", PROMPT, **body)
    assert stopped.text == plain.text[: plain.text.index(word)]
    end_id = plain.ids[5]
    ended = generate(tensor_server, "stories", PROMPT, max_tokens=40, end_id=[end_id], exclude_input_in_output=True)
    assert ended.ids == plain.ids[: plain.ids.index(end_id) + 1]


def word_list(*words):
    """Words of ids in the form that TensorRT-LLM's clients send."""
    ids = [id for word in words for id in word]
    ends = numpy.cumsum([len(word) for word in words]).tolist()
    return numpy.array([ids, ends + [-1] * (len(ids) - len(ends))])


def first_end(ids, word):
    """Number of ids up to the end of the first occurrence of a word."""
    return next(end for end in range(len(word), len(ids) + 1) if ids[end - len(word) : end] == word)


def contains(ids, word):
    return any(ids[i : i + len(word)] == word for i in range(len(ids)))


IDS_OF_PROMPT = [5, 17, 300, 42, 7]


def test_words_and_biases_can_be_ids(tensor_server):
    def ids(**options):
        whole = alone(tensor_server, "tensorrt_llm", IDS_OF_PROMPT, request_output_len=40, **options)
        return whole.ids[len(IDS_OF_PROMPT) :], whole.finish_reason

    free, _ = ids()
    word, other = free[8:11], free[20:22]
    stopped, reason = ids(stop_words_list=word_list([9, 9, 9, 9], other, word))
    assert stopped == free[: min(first_end(free, word), first_end(free, other))]
    assert reason == "stop_words"
    without, _ = ids(bad_words_list=word_list(word, other))
    assert len(without) == 40
    assert not contains(without, word) and not contains(without, other)
    assert without[:8] == free[:8]
    bias = numpy.zeros(VOCAB_SIZE)
    bias[free[0]] = -numpy.inf
    never, _ = ids(embedding_bias=bias)
    assert len(never) == 40 and free[0] not in never
    no_words = numpy.array([[0], [-1]])
    nothing, _ = ids(stop_words_list=no_words, bad_words_list=no_words, embedding_bias=numpy.zeros(VOCAB_SIZE))
    assert nothing == free


def test_beams_end_with_words_of_ids(tensor_server):
    def beams(**options):
        whole = alone(tensor_server, "tensorrt_llm", IDS_OF_PROMPT, request_output_len=24, beam_width=3, **options)
        return [sequence.ids for sequence in whole.sequences()]

    word = beams()[0][10:12]
    for ids in beams(stop_words_list=word_list(word)):
        assert not contains(ids[:-1], word)


def test_beams_never_have_a_token_with_a_bias_of_minus_infinity(tensor_server):
    def beams(**options):
        whole = alone(tensor_server, "tensorrt_llm", IDS_OF_PROMPT, request_output_len=12, beam_width=3, **options)
        return [sequence.ids[len(IDS_OF_PROMPT) :] for sequence in whole.sequences()]

    bias = numpy.full(VOCAB_SIZE, -numpy.inf)
    allowed = {beams()[0][0], 300, 301}
    bias[list(allowed)] = 0.0
    found = beams(embedding_bias=bias)
    assert len(found) == 3
    assert all(ids and set(ids) <= allowed for ids in found)


def test_requests_with_different_words_of_ids_get_what_they_get_alone(tensor_server):
    free = alone(tensor_server, "tensorrt_llm", IDS_OF_PROMPT, request_output_len=40).ids[len(IDS_OF_PROMPT) :]
    requests = [{"stop_words_list": word_list(free[n : n + 2]), "request_output_len": 40} for n in range(3, 30, 3)]
    requests += [{"bad_words_list": word_list(free[n : n + 1]), "request_output_len": 30} for n in range(4)]
    expected = [alone(tensor_server, "tensorrt_llm", IDS_OF_PROMPT, **options).ids for options in requests]
    assert len({tuple(ids) for ids in expected}) > 8

    async def main():
        async with clients.grpc(tensor_server) as client:
            together = (answer(client, "tensorrt_llm", IDS_OF_PROMPT, **options) for options in requests * 2)
            return await asyncio.wait_for(asyncio.gather(*together), clients.TIMEOUT_S)

    assert [got.ids for got in clients.run(main())] == expected * 2


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("stop_words_list", word_list([VOCAB_SIZE]), f"token {VOCAB_SIZE} is not in the vocabulary"),
        ("bad_words_list", numpy.array([[5], [2]]), "a JSON list of two lists"),
        ("embedding_bias", numpy.ones(7), f"a list of 7 is not one of {VOCAB_SIZE}, a number for each token"),
        ("embedding_bias", numpy.full(VOCAB_SIZE, numpy.nan), "minus infinity"),
        ("embedding_bias", numpy.full(VOCAB_SIZE, -numpy.inf), "no token is allowed"),
    ],
)
def test_bad_words_and_biases_are_rejected(tensor_server, name, value, words):
    with pytest.raises(Refused, match=words) as refused:
        alone(tensor_server, "tensorrt_llm", IDS_OF_PROMPT, **{name: value})
    assert name in str(refused.value)


def test_a_bad_value_in_a_tensor_is_rejected_like_a_parameter(tensor_server):
    for options, words in [
        ({"temperature": float("nan")}, "'temperature'"),
        ({"top_p": 1.5}, "from 0 to 1"),
        ({"beam_width": 4}, "at most max_beam_width, which is 1"),
        ({"max_tokens": 0}, "1 or more"),
    ]:
        with pytest.raises(Refused, match=words):
            alone(tensor_server, "stories", PROMPT, **options)


def test_triton_rejects_a_tensor_that_is_not_declared(tensor_server):
    with pytest.raises(Refused, match="unexpected inference input 'input_lengths'"):
        alone(tensor_server, "stories", PROMPT, input_lengths=1)


def test_ids_are_accepted_in_the_form_of_tensorrt_llms_client(tensor_server):
    options = {"input_lengths": 3, "request_output_len": 20, "beam_width": 1, "streaming": True}
    assert alone(tensor_server, "ids", [1, 2, 3], **options).ids == continuation([1, 2, 3], 20)


def test_a_stop_tensor_ends_the_request_with_the_same_id(tensor_server):
    async def main():
        async with clients.grpc(tensor_server) as client:
            options = {"input_lengths": 1, "request_output_len": ENDLESS, "streaming": True}
            responses = aiter(GrpcStream(client, "ids", tensors([1], **options), request_id="one"))
            seen = [await anext(responses)]
            stop = {"input_lengths": 0, "request_output_len": 0, "stop": True}
            await asyncio.wait_for(answer(client, "ids", [0], request_id="one", **stop), clients.TIMEOUT_S)
            return clients.Answer(seen + [response async for response in responses])

    stopped = clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))
    assert stopped.finish_reason == "cancelled"
    assert stopped.ids == continuation([1], len(stopped.ids)) and stopped.ids


def waits_for_other_inputs(server, model):
    """Whether a short request with other inputs waits until a long request has ended."""

    async def main():
        async with clients.grpc(server) as client:
            long = GrpcStream(client, model, tensors([1], request_output_len=ENDLESS, streaming=True))
            responses = aiter(long)
            await anext(responses)
            short = asyncio.create_task(answer(client, model, [2], request_output_len=5))
            # Many times the steps of a request that does not wait, counted from its arrival at the server.
            await until(lambda: short.done() or num_pending(server, model) == 1)
            for _ in range(100):
                await anext(responses)
            waits = not short.done()
            long.cancel()
            assert (await short).ids[-5:] == continuation([2], 5)
            return waits

    return clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))


@pytest.mark.deployments("iterative")
@pytest.mark.cancelling
def test_other_inputs_wait_with_direct_and_not_by_default(tensor_server):
    assert not waits_for_other_inputs(tensor_server, "ids")
    assert waits_for_other_inputs(tensor_server, "ids_direct")
    assert re.search(r"ids_direct.*input 'input_lengths' is optional.*dynamic_batching", tensor_server.log())
