"""Bodies and requests as the documents of TensorRT-LLM's and of vLLM's backends show them, unchanged."""

import json

import pytest

from harness import clients
from harness.clients import Refused, generate, generate_stream

PROMPT = "Once upon a time, there was a brave fox named Finn."

# What those documents send to /generate, with their prompts changed for one that the demo model knows.
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
    """The body's options, as a gRPC client gives them."""
    options = {**body, **body.get("parameters", {})}
    options.pop("parameters", None)
    return options


def over_grpc(server, **options):
    async def main():
        async with clients.grpc(server) as client:
            return await clients.stream(client, "stories", PROMPT, **options)

    return clients.run(main())


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_documented_body_is_answered_by_every_way_in(server, body):
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


def test_what_vllms_client_sends_twice_is_taken_once(server):
    sampling = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "20"}
    twice = over_grpc(server, **sampling, sampling_parameters=json.dumps(sampling))
    assert twice.text == over_grpc(server, **sampling).text
    with pytest.raises(Refused, match="'max_tokens' is given twice"):
        over_grpc(server, max_tokens="21", sampling_parameters=json.dumps(sampling))


def test_a_field_without_effect_is_ignored_and_said_once_in_the_log(server):
    before = generate(server, "stories", PROMPT, max_tokens=20).text
    for _ in range(3):
        assert generate(server, "stories", PROMPT, max_tokens=20, lookahead_window_size=4).text == before
    log = server.log()
    assert log.count("'lookahead_window_size' of a request is ignored") == 1, log[-2000:]


def test_an_empty_word_is_none(server):
    plain = generate(server, "stories", PROMPT, max_tokens=20)
    for none in ("", "[]", '[""]'):
        answer = generate(server, "stories", PROMPT, max_tokens=20, stop_words=none, bad_words=none)
        assert answer.ids == plain.ids


def test_words_are_biased(server):
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


def test_a_prompt_is_cut_from_its_beginning(server):
    whole = generate(server, "synthetic", [1, 2, 3, 4], max_tokens=5)
    cut = generate(server, "synthetic", [9, 9, 1, 2, 3, 4], max_tokens=5, truncate_prompt_tokens=4)
    assert cut.ids == whole.ids and cut.last.num_input_tokens == 4


def test_input_lengths_says_where_padding_begins(server):
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
    ("lora_task_id", 1, "serve the merged checkpoint"),
    ("lora_name", "alpaca", "serve the merged checkpoint"),
    ("prompt_embedding_table", "x", "text or token ids"),
    ("image", "x", "no pictures"),
    ("request_type", "context_only", "context_and_generation"),
    ("embedding_bias_words", "fox", "one number for each text"),
]


@pytest.mark.parametrize("name, value, words", REFUSED, ids=lambda value: str(value)[:20])
def test_what_cannot_be_had_is_refused_with_what_to_write(server, name, value, words):
    with pytest.raises(Refused) as refused:
        generate(server, "stories", PROMPT, **{name: value})
    assert name in str(refused.value) and words in str(refused.value)
