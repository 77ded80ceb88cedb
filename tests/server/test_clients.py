"""Request bodies from the documentation of TensorRT-LLM's and vLLM's backends, unchanged."""

import json

import numpy
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from harness import clients
from harness.clients import GenerateStream, Refused, generate, generate_stream
from harness.synthetic import continuation

PROMPT = "Once upon a time, there was a brave fox named Finn."

# Bodies for /generate from that documentation, with prompts that the demo model can continue.
TENSORRT_LLM = {
    "ensemble": {"max_tokens": 20, "bad_words": "", "stop_words": ""},
    "ensemble, with ids": {"max_tokens": 20, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2},
    "LLM API": {"max_tokens": 10},
    "parameters": {"parameters": {"max_tokens": 20, "bad_words": "", "stop_words": ""}},
    "sampling": {
        "max_tokens": 20,
        "bad_words": "",
        "stop_words": "",
        "top_k": 40,
        "top_p": 0.9,
        "temperature": 0.8,
        "length_penalty": 1.0,
        "repetition_penalty": 1.1,
        "min_length": 1,
        "presence_penalty": 0.0,
        "random_seed": 3,
        "beam_width": 1,
    },
    "guided by words": {
        "max_tokens": 20,
        "stop_words": '["the end"]',
        "bad_words": '["dragon"]',
        "embedding_bias_words": '[" fox"]',
        "embedding_bias_weights": "[2.5]",
        "num_return_sequences": 1,
    },
    "draft tokens": {"max_tokens": 20, "num_draft_tokens": 5, "use_draft_logits": False},
    "LLM API, its own names": {
        "sampling_param_max_tokens": 20,
        "sampling_param_temperature": 0.8,
        "sampling_param_top_k": 50,
        "sampling_param_seed": 4,
        "sampling_param_exclude_input_from_output": True,
    },
}
VLLM = {
    "quick start": {"parameters": {"stream": False, "temperature": 0}},
    "without the prompt": {
        "parameters": {"stream": False, "temperature": 0, "exclude_input_in_output": True, "max_tokens": 45}
    },
    "sampling parameters": {
        "sampling_parameters": json.dumps(
            {
                "n": 1,
                "temperature": "0.1",
                "top_p": "0.95",
                "max_tokens": "100",
                "seed": None,
                "stop": ["the end"],
                "stop_token_ids": [3],
                "ignore_eos": False,
                "skip_special_tokens": True,
                "spaces_between_special_tokens": True,
                "include_stop_str_in_output": False,
                "bad_words": ["dragon"],
                "use_beam_search": False,
                "early_stopping": False,
                "length_penalty": 1.0,
            }
        ),
        "stream": False,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    },
}
BODIES = {**{f"TensorRT-LLM, {k}": v for k, v in TENSORRT_LLM.items()}, **{f"vLLM, {k}": v for k, v in VLLM.items()}}


def flat(body):
    """The body's options, as a gRPC client sends them."""
    options = {**body, **body.get("parameters", {})}
    options.pop("parameters", None)
    return options


def over_grpc(server, **options):
    async def main():
        async with clients.grpc(server) as client:
            return await clients.stream(client, "stories", PROMPT, **options)

    return clients.run(main())


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_documented_body_is_answered_over_every_protocol(server, body):
    answer = generate(server, "stories", PROMPT, **body)
    assert answer.finish_reason in ("length", "end_id", "stop_words")
    excluded = flat(body).get("exclude_input_in_output", flat(body).get("sampling_param_exclude_input_from_output"))
    assert answer.text.startswith(PROMPT) != bool(excluded)
    streamed = {**flat(body), "stream": True}
    answers = {
        "gRPC": over_grpc(server, **{"stream": False, **flat(body)}),
        "a stream": generate_stream(server, "stories", PROMPT, **{k: v for k, v in streamed.items() if k != "stream"}),
        "a gRPC stream": over_grpc(server, **streamed),
    }
    whole = answer.text.removeprefix(PROMPT)
    for way, other in answers.items():
        assert (way, other.text.removeprefix(PROMPT)) == (way, whole)


def test_an_option_that_vllms_client_sends_twice_is_accepted_once(server):
    sampling = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "20"}
    twice = over_grpc(server, **sampling, sampling_parameters=json.dumps(sampling))
    assert twice.text == over_grpc(server, **sampling).text
    with pytest.raises(Refused, match="'max_tokens' is given twice, as 'max_tokens'( in sampling_parameters)? and as 'max_tokens'"):
        over_grpc(server, max_tokens="21", sampling_parameters=json.dumps(sampling))


def test_a_field_without_effect_is_ignored_and_logged_once(server):
    before = generate(server, "stories", PROMPT, max_tokens=20).text
    for _ in range(3):
        assert generate(server, "stories", PROMPT, max_tokens=20, lookahead_window_size=4).text == before
    log = server.log()
    assert log.count("'lookahead_window_size' of a request is ignored") == 1, log[-2000:]


def test_an_empty_word_is_ignored(server):
    plain = generate(server, "stories", PROMPT, max_tokens=20)
    for none in ("", "[]", '[""]'):
        answer = generate(server, "stories", PROMPT, max_tokens=20, stop_words=none, bad_words=none)
        assert answer.ids == plain.ids


def test_biases_apply_to_words(server):
    plain = generate(server, "stories", PROMPT, max_tokens=30, exclude_input_in_output=True)
    biased = generate(
        server,
        "stories",
        PROMPT,
        max_tokens=30,
        exclude_input_in_output=True,
        embedding_bias_words=json.dumps([" owl"]),
        embedding_bias_weights="[100]",
    )
    assert len(set(biased.ids)) <= 4 < len(set(plain.ids)), "nothing but the word's tokens"


def test_a_prompt_is_truncated_at_its_beginning(server):
    whole = generate(server, "synthetic", [1, 2, 3, 4], max_tokens=5)
    cut = generate(server, "synthetic", [9, 9, 1, 2, 3, 4], max_tokens=5, truncate_prompt_tokens=4)
    assert cut.ids == whole.ids and cut.last.num_input_tokens == 4


def test_input_lengths_removes_padding(server):
    whole = generate(server, "synthetic", [1, 2, 3], max_tokens=5)
    padded = generate(server, "synthetic", [1, 2, 3, 0, 0], input_lengths=3, request_output_len=5)
    assert padded.ids == whole.ids
    with pytest.raises(Refused, match="'input_lengths' is 4, and input_ids has 3"):
        generate(server, "synthetic", [1, 2, 3], input_lengths=4)


REFUSED = [
    ("beam_width", 4, "at most max_beam_width, which is 1 in the model's config.pbtxt"),
    ("n", 2, "the 2 sequences of a greedy request are all the same; give a temperature"),
    ("best_of", 2, "leave 'best_of' out"),
    ("n", 65, "at most max_batch_size, which is 64"),
    ("lora_task_id", 1, "this model has no adapters"),
    ("lora_name", "alpaca", "this model has no adapters"),
    ("prompt_embedding_table", "x", "text or token ids"),
    ("image", "x", "takes no images"),
    ("video_bytes_input", "x", "videos"),
    ("request_type", "context_only", "context_and_generation"),
    ("embedding_bias_words", "fox", "one number for each text"),
]


@pytest.mark.parametrize("name, value, words", REFUSED, ids=lambda value: str(value)[:20])
def test_unsupported_options_are_rejected_with_an_alternative(server, name, value, words):
    with pytest.raises(Refused) as refused:
        generate(server, "stories", PROMPT, **{name: value})
    assert name in str(refused.value) and words in str(refused.value)


def test_an_id_in_a_generate_body_is_the_request_id(server):
    plain = generate(server, "stories", PROMPT, max_tokens=5)
    status, body = server.http(
        "POST", "/v2/models/stories/generate", json.dumps({"text_input": PROMPT, "max_tokens": 5, "id": "mine"})
    )
    assert status == 200, body
    answer = json.loads(body)
    assert (answer["id"], answer["text_output"]) == ("mine", plain.text)
    streamed = generate_stream(server, "stories", PROMPT, max_tokens=5, id="mine")
    assert streamed.ids == generate_stream(server, "stories", PROMPT, max_tokens=5).ids
    with pytest.raises(Refused, match="'id'"):
        over_grpc(server, max_tokens=5, id="another")


def test_a_stop_over_http_ends_the_request_of_the_same_id(server):
    stream = GenerateStream(server, "synthetic", [5], max_tokens=4000, stream=True, id="over http")
    try:
        responses = iter(stream)
        first = next(responses)
        # While the request runs, its id is taken.
        with pytest.raises(Refused, match="'over http' is already in flight"):
            generate(server, "synthetic", [6], max_tokens=2, id="over http")
        stop = generate(server, "synthetic", [0], stop=True, id="over http")
        assert stop.finish_reason == "cancelled"
        rest = list(responses)
    finally:
        stream.close()
    assert rest[-1].finish_reason == "cancelled"
    ids = first.ids + [id for response in rest for id in response.ids]
    assert ids == continuation([5], len(ids)) and len(ids) < 4000
    assert generate(server, "synthetic", [6], max_tokens=2, id="over http").last.num_output_tokens == 2


def named(server, model, prompt, outputs, **options):
    """One request over gRPC that names its outputs; returns their arrays."""
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        text = numpy.array([[prompt.encode()]], dtype=object) if isinstance(prompt, str) else None
        if text is None:
            inputs = [clients.tensor("input_ids", numpy.array([prompt], dtype=numpy.int32), "INT32")]
        else:
            inputs = [clients.tensor("text_input", text, "BYTES")]
        outputs = [grpcclient.InferRequestedOutput(name) for name in outputs]
        try:
            result = client.infer(model, inputs, outputs=outputs, parameters=options)
        except InferenceServerException as error:
            raise Refused(error.message(), error.status()) from None
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def test_naming_an_output_requests_it(server):
    names = ["output_ids", "output_log_probs", "cum_log_probs", "stop_reason", "kv_cache_alloc_total_blocks"]
    arrays = named(server, "stories_full", PROMPT, names, max_tokens=4, exclude_input_in_output=True)
    assert sorted(arrays) == sorted(names)
    asked = named(
        server,
        "stories_full",
        PROMPT,
        names,
        max_tokens=4,
        exclude_input_in_output=True,
        return_log_probs=True,
        return_stop_reason=True,
        return_perf_metrics=True,
    )
    for name in names:
        assert arrays[name].tolist() == asked[name].tolist()
    assert arrays["output_log_probs"].shape == (1, 1, 4) and (arrays["output_log_probs"] < 0).all()
    assert arrays["kv_cache_alloc_total_blocks"] > 0
    # Logits can be large: they are only returned if an option requests them.
    assert named(server, "stories_full", PROMPT, ["generation_logits"])["generation_logits"].shape == (1, 1, 1, 1)
    with pytest.raises(Refused, match="output 'output_log_probs': the synthetic runner has no logits"):
        named(server, "synthetic_full", [1, 2], ["output_log_probs"])


def test_ids_as_json_are_always_a_list_of_lists(server):
    def ids(**options):
        answer = generate(server, "stories", PROMPT, return_output_ids_json=True, **options)
        return json.loads(answer.last.tensors["output_ids_json"]), answer.last

    one, answer = ids(max_tokens=1, exclude_input_in_output=True)
    assert one == [answer.ids] and len(answer.ids) == 1
    # The JSON that Triton writes for a tensor of one element.
    status, body = server.http(
        "POST",
        "/v2/models/stories/generate",
        json.dumps({"text_input": PROMPT, "max_tokens": 1, "exclude_input_in_output": True}),
    )
    assert status == 200 and json.loads(body)["output_ids"] == answer.ids[0]
    whole, answer = ids(max_tokens=3)
    assert whole == [answer.ids] and len(answer.ids) > 10
    several, answer = ids(max_tokens=3, n=2, temperature=1.0, exclude_input_in_output=True)
    assert [len(ids) for ids in several] == [3, 3] and several[0] + several[1] == answer.ids
    streamed = generate_stream(server, "stories", PROMPT, max_tokens=4, return_output_ids_json=True)
    assert [json.loads(part) for part in streamed.tensors("output_ids_json")] == [[[id]] for id in streamed.ids]
    assert "output_ids_json" not in generate(server, "stories", PROMPT, max_tokens=3).last.tensors
