"""NVIDIA's AIPerf against the demo model, by the command that docs/src/measuring.md has."""

import json
import os
import re
import shlex
import subprocess

import pytest

from harness.repository import ROOT

pytestmark = pytest.mark.complete

# The command, one line per flag.
(COMMAND,) = re.findall(r"^aiperf (profile(?: .*\\\n)+ .*)$", (ROOT / "docs/src/measuring.md").read_text(), re.M)


def report_of(arguments, results):
    """What AIPerf measures with 12 requests, 4 at a time, of 30 tokens that are answered with 11."""
    arguments = [*arguments, "--concurrency", "4", "--request-count", "12", "--isl", "30", "--osl", "11"]
    command = [os.environ["AIPERF_PYTHON"], "-m", "aiperf", "profile", *arguments, "--artifact-dir", str(results), "--ui", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (report,) = results.rglob("profile_export_aiperf.json")
    report = json.loads(report.read_text())
    assert report["request_count"]["avg"] == 12 and not report["error_summary"]
    # The token counts reported by the server.
    assert report["usage_completion_tokens"]["min"] == report["usage_completion_tokens"]["max"] == 11
    assert report["output_sequence_length"]["avg"] == 11
    assert report["input_sequence_length"]["avg"] == report["usage_prompt_tokens"]["avg"]
    assert 0 < report["time_to_first_token"]["avg"] < report["request_latency"]["avg"]
    return report


@pytest.mark.deployments("iterative")
def test_aiperf_measures_the_demo_model_with_the_servers_token_counts(server, tmp_path):
    _, *arguments = shlex.split(COMMAND.replace("\\\n", " ").replace("localhost:8000", server.http_url))
    flags = {name: arguments[i + 1] for i, name in enumerate(arguments[:-1]) if name.startswith("--")}
    assert flags["--request-count"] == "64"
    for name in ("--request-count", "--concurrency", "--isl", "--osl"):
        place = arguments.index(name)
        del arguments[place : place + 2]
    report = report_of(arguments, tmp_path)
    assert abs(report["input_sequence_length"]["avg"] - 30) <= 2


@pytest.mark.deployments("iterative")
def test_aiperf_measures_openais_api_with_the_servers_token_counts(server, front, tmp_path):
    arguments = ["--model", "stories", "--endpoint-type", "chat", "--streaming", "--use-server-token-count"]
    arguments += ["--tokenizer", "model_repository/stories/1", "--extra-inputs", "ignore_eos:true", "--url", front.url]
    report_of(arguments, tmp_path)
