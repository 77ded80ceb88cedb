"""Beam search: what is found, how it comes back, and what it leaves behind. (tests/models/beams.rs compares it with
transformers, and test_batching.py holds it to the same bits under every scheme.)"""

import asyncio
import itertools
import json

import numpy
import pytest

from harness import clients
from harness.clients import GrpcStream, Refused, described, generate, infer
from harness.server import assert_blocks_come_back
from harness.synthetic import MASK, _mix

PROMPT = "Once upon a time, there was a brave fox named Finn."
BEAMS = {"beam_width": 4, "max_tokens": 24, "exclude_input_in_output": True, "stream": False, "return_log_probs": True}


def found(server, model, options, prompt=PROMPT):
    (answer,) = clients.streams(server, model, [(prompt, options)])
    return answer


def test_all_beams_come_back_the_best_first_with_what_they_add_up_to(server):
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
    """What a beam of the synthetic runner names, from the lines of its documentation (src/runner/synthetic.rs)."""
    entry = 0
    for token in tokens:
        entry = _mix((entry + 0x9E3779B97F4A7C15 * (token + 1)) & MASK)
    unit = (1 + (entry >> 32) % 7) / 8
    return [((entry + rank) % vocab_size, -(rank + 1) * unit) for rank in range(num)]


def test_a_search_finds_what_the_synthetic_runner_says(server):
    prompt, width, num_tokens = [5, 6, 7], 3, 12
    beams = [(0.0, [])]
    for _ in range(num_tokens):
        ways = [
            (score + log_prob, [*tokens, token])
            for score, tokens in beams
            for token, log_prob in candidates(prompt + tokens, 2 * width)
        ]
        beams = sorted(ways, key=lambda way: -way[0])[:width]
    # It has no logits, and so no log-probabilities to return.
    options = {**BEAMS, "beam_width": width, "max_tokens": num_tokens, "return_log_probs": False}
    answer = found(server, "synthetic_beams", options, prompt)
    assert [sequence.ids for sequence in answer.sequences()] == [tokens for _, tokens in beams]


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


def test_a_post_processor_is_asked_about_every_beam(server):
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


def test_a_request_with_beams_that_is_given_up_leaves_nothing_behind(server):
    async def main():
        async with clients.grpc(server) as client:
            for delay in (0.0, 0.02, 0.1):
                long = {**BEAMS, "max_tokens": 200, "ignore_eos": True, "beam_width": 8}
                stream = GrpcStream(client, "stories_beams", PROMPT, **long)
                other = asyncio.ensure_future(clients.stream(client, "stories_beams", PROMPT, max_tokens=40))

                async def read(stream=stream):
                    return [response async for response in stream]

                reading = asyncio.ensure_future(read())
                await asyncio.sleep(delay)
                stream.cancel()
                with pytest.raises(Refused):
                    await reading
                yield_of_other = await other
                assert yield_of_other.last.finish_reason

    clients.run(main())
    assert_blocks_come_back(server, "stories_beams")


def test_a_search_whose_time_is_up_has_found_nothing(server):
    answer = found(server, "stories_beams", {**BEAMS, "max_tokens": 400, "ignore_eos": True, "timeout": 20000})
    assert answer.last.arrays["finish_reason"][0].tolist() == [b"timed_out"] * 4
    assert not answer.last.arrays["num_output_tokens"].any()
    assert_blocks_come_back(server, "stories_beams")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"beam_width": 9}, "at most max_beam_width, which is 8"),
        ({"stream": True}, "leave out 'stream'"),
        ({"stop": "fox"}, "stop_token_ids"),
        ({"temperature": 0.3}, "nothing is drawn"),
        ({"guided_regex": "a+"}, "cannot be guided"),
        ({"logprobs": 2}, "not told of beams"),
        ({"return_generation_logits": True}, "not kept"),
        ({"n": 5}, "at most the number of beams"),
        ({"early_stopping": "often"}, "never"),
    ],
    ids=str,
)
def test_what_beams_cannot_do_is_refused(server, options, words):
    with pytest.raises(Refused) as refused:
        found(server, "stories_beams", {**BEAMS, **options})
    assert words in str(refused.value)


def test_more_blocks_than_there_are_are_refused(server):
    with pytest.raises(Refused, match="lower beam_width or max_tokens"):
        found(server, "stories_beams_tight", {**BEAMS, "beam_width": 8, "max_tokens": 240})
