"""`bench front`: a short run."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.complete

BENCH = pathlib.Path(__file__).resolve().parents[2] / "benches" / "drivers"


def test_a_run_has_a_row_for_each_number_of_streams():
    options = ["--firsts=2", "--streams=1,3", "--tokens=20", "--rounds=1", "--json"]
    command = [sys.executable, BENCH / "front.py", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["streams"], row["tokens"]) for row in found] == [(1, 20), (3, 60)]
    for row in found:
        assert row["cpu_us_per_token"] > row["cpu_us_per_write"] > 0 and row["ratio_to_write"] > 1
        assert row["ttft_ms_front"] > 0 and row["ttft_ms_grpc"] > 0
