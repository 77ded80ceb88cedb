"""Beam search: its results, how they are returned, and what remains afterwards. (tests/models/beams.rs
compares it with transformers, and test_batching.py checks for the same bits under every scheme.)"""

import asyncio
import itertools
import json
import math

import numpy
import pytest

from harness import clients
from harness.clients import GrpcStream, Refused, described, generate, infer
from harness.server import assert_blocks_come_back
from harness.synthetic import MASK, Gate, _mix

pytestmark = pytest.mark.also_on_gpu
PROMPT = "Once upon a time, there was a brave fox named Finn."
BEAMS = {"beam_width": 4, "max_tokens": 24, "exclude_input_in_output": True, "stream": False, "return_log_probs": True}


def found(server, model, options, prompt=PROMPT):
    (answer,) = clients.streams(server, model, [(prompt, options)])
    return answer


def assert_same(one, other, name):
    assert one.shape == other.shape, name
    assert one.tolist() == other.tolist(), name


def test_all_beams_are_returned_best_first_with_their_cumulative_log_probabilities(server):
    answer = found(server, "stories_beams", {**BEAMS, "ignore_eos": True})
    assert len([response for response in answer.responses if response.arrays]) == 1
    arrays = answer.last.arrays
    assert arrays["output_ids"].shape == arrays["output_log_probs"].shape == (1, 4, 24)
    for name in ("text_output", "sequence_length", "finish_reason", "num_output_tokens", "cum_log_probs"):
        assert arrays[name].shape == (1, 4), name
    sums = arrays["cum_log_probs"][0]
    assert sums.tolist() == sorted(sums, reverse=True)
    assert numpy.allclose(arrays["output_log_probs"][0].sum(axis=1), sums, atol=1e-3)
    texts = arrays["text_output"][0].tolist()
    assert len(set(texts)) == 4
    greedy = found(server, "stories", {**BEAMS, "beam_width": 1, "ignore_eos": True}).last
    assert sums[0] >= greedy.arrays["cum_log_probs"].item(), "a search does no worse than its first beam"


def test_only_the_best_are_returned_by_the_names_of_both_backends(server):
    every = [described(sequence) for sequence in found(server, "stories_beams", BEAMS).sequences()]
    some = found(server, "stories_beams", {**BEAMS, "num_return_sequences": 2})
    assert [described(sequence) for sequence in some.sequences()] == every[:2]
    by_infer = infer(server, "stories_beams_full", PROMPT, **{**BEAMS, "stream": False})
    assert [described(sequence) for sequence in by_infer.sequences()] == every
    parameters = {"use_beam_search": True, "best_of": 4, "n": 3, "max_tokens": 24, "temperature": 0.0}
    body = {"sampling_parameters": json.dumps(parameters), "exclude_input_in_output": True}
    by_vllm = generate(server, "stories_beams_full", PROMPT, **body)
    assert by_vllm.last.text == [text for text, *_ in every[:3]]
    best = generate(server, "stories_beams_full", PROMPT, **{**body, "sampling_parameters": json.dumps({**parameters, "n": 1})})
    assert best.text == every[0][0]


def test_beams_of_every_width_are_the_same_among_others_and_in_a_full_cache(server):
    """`stories_beams_tight` has few blocks: other requests are paused, beams are not."""
    asked = [
        (PROMPT[: 12 + 5 * width], {**BEAMS, "beam_width": width, "length_penalty": penalty})
        for width, penalty in itertools.product([2, 3, 5, 8], [0.0, 1.5])
    ]
    others = [(PROMPT[: 5 + 3 * n], {"max_tokens": 30 + n, "stream": True}) for n in range(16)]
    alone = [found(server, "stories_beams", options, prompt) for prompt, options in asked]
    alone += [found(server, "stories", options, prompt) for prompt, options in others]
    for model in ("stories_beams", "stories_beams_tight"):
        together = clients.streams(server, model, [*asked, *others])
        for one, other in zip(together, alone, strict=True):
            same = [[described(sequence) for sequence in answer.sequences()] for answer in (one, other)]
            assert same[0] == same[1]
        assert_blocks_come_back(server, model)


def candidates(tokens, num, vocab_size=32000):
    """The candidates of a beam of the synthetic runner, as its documentation defines them
    (crates/runner/src/synthetic.rs)."""
    entry = 0
    for token in tokens:
        entry = _mix((entry + 0x9E3779B97F4A7C15 * (token + 1)) & MASK)
    unit = (1 + (entry >> 32) % 7) / 8
    return [((entry + rank) % vocab_size, -(rank + 1) * unit) for rank in range(num)]


def test_a_search_finds_the_best_beams_of_the_synthetic_runner(server):
    prompt, width, num_tokens = [5, 6, 7], 3, 12
    beams = [(0.0, [])]
    for _ in range(num_tokens):
        ways = [
            (score + log_prob, [*tokens, token])
            for score, tokens in beams
            for token, log_prob in candidates(prompt + tokens, 2 * width)
        ]
        beams = sorted(ways, key=lambda way: -way[0])[:width]
    # The runner has no logits, and so there are no log-probabilities to return.
    options = {**BEAMS, "beam_width": width, "max_tokens": num_tokens, "return_log_probs": False}
    answer = found(server, "synthetic_beams", options, prompt)
    assert [sequence.ids for sequence in answer.sequences()] == [tokens for _, tokens in beams]


def test_each_beam_has_its_logits_and_log_probabilities(server):
    """tests/models/beams.rs compares the logits with a prompt of these tokens."""
    options = {"beam_width": 3, "max_tokens": 9, "exclude_input_in_output": True, "stream": False}
    asked = {"return_generation_logits": True, "return_context_logits": True, "logprobs": 2, "return_log_probs": True}
    silent = found(server, "stories_beams", options)
    answer = found(server, "stories_beams", {**options, **asked})
    arrays = answer.last.arrays
    for name, expected in silent.last.arrays.items():
        assert_same(arrays[name], expected, name)
    logits = arrays["generation_logits"]
    vocab_size = arrays["context_logits"].shape[-1]
    assert logits.shape == (1, 3, 9, vocab_size)
    numpy.testing.assert_array_equal(arrays["context_logits"][0, -1], logits[0, 0, 0])
    for row, sequence in enumerate(answer.sequences()):
        num_tokens = sequence.last.num_output_tokens
        model = logits[0, row, :num_tokens].astype(numpy.float64)
        own = model - numpy.log(numpy.exp(model).sum(axis=1, keepdims=True))
        chosen = own[range(num_tokens), sequence.ids]
        # Without penalties, the search uses the model's own log-probabilities.
        numpy.testing.assert_allclose(arrays["output_log_probs"][0, row, :num_tokens], chosen, atol=1e-5)
        entries = json.loads(arrays["logprobs"][0, row])
        assert len(entries) == num_tokens
        for entry, token, position in zip(entries, sequence.ids, range(num_tokens), strict=True):
            first, *_ = entry
            assert first == str(token) and len(entry) in (2, 3)
            assert entry[first]["logprob"] == pytest.approx(chosen[position], abs=1e-5)
            best = max(entry.values(), key=lambda it: it["logprob"])
            assert best["rank"] == 1 and best["logprob"] == pytest.approx(own[position].max(), abs=1e-5)


def test_the_logits_of_beams_are_limited_by_the_memory_for_logits(server):
    """For as many rows as its beams can need; `stories_few_logits` has memory for 40."""
    options = {"beam_width": 4, "max_tokens": 10, "return_generation_logits": True, "stream": False, "ignore_eos": True}
    with pytest.raises(Refused, match="up to 44 rows of logits.*lower max_tokens"):
        found(server, "stories_few_logits", {**options, "max_tokens": 11})
    for _ in range(2):
        answer = found(server, "stories_few_logits", options)
        assert answer.last.arrays["generation_logits"].shape[1:3] == (4, 10)


def test_end_ids_end_some_beams_before_others(server):
    options = {**BEAMS, "max_tokens": 40, "early_stopping": "never", "length_penalty": 0.0}
    every = found(server, "stories_beams", {**options, "ignore_eos": True})
    end_id = every.sequences()[1].ids[5]
    answer = found(server, "stories_beams", {**options, "end_id": end_id, "pad_id": -1})
    reasons = {sequence.finish_reason for sequence in answer.sequences()}
    assert "end_id" in reasons
    lengths = answer.last.arrays["num_output_tokens"][0]
    ids = answer.last.arrays["output_ids"][0]
    for row, length, reason in zip(ids, lengths, answer.last.arrays["finish_reason"][0], strict=True):
        assert (row[length - 1] == end_id) == (reason == b"end_id")
        assert set(row[length:].tolist()) <= {-1}


def test_a_post_processor_processes_every_beam(server):
    plain = found(server, "stories_beams", BEAMS)
    firsts = sorted({sequence.ids[0] for sequence in plain.sequences()})
    options = {
        "logits_post_processor_name": "ban_first_tokens",
        "logits_post_processor_args": json.dumps({"tokens": firsts, "count": 6}),
    }
    answer = found(server, "stories_beams", {**BEAMS, **options})
    for sequence in answer.sequences():
        assert not set(sequence.ids[:6]) & set(firsts)
    assert len(answer.sequences()) == 4


@pytest.mark.cancelling
def test_a_cancelled_request_with_beams_leaves_nothing_behind(server, tmp_path):
    async def main():
        async with clients.grpc(server) as client:
            for num_tokens in (0, 1, 8):
                gate = Gate(tmp_path / "gate", num_tokens)
                held = {"logits_post_processor_name": "waits", "logits_post_processor_args": str(gate.file)}
                long = {**BEAMS, "max_tokens": 450, "ignore_eos": True, "beam_width": 8, "stream": True}
                stream = GrpcStream(client, "stories_beams", PROMPT, **long, **held)
                other = asyncio.ensure_future(clients.stream(client, "stories_beams", PROMPT, max_tokens=40))
                responses = aiter(stream)
                for _ in range(num_tokens):
                    await anext(responses)
                # The next step waits.
                stream.cancel()
                gate.open()
                with pytest.raises(Refused, match="cancelled"):
                    async for _ in responses:
                        pass
                yield_of_other = await other
                assert yield_of_other.last.finish_reason
            # If Triton ends the only request between two steps, the backend notices in the next request's
            # step.
            await clients.stream(client, "stories_beams", PROMPT, max_tokens=2)

    clients.run(main())
    assert_blocks_come_back(server, "stories_beams")


# After a given number of tokens, the results of a search are its current beams; only whether they continue
# differs.
AS_THEY_ARE = {**BEAMS, "ignore_eos": True}
OF_BEAMS = ("output_ids", "text_output", "cum_log_probs", "output_log_probs", "num_output_tokens", "sequence_length")


def assert_beams_as_they_are(server, response, num_tokens):
    shorter = found(server, "stories_beams", {**AS_THEY_ARE, "max_tokens": num_tokens}).last
    for name in OF_BEAMS:
        assert_same(response.arrays[name], shorter.arrays[name], name)


@pytest.mark.parametrize("model", ["stories_beams", "stories_beams_overlap"])
def test_each_response_of_a_stream_has_the_complete_current_beams(server, model):
    asked = {"logprobs": 1, "return_generation_logits": True}
    stream = found(server, model, {**AS_THEY_ARE, **asked, "max_tokens": 6, "stream": True})
    *news, final = [response for response in stream.responses if response.arrays]
    assert [response.arrays["output_ids"].shape for response in news] == [(1, 4, length) for length in range(1, 6)]
    for length, response in enumerate(news, 1):
        assert_beams_as_they_are(server, response, length)
        assert response.arrays["finish_reason"][0].tolist() == [b""] * 4
        # Each token's outputs come once.
        assert response.arrays["logprobs"][0].tolist() == [b"[]"] * 4
        assert response.arrays["generation_logits"].shape == (1, 1, 1, 1)
    whole = found(server, "stories_beams", {**AS_THEY_ARE, **asked, "max_tokens": 6}).last
    for name, expected in whole.arrays.items():
        assert_same(final.arrays[name], expected, name)
    assert_blocks_come_back(server, model)


def test_a_stream_of_beams_respects_its_interval(server):
    options = {**AS_THEY_ARE, "max_tokens": 12, "stream": True, "stream_interval": 5}
    stream = found(server, "stories_beams", options)
    lengths = [r.arrays["output_ids"].shape[2] for r in stream.responses if r.arrays]
    assert lengths == [1, 6, 11, 12]


def test_a_stream_shows_which_texts_have_ended(server):
    options = {**BEAMS, "max_tokens": 40, "early_stopping": "never", "length_penalty": 0.0}
    every = found(server, "stories_beams", {**options, "ignore_eos": True})
    end_id = every.sequences()[1].ids[5]
    whole = found(server, "stories_beams", {**options, "end_id": end_id}).last
    stream = found(server, "stories_beams", {**options, "end_id": end_id, "stream": True})
    *news, final = [response for response in stream.responses if response.arrays]
    for name, expected in whole.arrays.items():
        assert_same(final.arrays[name], expected, name)
    reasons = {reason for response in news for reason in response.arrays["finish_reason"][0]}
    assert reasons == {b"", b"end_id"}
    for response in news:
        ids, lengths, reasons = (response.arrays[n][0] for n in ("output_ids", "num_output_tokens", "finish_reason"))
        for row, length, reason in zip(ids, lengths, reasons, strict=True):
            assert (row[length - 1] == end_id) == (reason == b"end_id")


def test_a_stop_word_ends_a_beam_as_an_end_id_does(server):
    options = {**BEAMS, "max_tokens": 30, "early_stopping": "never", "length_penalty": 0.0, "ignore_eos": True}
    plain = found(server, "stories_beams", options)
    # A stop word from one of its texts, cut inside words, so that no token equals it.
    word = plain.sequences()[1].text.split()[3][1:] + " "
    stopped = found(server, "stories_beams", {**options, "stop": word, "return_stop_reason": True})
    included = found(server, "stories_beams", {**options, "stop": word, "include_stop_str_in_output": True})
    reasons = [sequence.finish_reason for sequence in stopped.sequences()]
    assert "stop_words" in reasons
    for sequence, other, reason in zip(stopped.sequences(), included.sequences(), reasons, strict=True):
        assert sequence.ids == other.ids, "the tokens of the word are among them"
        assert word not in sequence.text
        stop_reason = sequence.last.tensors["stop_reason"].item().decode()
        if reason == "stop_words":
            assert other.text == sequence.text + word
            assert stop_reason == word
        else:
            assert other.text == sequence.text
            assert stop_reason == ""
    for row, log_probs in zip(stopped.sequences(), stopped.last.arrays["output_log_probs"][0], strict=True):
        # The sum covers all tokens, including the stop word's.
        assert log_probs.sum() == pytest.approx(row.last.tensors["cum_log_probs"].item(), abs=1e-3)
        assert not log_probs[row.last.num_output_tokens :].any()
    longer = found(server, "stories_beams", {**options, "stop": json.dumps([word, "no such word"]), "stream": True})
    final = longer.last
    assert_same(final.arrays["output_ids"], stopped.last.arrays["output_ids"], "output_ids")
    # A stop word that is in no text changes nothing.
    other = found(server, "stories_beams", {**options, "stop": "no such word"})
    assert [described(it) for it in other.sequences()] == [described(it) for it in plain.sequences()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["stories_beams", "stories_beams_overlap"])
def test_a_search_out_of_time_returns_its_current_beams(server, model, stream):
    max_tokens = 450
    # However fast the machine is, a time limit between these ends the search between its first token and its last.
    shortest_us, longest_us = 1, 10**9
    while True:
        limit_us = math.isqrt(shortest_us * longest_us)
        options = {**AS_THEY_ARE, "max_tokens": max_tokens, "timeout": limit_us, "stream": stream}
        final = found(server, model, options).last
        num_tokens = final.arrays["num_output_tokens"].max().item()
        if 0 < num_tokens < max_tokens:
            break
        shortest_us, longest_us = (limit_us + 1, longest_us) if num_tokens == 0 else (shortest_us, limit_us)
        assert shortest_us < longest_us, "no time limit ends the search"
    assert final.arrays["finish_reason"][0].tolist() == [b"timed_out"] * 4
    assert_beams_as_they_are(server, final, num_tokens)
    assert_blocks_come_back(server, model)


@pytest.mark.parametrize("model", ["stories_beams", "stories_beams_overlap"])
def test_a_stopped_search_returns_its_current_beams(server, model):
    async def main():
        async with clients.grpc(server) as client:
            long = {**AS_THEY_ARE, "max_tokens": 450, "stream": True}
            responses = aiter(GrpcStream(client, model, PROMPT, request_id="me", **long))
            await anext(responses)
            await clients.stream(client, model, "me", request_id="me", stop=True)
            return [response async for response in responses if response.arrays][-1]

    final = clients.run(main())
    assert final.arrays["finish_reason"][0].tolist() == [b"cancelled"] * 4
    num_tokens = final.arrays["num_output_tokens"].max().item()
    assert 0 < num_tokens < 450
    assert_beams_as_they_are(server, final, num_tokens)
    assert_blocks_come_back(server, model)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"beam_width": 9}, "at most max_beam_width, which is 8"),
        ({"temperature": 0.3}, "beams are not sampled"),
        ({"guided_regex": "a+"}, "cannot be guided"),
        ({"n": 5}, "at most the number of beams"),
        ({"early_stopping": "often"}, "never"),
    ],
    ids=str,
)
def test_options_that_beams_do_not_support_are_rejected(server, options, words):
    with pytest.raises(Refused) as refused:
        found(server, "stories_beams", {**BEAMS, **options})
    assert words in str(refused.value)


def test_a_search_that_needs_more_blocks_than_exist_is_rejected(server):
    with pytest.raises(Refused, match="lower beam_width or max_tokens"):
        found(server, "stories_beams_tight", {**BEAMS, "beam_width": 8, "max_tokens": 240})
