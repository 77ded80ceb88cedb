"""Several sequences per request: each is, bit for bit, what a request with its seed gets alone."""

import asyncio
import json

import numpy
import pytest

from harness import clients
from harness.clients import GrpcStream, Refused, described, generate, generate_stream, infer, tensor
from harness.repository import STORIES
from harness.server import assert_blocks_come_back
from harness.synthetic import ENDLESS, continuation

pytestmark = pytest.mark.also_on_gpu
PROMPT = "Once upon a time, there was a brave fox named Finn."
SAMPLED = {"max_tokens": 30, "temperature": 1.0, "seed": 11, "exclude_input_in_output": True}
# Texts that some sequences of the demo model contain early, some late and some not at all.
STOP = json.dumps([" and", " said"])
LOGS = {"return_log_probs": True, "return_cumulative_logprob": True, "logprobs": 2, "return_stop_reason": True}
LOGITS = {"return_context_logits": True, "return_generation_logits": True}
ASKED = {
    "plain": {**SAMPLED, "n": 4, "ignore_eos": True},
    "one": {**SAMPLED, "n": 1},
    "stopped": {**SAMPLED, "n": 6, "stop": STOP, "ignore_eos": True, **LOGS},
    "logits": {**SAMPLED, "n": 3, "max_tokens": 9, "top_k": 9, **LOGITS, **LOGS},
    "penalties": {**SAMPLED, "n": 2, "repetition_penalty": 1.3, "ignore_eos": True, "num_return_sequences": 2},
    "guided": {**SAMPLED, "n": 3, "guided_regex": "[A-Z][a-z]{2,8} [0-9]+", "max_tokens": 40},
    "processed": {
        **SAMPLED,
        "n": 2,
        "logits_post_processor_name": "ban_first_tokens",
        "logits_post_processor_args": '{"tokens": [265, 266, 267], "count": 20}',
    },
    "seeds go round": {**SAMPLED, "n": 3, "seed": str(2**64 - 2)},
}


def alone(server, model, prompt, options):
    """Each sequence when it is requested alone, over gRPC."""
    options = {name: value for name, value in options.items() if name not in ("num_return_sequences", "best_of")}
    seeds = [str((int(options["seed"]) + i) % 2**64) for i in range(options.pop("n", 1))]
    return [
        clients.streams(server, model, [(prompt, {**options, "seed": seed, "stream": False})])[0] for seed in seeds
    ]


@pytest.fixture(scope="module")
def expected(server):
    return {
        name: [described(answer) for answer in alone(server, "stories", PROMPT, options)]
        for name, options in ASKED.items()
    }


@pytest.mark.parametrize("model", ["stories", "stories_tight", "stories_overlap", "stories_tight_overlap"])
@pytest.mark.parametrize("stream", [True, False])
def test_each_sequence_is_the_same_in_a_batch_as_alone(server, expected, model, stream):
    """`stories_tight` has few blocks: sequences are paused and computed again."""
    assert_same_as_alone(server, expected, model, stream)


@pytest.mark.deployments("iterative")
@pytest.mark.parametrize("model", ["stories_oldest", "stories_queued"])
@pytest.mark.parametrize("stream", [True, False])
def test_each_sequence_is_the_same_with_another_scheduler(server, expected, model, stream):
    assert_same_as_alone(server, expected, model, stream)


def assert_same_as_alone(server, expected, model, stream):
    asked = [(PROMPT, {**options, "stream": stream}) for options in ASKED.values()]
    others = [(PROMPT[: 5 + 3 * n], {"max_tokens": 10 + n}) for n in range(12)]
    answers = clients.streams(server, model, [*asked, *others])[: len(asked)]
    for (name, options), answer in zip(ASKED.items(), answers, strict=True):
        assert [described(sequence) for sequence in answer.sequences()] == expected[name], name
        assert (len(answer.responses) > 2) == stream
        shapes = {name: array.shape[:2] for name, array in answer.last.arrays.items()}
        one = ("num_input_tokens", "context_logits", "generation_logits")
        assert {shape for name, shape in shapes.items() if name not in one} == {(1, options["n"])}
    stopped = {sequence[2] for sequence in expected["stopped"]}
    assert stopped == {"stop_words", "length"}, "some sequences hit a stop word and some do not"


def test_a_sequence_that_ends_before_the_others_reports_its_reason_at_once(server):
    (answer,) = clients.streams(server, "stories", [(PROMPT, ASKED["stopped"])])
    reasons = [response.arrays["finish_reason"][0].tolist() for response in answer.responses if response.arrays]
    mixed = [row for row in reasons if b"" in row and b"stop_words" in row]
    assert mixed, "a response in which some have ended"
    for i, sequence in enumerate(answer.sequences()):
        when = [row[i] for row in reasons]
        assert when == sorted(when, key=bool), "an ended sequence stays ended"
        num_tokens = numpy.cumsum([len(response.ids) for response in sequence.responses])
        assert num_tokens[when.index(sequence.finish_reason.encode())] == num_tokens[-1], "with its last token"


def test_over_http_there_is_a_list_of_texts(server, expected):
    options = ASKED["plain"]
    texts = [text for text, *_ in expected["plain"]]
    whole = generate(server, "stories_full", PROMPT, **options)
    assert whole.last.text == texts
    assert whole.last.finish_reason == ["length"] * 4
    assert whole.last.num_output_tokens == [30] * 4 and isinstance(whole.last.num_input_tokens, int)
    ids = numpy.reshape(whole.last.ids, (4, 30)).tolist()
    assert ids == [ids for _, ids, *_ in expected["plain"]]
    streamed = generate_stream(server, "stories", PROMPT, **options)
    assert ["".join(new) for new in zip(*(r.text for r in streamed.responses))] == texts
    by_infer = infer(server, "stories_full", PROMPT, **options)
    assert [described(sequence) for sequence in by_infer.sequences()] == expected["plain"]


def test_a_full_answer_starts_with_the_prompt_in_every_sequence(server, expected):
    options = {**ASKED["stopped"], "exclude_input_in_output": False, "pad_id": -1}
    answer = infer(server, "stories_full", PROMPT, **options)
    texts = [text.decode() for text in answer.last.arrays["text_output"][0]]
    assert texts == [PROMPT + text for text, *_ in expected["stopped"]]
    ids, lengths = answer.last.arrays["output_ids"][0], answer.last.arrays["sequence_length"][0]
    assert ids.shape == (6, max(lengths)) and min(lengths) < max(lengths)
    num_prompt_tokens = answer.last.num_input_tokens
    for row, length, (_, own, *_) in zip(ids.tolist(), lengths, expected["stopped"], strict=True):
        assert row[:num_prompt_tokens] == ids[0].tolist()[:num_prompt_tokens]
        assert row[num_prompt_tokens:length] == own
        assert set(row[length:]) <= {-1}, "the padding id of the request"


def test_best_of_returns_the_best_sequences_best_first(server):
    options = {**SAMPLED, "stop": STOP, "return_log_probs": True}
    each = alone(server, "stories", PROMPT, {**options, "n": 6})
    likely = sorted(each, key=lambda answer: -answer.last.tensors["cum_log_probs"].item())
    assert [answer.text for answer in likely] != [answer.text for answer in each]
    for n in (1, 3, 5):
        (best,) = clients.streams(server, "stories_tight", [(PROMPT, {**options, "n": n, "best_of": 6, "stream": False})])
        assert [described(sequence) for sequence in best.sequences()] == [described(answer) for answer in likely[:n]]
    # Without the figures the answer is the same, and also with the option in vLLM's form.
    parameters = {**SAMPLED, "n": 2, "best_of": 6, "stop": json.loads(STOP)}
    del parameters["exclude_input_in_output"]
    nested = json.dumps(parameters)
    answer = generate(server, "stories", PROMPT, exclude_input_in_output=True, sampling_parameters=nested)
    assert answer.last.text == [answer.text for answer in likely[:2]]
    # TensorRT-LLM's LLM API.
    own = {f"sampling_param_{name}": value for name, value in SAMPLED.items() if name in ("max_tokens", "temperature", "seed")}
    answer = generate(server, "stories", PROMPT, exclude_input_in_output=True, stop=STOP, sampling_param_best_of=6, **own)
    assert answer.text == likely[0].text


# A prompt of a hundred tokens: three whole blocks and a partial one.
LONG = [17] + list(range(200, 299))


@pytest.mark.parametrize(("reuse", "num_new", "num_reused"), [(True, 7, 9), (False, 16, 0)])
def test_sequences_share_the_blocks_of_their_prompt(server, reuse, num_new, num_reused):
    """Blocks of 32 positions: each sequence needs four, and copies the beginning of the last."""
    own = {"cache_salt": f"sequences {reuse}", "kv_cache_reuse": reuse, "return_perf_metrics": True}
    answer = generate(server, "synthetic", LONG, n=4, temperature=1.0, max_tokens=10, **own)
    figures = answer.last.tensors
    assert (figures["kv_cache_alloc_new_blocks"], figures["kv_cache_reused_blocks"]) == (num_new, num_reused)
    moments = ["arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"]
    moments = [figures[name] for name in moments]
    assert moments == sorted(moments) and moments[0] > 0


def test_sequences_wait_for_rows_and_blocks_and_all_are_served(server):
    """More than five hundred concurrent sequences, with two dozen rows and 640 positions."""
    options = {"n": 24, "temperature": 1.0, "exclude_input_in_output": True}
    requests = [([n, 5, 9], {**options, "max_tokens": 20 + n, "stream": n % 2 == 0}) for n in range(24)]
    answers = clients.streams(server, "synthetic_tight", [*requests, ([7], {"max_tokens": 30})])
    for (prompt, options), answer in zip(requests, answers):
        sequences = [sequence.ids for sequence in answer.sequences()]
        assert sequences == [continuation(prompt, options["max_tokens"])] * 24
    assert answers[-1].ids == continuation([7], 30)
    assert_blocks_come_back(server, "synthetic_tight")


@pytest.mark.cancelling
def test_all_sequences_of_a_cancelled_request_end(server):
    async def main():
        async with clients.grpc(server) as client:
            other = asyncio.create_task(clients.stream(client, "endless", [3, 4], max_tokens=200))
            stream = GrpcStream(client, "endless", [1, 2], n=8, temperature=1.0, max_tokens=ENDLESS, stream=True)
            with pytest.raises(Refused) as refused:
                async for response in stream:
                    if response.num_output_tokens == 10:
                        stream.cancel()
            return refused.value, await other

    error, other = clients.run(main())
    assert error.status == "StatusCode.CANCELLED"
    assert other.ids == continuation([3, 4], 200)
    assert_blocks_come_back(server, "endless")


@pytest.mark.parametrize("model", ["stories", "stories_overlap"])
def test_a_sequence_that_fails_fails_only_its_request(server, model):
    """Only two tokens are allowed, and none of them after the first one occurs twice in a row: some orders have no
    fifth token."""
    options = {
        "temperature": 100.0,
        "allowed_token_ids": "[100, 101]",
        "bad_words_list": "[[100, 100, 100, 100, 100, 101], [3, 6, -1, -1, -1, -1]]",
        "max_tokens": 5,
        "ignore_eos": True,
        "exclude_input_in_output": True,
    }
    alone = []
    for seed in range(12):
        try:
            alone.append(generate(server, "stories", PROMPT, seed=seed, **options).ids)
        except Refused as refused:
            alone.append(str(refused))
    is_whole = [isinstance(ids, list) for ids in alone]
    # A prompt with which two neighbouring sequences succeed, and one with which only one of three does.
    good = next(seed for seed in range(11) if is_whole[seed] and is_whole[seed + 1])
    bad = next(seed for seed in range(10) if sum(is_whole[seed : seed + 3]) == 2)
    (error,) = [text for text in alone[bad : bad + 3] if isinstance(text, str)]

    async def main():
        async with clients.grpc(server) as client:
            for stream in (True, False):
                asked = [{**options, "stream": stream, "seed": seed, "n": n} for seed, n in ((good, 2), (bad, 3))]
                answers = (clients.stream(client, model, PROMPT, **one) for one in asked)
                whole, failed = await asyncio.gather(*answers, return_exceptions=True)
                assert [sequence.ids for sequence in whole.sequences()] == alone[good : good + 2]
                assert isinstance(failed, Refused) and str(failed) == error

    clients.run(main())
    assert_blocks_come_back(server, model)


def test_a_request_out_of_time_returns_the_partial_sequences(server):
    options = {"n": 3, "temperature": 1.0, "max_tokens": 4000, "timeout": 100_000}
    (answer,) = clients.streams(server, "synthetic", [([8, 9], options)])
    for sequence in answer.sequences():
        assert sequence.finish_reason == "timed_out"
        assert 5 < len(sequence.ids) < 1000
        assert sequence.ids == continuation([8, 9], len(sequence.ids))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"n": 65}, "'n': 65 is not at most max_batch_size, which is 64 in the model's config.pbtxt"),
        ({"best_of": 100}, "'best_of': 100 is not at most max_batch_size"),
        ({"n": 0}, "'n': 0 is not an integer of 1 or more"),
        ({"n": "many"}, "'n'"),
        ({"n": 2.5}, "'n'"),
        ({"n": 3, "num_return_sequences": 4}, "given twice"),
        ({"n": 4, "best_of": 3}, "'best_of': 3 is not at least n, which is 4"),
        ({"n": 2, "temperature": 0}, "'n': the 2 sequences of a greedy request are all the same"),
        ({"best_of": 2, "top_k": 1}, "'best_of': the 2 sequences of a greedy request"),
        ({"pad_id": "none"}, "'pad_id'"),
    ],
    ids=str,
)
def test_bad_values_are_rejected_by_name(server, options, words):
    with pytest.raises(Refused) as refused:
        generate(server, "stories", PROMPT, **{"temperature": 1.0, **options})
    assert words in str(refused.value)


def test_best_of_is_rejected_for_streams(server):
    with pytest.raises(Refused, match="'best_of'.*leave out 'stream'"):
        generate_stream(server, "stories", PROMPT, n=1, best_of=2, temperature=1.0)
    with pytest.raises(Refused, match="'best_of': the synthetic runner has no logits"):
        generate(server, "synthetic", [1], n=1, best_of=2, temperature=1.0)


TENSORS = """
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "num_return_sequences" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "sampling_param_best_of" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "num_output_tokens" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] }
]
"""


def test_the_number_of_sequences_can_be_a_tensor(repository, deployment, expected):
    """A model that declares one text returns as many as a request asks for."""
    deployment.add_model(repository, "stories", fields=TENSORS, checkpoint=STORIES)

    def inputs(**options):
        prompt = tensor("text_input", numpy.array([[PROMPT.encode()]], dtype=object), "BYTES")
        return [prompt, *(tensor(name, numpy.array([[n]], dtype=numpy.int32), "INT32") for name, n in options.items())]

    with deployment.server(repository) as own:
        four, best = clients.streams(
            own,
            "stories",
            [
                (inputs(num_return_sequences=4), {**SAMPLED, "stream": True, "exclude_input_in_output": True}),
                (inputs(num_return_sequences=2, sampling_param_best_of=4), {**SAMPLED, "stream": False}),
            ],
        )
    texts = [text for text, *_ in expected["plain"]]
    assert [sequence.text for sequence in four.sequences()] == texts
    two = [sequence.text for sequence in best.sequences()]
    assert len(two) == 2 and set(two) <= set(texts)
