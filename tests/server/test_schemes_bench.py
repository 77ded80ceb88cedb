"""`bench schemes`: the figures of its rows, and a short run."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.complete

BENCH = pathlib.Path(__file__).resolve().parents[2] / "benches" / "drivers"
sys.path.insert(0, str(BENCH))

import rows  # noqa: E402  the benches are scripts
import schemes  # noqa: E402


@pytest.mark.parametrize(("share", "value"), [(0, 1), (0.01, 1), (0.5, 50), (0.505, 51), (0.99, 99), (1, 100)])
def test_a_percentile_is_the_smallest_value_that_covers_the_share(share, value):
    assert rows.percentile(range(100, 0, -1), share) == value
    assert rows.percentile([7], share) == 7


def test_a_row_combines_the_clients_timings_and_the_steps():
    outcomes = [schemes.Outcome(100, 10.0, 10.5, 12.0), schemes.Outcome(300, 11.0, 12.5, 15.0)]
    in_flight = [
        {"Scheduled Requests": 2, "Context Requests": 2, "Generation Requests": 0},
        {"Scheduled Requests": 1, "Context Requests": 0, "Generation Requests": 1},
    ]
    assert schemes.row_of(outcomes, in_flight) == pytest.approx(
        {
            "requests_per_s": 2 / 5,
            "output_tokens_per_s": 400 / 5,
            "ttft_ms_p50": 500,
            "ttft_ms_p99": 1500,
            "latency_ms_mean": 3000,
            "latency_ms_p50": 2000,
            "latency_ms_p99": 4000,
            "requests_per_step": 1.5,
            "empty_slot_share": 0,
        }
    )


def test_the_slots_of_ended_requests_in_a_lockstep_batch_are_empty():
    outcomes = [schemes.Outcome(2, 0.0, 1.0, 1.0)]
    # Two of them end with their second token, and two with their third.
    lockstep = [{"Scheduled Requests": 4, "Total Generation Tokens": 10, "Empty Generation Slots": 2}]
    row = schemes.row_of(outcomes, lockstep)
    assert row["empty_slot_share"] == 0.25
    assert row["requests_per_step"] == round((4 + 4 + 2) / 3, 4) or row["requests_per_step"] == (4 + 4 + 2) / 3


def test_each_figure_has_its_own_median_over_the_rounds():
    rounds = [{"a": 1, "b": 30}, {"a": 3, "b": 10}, {"a": 2, "b": 20.0004}]
    assert schemes.medians(rounds) == {"a": 2, "b": 20.0}


def test_the_workload_is_the_same_for_every_scheme_and_arrives_at_its_rate():
    requests = [*schemes.workload(1, 2000, 10.0)]
    assert requests == [*schemes.workload(1, 2000, 10.0)]
    assert requests[-1].arrival == pytest.approx(200, rel=0.1)
    assert {len(r.prompt) for r in requests} == {*range(32, 257)}
    assert min(r.num_tokens for r in requests) == 16 and max(r.num_tokens for r in requests) == 512
    assert {r.arrival for r in schemes.workload(1, 10)} == {0.0}


def test_the_capacity_assumes_full_steps():
    # 32 tokens and, for 264 of them, a prompt of 144: 4840 + 342 * 32 * (1 + 144 / 264) us.
    assert schemes.capacity(1) == pytest.approx(32 / 264 / 21.753e-3, rel=1e-3)
    assert schemes.capacity(4) == pytest.approx(4 * schemes.capacity(1))


def test_a_run_has_a_row_for_every_scheme_under_every_load():
    command = [sys.executable, BENCH / "schemes.py", "--requests=4", "--rounds=1", "--speed-up=50"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    expected = {(load, *scheme) for load in ("closed", "open") for scheme in schemes.SCHEMES}
    assert len(found) == len(expected) and {(r["load"], r["scheme"], r["policy"]) for r in found} == expected
    for row in found:
        assert row["output_tokens_per_s"] > 0 and row["ttft_ms_p50"] <= row["latency_ms_p50"], row
        assert (row["empty_slot_share"] > 0) <= (row["scheme"] == "V1"), row
