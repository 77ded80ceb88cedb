"""Outputs about an answer's end and progress: stop reasons, KV blocks, timestamps."""

import time

import pytest

from harness import clients
from harness.clients import generate, generate_stream

PROMPT = "Once upon a time, there was a brave fox named Finn."
BLOCKS = ["kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"]
MOMENTS = ["arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"]
GUESSES = ["acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"]


def reason(server, **options):
    options = {"max_tokens": 40, "return_stop_reason": True, **options}
    whole = generate(server, "stories_full", PROMPT, **options)
    streamed = generate_stream(server, "stories", PROMPT, **options)
    assert streamed.tensors("stop_reason")[:-1] == [""] * (len(streamed.tensors("stop_reason")) - 1)
    assert whole.last.tensors["stop_reason"] == streamed.tensors("stop_reason")[-1]
    return whole.finish_reason, whole.last.tensors["stop_reason"]


def test_the_stop_word_or_token_that_ended_the_answer_is_named(server):
    greedy = generate(server, "stories", PROMPT, max_tokens=40, exclude_input_in_output=True)
    end_id = greedy.ids[7]
    assert reason(server, end_id=end_id) == ("end_id", str(end_id))
    word = greedy.text[40:45]
    assert reason(server, stop=f'["nowhere", "{word}", "else"]') == ("stop_words", word)
    assert reason(server, ignore_eos=True) == ("length", "")


def test_none_of_these_outputs_is_returned_without_a_request(server):
    off = {"return_stop_reason": False, "return_perf_metrics": False}
    for options in ({}, off):
        assert generate(server, "stories", PROMPT, max_tokens=2, **options).last.tensors == {}


def metrics(server, model, prompt, **options):
    """The last response's figures; no other response has any."""
    answer = generate_stream(server, model, prompt, return_perf_metrics=True, **options)
    assert all(not response.tensors for response in answer.responses[:-1])
    figures = answer.last.tensors
    assert set(figures) == {*BLOCKS, *MOMENTS, *GUESSES}
    assert [figures[name] for name in GUESSES] == [0, 0, 0]
    assert figures["kv_cache_alloc_total_blocks"] == sum(figures[name] for name in BLOCKS[:2])
    return figures


def test_allocated_and_reused_blocks_are_counted(server):
    """Blocks of 32 positions; the last token is never in the cache."""
    prompt = [41] + list(range(7, 106))
    # Other tests may use the same prompt prefix.
    own = {"cache_salt": "counted"}
    figures = metrics(server, "synthetic", prompt, max_tokens=30, **own)
    assert [figures[name] for name in BLOCKS] == [5, 0, 5]
    # 99 of the 100 tokens can be reused, the last 3 as the beginning of a block.
    figures = metrics(server, "synthetic", prompt, max_tokens=1, **own)
    assert [figures[name] for name in BLOCKS] == [0, 4, 4]
    figures = metrics(server, "synthetic", prompt, max_tokens=1, kv_cache_reuse=False, **own)
    assert [figures[name] for name in BLOCKS] == [4, 0, 4]


def test_timestamps_are_in_order_on_the_steady_clock(server):
    before = time.monotonic_ns()
    figures = metrics(server, "one_slot", [3, 1, 4], max_tokens=11)
    after = time.monotonic_ns()
    moments = [before, *(figures[name] for name in MOMENTS), after]
    assert moments == sorted(moments)
    # There are ten steps of 5 ms between the first token and the last.
    assert figures["last_token_time_ns"] - figures["first_token_time_ns"] >= 10 * 5_000_000


def test_a_request_that_ends_before_its_first_token_has_no_timestamp_for_it(server):
    figures = generate(server, "one_slot", [1], max_tokens=4000, timeout=1, return_perf_metrics=True).last.tensors
    assert figures["first_token_time_ns"] in (0, figures["last_token_time_ns"])
    assert figures["arrival_time_ns"] > 0


@pytest.mark.parametrize("name", ["return_stop_reason", "return_perf_metrics"])
def test_bad_values_are_rejected_by_name(server, name):
    with pytest.raises(clients.Refused, match=f"{name}.*true or false"):
        generate(server, "stories", PROMPT, **{name: "because"})
