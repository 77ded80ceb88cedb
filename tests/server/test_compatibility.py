"""`client_compatibility`: a test for each line of the table in docs/src/clients.md."""

import json
import re

import numpy
import pytest
import tritonclient.grpc as grpcclient

from harness import clients
from harness.clients import GrpcStream, Refused, generate, generate_stream, tensor
from harness.repository import FULL_ANSWER, ROOT, STORIES, add_model

PROMPT = "Once upon a time, there was a brave fox named Finn."
VLLM = {"client_compatibility": "vllm"}
TENSORRT_LLM = {"client_compatibility": "tensorrtllm", "max_beam_width": 3}
IDS = """
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true },
  { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "beam_width" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "end_id" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "streaming" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "return_log_probs" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
"""
TYPES = {
    str: ("BYTES", object),
    bool: ("BOOL", bool),
    int: ("INT32", numpy.int32),
    float: ("FP32", numpy.float32),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    repository = tmp_path_factory.mktemp("compatibility") / "repository"
    # Without a batch dimension there is no dynamic batching.
    add_model(repository, "vllm", VLLM, checkpoint=STORIES)
    deployment.add_model(repository, "plain", checkpoint=STORIES)
    deployment.add_model(repository, "vllm_batched", VLLM, fields="max_batch_size: 4", checkpoint=STORIES)
    deployment.add_model(repository, "ensemble", TENSORRT_LLM, checkpoint=STORIES)
    deployment.add_model(repository, "ensemble_full", TENSORRT_LLM, fields=FULL_ANSWER, checkpoint=STORIES)
    deployment.add_model(repository, "tensorrt_llm", TENSORRT_LLM, fields=IDS, checkpoint=STORIES)
    with deployment.server(repository) as server:
        yield server


def inputs(prompt, *, batch=True, **options):
    """Tensors with one value each, with or without a batch dimension."""
    shape = (1, 1) if batch else (1,)

    def of(name, value):
        if isinstance(value, list):
            return tensor(name, numpy.array([value], dtype=numpy.int32), "INT32")
        datatype, dtype = TYPES[type(value)]
        value = value.encode() if isinstance(value, str) else value
        return tensor(name, numpy.array([value], dtype=dtype).reshape(shape), datatype)

    name = "input_ids" if isinstance(prompt, list) else "text_input"
    return [of(name, prompt), *(of(name, value) for name, value in options.items())]


def responses(server, model, tensors, **parameters):
    """The arrays of each response over a gRPC stream."""

    async def main():
        async with clients.grpc(server) as client:
            return [response.arrays async for response in GrpcStream(client, model, tensors, **parameters)]

    return [arrays for arrays in clients.run(main()) if arrays]


def vllm(server, model="vllm", **options):
    """The answer of the model for vLLM's clients to options as tensors without a batch dimension."""
    return responses(server, model, inputs(PROMPT, batch=False, **options))


def ensemble(server, model="ensemble", **options):
    return responses(server, model, inputs(PROMPT, **options))


def test_the_table_has_a_test_for_each_line():
    """Each line of the table ends with the name of its test."""
    page = (ROOT / "docs/src/clients.md").read_text()
    (table,) = re.findall(r"<!-- compatibility -->\n(.*?)<!-- /compatibility -->", page, re.S)
    named = re.findall(r"`(test_\w+)` \|$", table, re.M)
    assert len(named) == len(table.strip().splitlines()) - 2
    tests = {name for name in globals() if name.startswith("test_")}
    assert set(named) == tests - {"test_the_table_has_a_test_for_each_line"}


def test_inputs_and_outputs_are_those_of_the_others_models(server):
    config = server.model_config("vllm")
    assert [output["name"] for output in config["output"]] == [
        "text_output",
        "finish_reason",
        "cumulative_logprob",
        "logprobs",
        "num_input_tokens",
        "num_output_tokens",
    ]
    assert {input["name"] for input in config["input"]} > {"text_input", "stream", "sampling_parameters"}
    assert config["model_transaction_policy"]["decoupled"]
    for model, names in {
        "ensemble": {"text_input", "max_tokens", "stop_words", "random_seed"},
        "tensorrt_llm": {"input_ids"},
    }.items():
        assert {input["name"] for input in server.model_config(model)["input"]} >= names
    assert [input["name"] for input in server.model_config("plain")["input"]] == ["text_input"]


@pytest.mark.deployments("iterative")
def test_a_max_batch_size_of_zero_means_no_batch_dimension(server):
    config = server.model_config("vllm")
    assert config["max_batch_size"] == 0
    assert "sequence_batching" not in config and "dynamic_batching" not in config
    (arrays,) = vllm(server, return_num_output_tokens=True, return_logprobs=True, return_cumulative_logprob=True)
    for name in ("text_output", "num_output_tokens", "logprobs", "cumulative_logprob"):
        assert arrays[name].shape == (1,), name
    (arrays,) = responses(server, "vllm_batched", inputs(PROMPT))
    assert arrays["text_output"].shape == (1, 1)
    assert server.model_config("plain")["max_batch_size"] == 64
    with pytest.raises(Refused, match="shape"):
        responses(server, "vllm", inputs(PROMPT))


@pytest.mark.deployments("iterative")
def test_without_batches_many_requests_are_computed_together(server):
    """Each stream gets what it gets alone, and steps have several streams."""
    prompts = [f"{PROMPT} {i}" for i in range(12)]
    alone = [generate_stream(server, "plain", prompt, max_tokens=40).text for prompt in prompts]
    before = server.metrics()

    async def main():
        async with clients.grpc(server) as client:

            async def one(prompt):
                sampling = json.dumps({"max_tokens": 40})
                tensors = inputs(prompt, batch=False, stream=True, sampling_parameters=sampling)
                parts = [response.arrays async for response in GrpcStream(client, "vllm", tensors)]
                return b"".join(arrays["text_output"][0] for arrays in parts if arrays).decode()

            return await clients.asyncio.gather(*(one(prompt) for prompt in prompts))

    assert clients.run(main()) == alone
    labels = ("nv_inference_exec_count", "vllm")

    def executions(metrics):
        return sum(v for (family, found), v in metrics.items() if (family, dict(found).get("model")) == labels)

    # Alone, each would need forty.
    assert executions(server.metrics()) - executions(before) < 12 * 40 / 2


def test_reasons_are_the_others_words(server):
    *rest, last = vllm(server, stream=True, return_finish_reason=True)
    assert {arrays["finish_reason"][0] for arrays in rest} == {b"None"}
    assert last["finish_reason"][0] == b"length"
    sampling = json.dumps({"max_tokens": 60, "stop": ["."]})
    assert vllm(server, sampling_parameters=sampling, return_finish_reason=True)[-1]["finish_reason"][0] == b"stop"
    late = vllm(server, sampling_parameters=json.dumps({"timeout": 1}), return_finish_reason=True)
    assert late[-1]["finish_reason"][0] == b"timeout"
    options = {"max_tokens": 60, "stop_words": ".", "return_finish_reason": True}
    assert generate(server, "ensemble", PROMPT, **{**options, "stop_words": ["."]}).finish_reason == "stop"
    assert generate(server, "plain", PROMPT, **options).finish_reason == "stop_words"


def test_reasons_and_counts_come_on_request(server):
    assert set(vllm(server)[0]) == {"text_output"}
    asked = vllm(server, return_finish_reason=True, return_num_input_tokens=True, return_num_output_tokens=False)
    assert set(asked[0]) == {"text_output", "finish_reason", "num_input_tokens"}
    found = generate(server, "ensemble", PROMPT)
    assert (found.last.finish_reason, found.last.num_input_tokens, found.last.num_output_tokens) == (None,) * 3
    assert generate(server, "plain", PROMPT).last.finish_reason == "length"


@pytest.mark.deployments("iterative")
def test_counts_are_unsigned_and_of_each_response(server):
    options = {"stream": True, "return_num_output_tokens": True, "return_num_input_tokens": True}
    parts = vllm(server, **options)
    assert parts[0]["num_output_tokens"].dtype == parts[0]["num_input_tokens"].dtype == numpy.uint32
    assert sum(arrays["num_output_tokens"][0] for arrays in parts) == 16 and len(parts) > 4
    last = generate_stream(server, "plain", PROMPT).responses[-1]
    assert last.num_output_tokens == 16


@pytest.mark.deployments("iterative")
def test_logprobs_are_null_unless_their_number_is_given(server):
    assert "logprobs" not in vllm(server, sampling_parameters=json.dumps({"logprobs": 1}))[0]
    assert vllm(server, return_logprobs=True)[0]["logprobs"][0] == b"null"
    both = vllm(server, return_logprobs=True, sampling_parameters=json.dumps({"logprobs": 1}))
    assert len(json.loads(both[0]["logprobs"][0])) == 16
    assert generate(server, "plain", PROMPT, logprobs=1).last.tensors["logprobs"].startswith("[{")


def test_the_ensembles_text_has_no_batch_dimension(server):
    (arrays,) = ensemble(server, max_tokens=5)
    assert arrays["text_output"].shape == (1,)
    (beams,) = ensemble(server, max_tokens=5, beam_width=3)
    assert beams["text_output"].shape == (3,)
    (plain,) = responses(server, "plain", inputs(PROMPT))
    assert plain["text_output"].shape == (1, 1)


def test_each_of_several_sequences_has_responses_of_its_own(server):
    several = {"max_tokens": 9, "num_return_sequences": 3, "top_k": 50, "temperature": 1.0}
    whole = ensemble(server, **several, exclude_input_in_output=True)
    assert [arrays["sequence_index"].tolist() for arrays in whole] == [[[0]], [[1]], [[2]]]
    texts = [arrays["text_output"].item().decode() for arrays in whole]
    together = generate(server, "plain", PROMPT, **several, exclude_input_in_output=True)
    assert texts == together.last.text and len(set(texts)) == 3
    streamed = ["", "", ""]
    for arrays in ensemble(server, **several, stream=True):
        assert arrays["text_output"].shape == (1,)
        streamed[arrays["sequence_index"].item()] += arrays["text_output"].item().decode()
    assert streamed == texts
    # A model that returns a single response has all sequences in it.
    full = generate(server, "ensemble_full", PROMPT, **several, exclude_input_in_output=True)
    assert full.last.text == texts


def test_sequences_may_be_repeated(server):
    greedy = ensemble(server, max_tokens=5, num_return_sequences=2)
    assert len({arrays["text_output"].item() for arrays in greedy}) == 1 and len(greedy) == 2
    with pytest.raises(Refused, match="greedy"):
        generate(server, "plain", PROMPT, num_return_sequences=2)


def test_sequence_length_counts_the_ids_of_its_response(server):
    prompt = [5, 17, 300, 42]
    (whole,) = responses(server, "tensorrt_llm", inputs(prompt, request_output_len=6))
    assert whole["sequence_length"].tolist() == [[10]] and whole["output_ids"].shape == (1, 1, 10)
    options = {"request_output_len": 6, "exclude_input_in_output": True}
    (excluded,) = responses(server, "tensorrt_llm", inputs(prompt, **options))
    assert excluded["sequence_length"].tolist() == [[6]]
    parts = responses(server, "tensorrt_llm", inputs(prompt, request_output_len=6, streaming=True))
    assert sum(arrays["sequence_length"].item() for arrays in parts) == 6
    last = generate_stream(server, "plain", PROMPT, max_tokens=6).last
    assert last.sequence_length == last.num_input_tokens + 6


def test_shorter_rows_are_filled_up_with_minus_one(server):
    beams = {"request_output_len": 12, "beam_width": 3, "return_log_probs": True}
    prompt = [5, 17, 300, 42]
    free = responses(server, "tensorrt_llm", inputs(prompt, **beams))[0]["output_ids"][0]
    for end_id in free[0][5:].tolist():
        (arrays,) = responses(server, "tensorrt_llm", inputs(prompt, end_id=end_id, **beams))
        ids, lengths = arrays["output_ids"][0], arrays["sequence_length"][0]
        if len(set(lengths.tolist())) > 1:
            break
    for row, log_probs, length in zip(ids, arrays["output_log_probs"][0], lengths):
        assert (row[length:] == -1).all() and (row[:length] >= 0).all()
        assert (log_probs[length - len(prompt) :] == -1).all()
    assert (ids == -1).any()


def test_without_top_k_and_top_p_the_most_likely_token_is_chosen(server):
    greedy = generate(server, "plain", PROMPT, max_tokens=20).text
    assert generate(server, "ensemble", PROMPT, max_tokens=20, temperature=1.0).text == greedy
    assert generate(server, "plain", PROMPT, max_tokens=20, temperature=1.0).text != greedy
    drawn = generate(server, "ensemble", PROMPT, max_tokens=20, temperature=1.0, top_k=50).text
    assert drawn == generate(server, "plain", PROMPT, max_tokens=20, temperature=1.0, top_k=50).text


def test_a_stream_may_say_that_it_repeats_the_prompt(server):
    options = {"max_tokens": 5, "stream": True, "exclude_input_in_output": False}
    text = b"".join(arrays["text_output"][0] for arrays in ensemble(server, **options)).decode()
    assert text == generate_stream(server, "plain", PROMPT, max_tokens=5).text
    for model in ("plain", "vllm"):
        with pytest.raises(Refused, match="a stream never repeats the prompt"):
            generate_stream(server, model, PROMPT, exclude_input_in_output=False)
