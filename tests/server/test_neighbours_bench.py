"""`bench neighbours`: the figures of its rows, and a short run."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.complete

BENCH = pathlib.Path(__file__).resolve().parents[2] / "benches" / "drivers"
sys.path.insert(0, str(BENCH))

import neighbours  # noqa: E402  the benches are scripts


def record(start_us, model_us):
    return {"Step Start (us)": start_us, "Model Duration (us)": model_us}


def test_a_gap_is_from_start_to_start_and_the_rest_excludes_the_model():
    records = [record(1000.0, 400.0), record(1500.0, 300.0), record(3500.0, 300.0)]
    assert neighbours.gaps(records) == [pytest.approx((0.5, 0.1)), pytest.approx((2.0, 1.7))]
    assert neighbours.gaps(records[:1]) == []


def test_a_row_has_medians_and_maxima_over_the_rounds():
    alone = [[(1.0, 0.1), (1.2, 0.3), (1.1, 0.2)], [(3.0, 0.4)], [(1.0, 0.2)]]
    beside = [[(2.0, 0.5), (9.0, 7.0), (2.2, 0.6)], [(4.0, 0.9), (5.0, 1.0)], [(2.0, 0.6)]]
    row = neighbours.row_of("a storm", alone, beside)
    assert row["step_ms_without"] == 1.1 and row["step_ms_max_without"] == 1.2
    assert row["step_ms_with"] == 2.2 and row["step_ms_max_with"] == 5.0
    assert row["besides_model_ms_without"] == 0.2 and row["besides_model_ms_max_with"] == 1.0
    assert row["added_ms"] == pytest.approx(0.4) and row["added_ms_max"] == pytest.approx(0.7)
    assert (row["steps"], row["rounds"]) == (6, 3)


def test_a_run_has_a_row_for_every_hostile_request():
    command = [sys.executable, BENCH / "neighbours.py", "--rounds=1", "--only=log-probabilities", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    expected = [hostile.name for hostile in neighbours.HOSTILE if "log-probabilities" in hostile.name]
    assert [row["hostile"] for row in found] == expected
    for row in found:
        assert 0 < row["step_ms_without"] <= row["step_ms_max_without"]
        assert row["steps"] > 0
