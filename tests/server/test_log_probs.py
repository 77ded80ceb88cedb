"""Log-probabilities: the options of both backends, and the same values however a request is served."""

import json
import math

import numpy
import pytest

from harness import clients
from harness.clients import generate, generate_stream, infer

pytestmark = pytest.mark.also_on_gpu
PROMPT = "Once upon a time, there was a brave fox named Finn."
ALL = {"return_log_probs": True, "return_cumulative_logprob": True, "logprobs": 3, "prompt_logprobs": 2}
SAMPLED = {"max_tokens": 24, "temperature": 0.8, "seed": 7, "ignore_eos": True}


def bits(answer):
    """Every log-probability of an answer over gRPC, bit by bit."""
    new = answer.tensors("output_log_probs")
    return numpy.concatenate([array.reshape(-1) for array in new]).tobytes()


def entries(answer):
    """The objects of all tokens; over HTTP a text, over gRPC an array of one element."""
    texts = answer.tensors("logprobs")
    return [entry for text in texts for entry in json.loads(text if isinstance(text, str) else text.item())]


def of_prompt(answer):
    """The objects of all tokens of the prompt."""
    texts = answer.tensors("prompt_logprobs")
    return [entry for text in texts for entry in json.loads(text if isinstance(text, str) else text.item())]


@pytest.fixture(scope="module")
def alone(server):
    return clients.streams(server, "stories", [(PROMPT, {**SAMPLED, **ALL})])[0]


def test_nothing_is_returned_without_a_request(server):
    for options in ({}, {"return_log_probs": False, "return_logprobs": False}, {"logprobs": 2, "return_logprobs": False}):
        assert generate(server, "stories", PROMPT, max_tokens=3, **options).last.tensors == {}
    only = generate(server, "stories", PROMPT, max_tokens=3, return_cumulative_logprob=True)
    assert set(only.last.tensors) == {"cumulative_logprob"}


def test_a_stream_returns_each_tokens_log_probability_with_it(alone):
    assert len(alone.ids) == 24
    assert [array.shape for array in alone.tensors("output_log_probs")] == [(1, 1, 1)] * 24
    for name in ("cum_log_probs", "cumulative_logprob"):
        assert [array.shape for array in alone.tensors(name)] == [(1, 1)] * 24
    log_probs = [array.item() for array in alone.tensors("output_log_probs")]
    assert all(value <= 0 for value in log_probs) and min(log_probs) < -0.1
    sums = numpy.cumsum(log_probs)
    numpy.testing.assert_allclose([array.item() for array in alone.tensors("cum_log_probs")], sums, rtol=1e-5)
    assert len(entries(alone)) == 24
    for id, log_prob, entry in zip(alone.ids, log_probs, entries(alone), strict=True):
        chosen, *others = entry.items()
        assert chosen[0] == str(id)
        assert chosen[1]["logprob"] == pytest.approx(log_prob, rel=1e-6)
        ranks = sorted(value["rank"] for value in entry.values())
        assert ranks[:3] == [1, 2, 3] and len(ranks) == (3 if chosen[1]["rank"] <= 3 else 4)
        assert [value["rank"] for _, value in others] == sorted(value["rank"] for _, value in others)
        assert sum(math.exp(value["logprob"]) for value in entry.values()) <= 1 + 1e-6


def test_the_prompt_has_log_probabilities_but_for_its_first_token(server, alone):
    """They come with the first token, and are the softmax of the context logits."""
    texts = [text.item() for text in alone.tensors("prompt_logprobs")]
    assert len(json.loads(texts[0])) == alone.last.num_input_tokens and set(texts[1:]) == {b"[]"}
    first, *others = of_prompt(alone)
    prompt = infer(server, "stories_full", PROMPT, max_tokens=1, prompt_only=True).ids
    assert list(first.values()) == [{"logprob": None, "rank": None, "decoded_token": "<s>"}]
    assert [int(next(iter(entry))) for entry in (first, *others)] == prompt
    logits = infer(server, "stories_full", PROMPT, max_tokens=1, return_context_logits=True).last.arrays["context_logits"]
    logits = logits.reshape(len(prompt), -1).astype(numpy.float64)
    expected = logits - numpy.log(numpy.exp(logits).sum(axis=1, keepdims=True))
    for row, entry in zip(expected, others):
        for id, value in entry.items():
            assert value["logprob"] == pytest.approx(row[int(id)], abs=1e-5)
            assert value["rank"] == 1 + (row > row[int(id)]).sum()
        assert [1, 2] == sorted(value["rank"] for value in entry.values())[:2]


def test_several_sequences_have_one_prompt(server, alone):
    answer = infer(server, "stories_full", PROMPT, max_tokens=3, n=3, temperature=1, prompt_logprobs=2)
    assert of_prompt(answer) == of_prompt(alone)
    stream = clients.streams(server, "stories", [(PROMPT, {"max_tokens": 9, "n": 3, "temperature": 1, "prompt_logprobs": 2})])[0]
    assert json.loads(stream.tensors("prompt_logprobs")[0].item()) == of_prompt(alone)


def test_nothing_that_is_not_computed_has_log_probabilities(server):
    with pytest.raises(clients.Refused, match="'prompt_only'.*leave out 'prompt_logprobs'"):
        infer(server, "stories_full", PROMPT, max_tokens=1, prompt_only=True, prompt_logprobs=0)
    one = infer(server, "stories_full", "", prompt_token_ids="[7]", max_tokens=1, prompt_logprobs=3)
    assert [list(entry.values())[0]["logprob"] for entry in of_prompt(one)] == [None]


def test_a_greedy_answer_has_the_most_likely_tokens_with_their_texts(server):
    answer = generate(server, "stories", PROMPT, max_tokens=30, exclude_input_in_output=True, logprobs=0)
    assert all(value["rank"] == 1 for entry in entries(answer) for value in entry.values())
    names = [value["decoded_token"] for entry in entries(answer) for value in entry.values()]
    assert "".join(names) == answer.text


def test_options_change_the_choice_but_not_the_log_probabilities(server):
    """The log-probabilities follow from the model's own logits."""
    plain = generate(server, "stories", PROMPT, max_tokens=1, logprobs=20)
    forced = max(entries(plain)[0].items(), key=lambda entry: entry[1]["rank"])
    options = {"logit_bias": json.dumps({forced[0]: 1000}), "temperature": 3.0, "repetition_penalty": 2.0}
    biased = generate(server, "stories", PROMPT, max_tokens=1, logprobs=0, **options)
    assert entries(biased) == [dict([forced])]


@pytest.mark.parametrize("model", ["stories", "stories_tight"])
def test_log_probabilities_are_the_same_bits_in_a_batch(server, alone, model):
    """`stories_tight` has few blocks: its requests are chunked, paused and computed again."""
    assert_same_in_a_batch(server, alone, model)


@pytest.mark.deployments("iterative", "gpu")
@pytest.mark.parametrize("model", ["stories_oldest", "stories_queued"])
def test_log_probabilities_are_the_same_bits_with_another_scheduler(server, alone, model):
    assert_same_in_a_batch(server, alone, model)


def assert_same_in_a_batch(server, alone, model):
    others = [(PROMPT[: 3 + 2 * n], {"max_tokens": 20 + n, "logprobs": n % 21} if n % 3 else {"max_tokens": 60}) for n in range(23)]
    asked, *_ = clients.streams(server, model, [(PROMPT, {**SAMPLED, **ALL}), *others])
    assert asked.ids == alone.ids
    assert bits(asked) == bits(alone)
    assert entries(asked) == entries(alone)
    assert of_prompt(asked) == of_prompt(alone)


def test_a_whole_answer_has_all_log_probabilities_over_every_protocol(server, alone):
    options = {**SAMPLED, **ALL, "exclude_input_in_output": True}
    whole = infer(server, "stories_full", PROMPT, **options)
    assert whole.ids == alone.ids
    assert whole.last.tensors["output_log_probs"].shape == (1, 1, 24)
    assert bits(whole) == bits(alone)
    assert entries(whole) == entries(alone)
    expected = numpy.frombuffer(bits(alone), numpy.float32)
    generated = generate(server, "stories_full", PROMPT, **options)
    numpy.testing.assert_allclose(generated.last.tensors["output_log_probs"], expected, rtol=1e-5)
    assert generated.last.tensors["cum_log_probs"] == pytest.approx(expected.sum(), rel=1e-5)
    streamed = generate_stream(server, "stories", PROMPT, **SAMPLED, **ALL)
    assert entries(streamed) == entries(generated) == entries(alone)
    assert of_prompt(streamed) == of_prompt(generated) == of_prompt(whole) == of_prompt(alone)


def test_vllms_option_works_as_in_vllm(server):
    parameters = json.dumps({"max_tokens": 4, "temperature": 0, "logprobs": 2})
    answer = generate(server, "stories", PROMPT, sampling_parameters=parameters, return_logprobs=True)
    assert [len(entry) for entry in entries(answer)] == [2] * 4


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"logprobs": 21}, "0 to 20"),
        ({"prompt_logprobs": 21}, "0 to 20"),
        ({"logprobs": -1}, "0 to 20"),
        ({"logprobs": True}, "0 to 20"),
        ({"return_log_probs": "yes"}, "true or false"),
        ({"return_cumulative_logprob": 7}, "true or false"),
        ({"return_logprobs": "[]"}, "true or false"),
    ],
    ids=str,
)
def test_bad_values_are_rejected_by_name(server, options, expected):
    with pytest.raises(clients.Refused, match=expected) as refused:
        generate(server, "stories", PROMPT, **options)
    assert next(iter(options)) in str(refused.value)


def test_a_runner_without_logits_rejects_the_options(server):
    options = {"return_log_probs": True, "logprobs": 1, "prompt_logprobs": 1, "return_cumulative_logprob": True}
    for name, value in options.items():
        with pytest.raises(clients.Refused, match=f"'{name}': the synthetic runner has no logits"):
            generate(server, "synthetic", [1, 2], max_tokens=2, **{name: value})
