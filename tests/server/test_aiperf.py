"""NVIDIA's AIPerf against the demo model, by the command that docs/src/measuring.md has."""

import json
import os
import re
import shlex
import subprocess

import pytest

from harness.front import Front
from harness.repository import ROOT

# The command, one line per flag.
(COMMAND,) = re.findall(r"^aiperf (profile(?: .*\\\n)+ .*)$", (ROOT / "docs/src/measuring.md").read_text(), re.M)


@pytest.mark.deployments("iterative")
def test_aiperf_measures_the_demo_model_with_the_servers_token_counts(server, tmp_path):
    arguments = shlex.split(COMMAND.replace("\\\n", " ").replace("localhost:8000", server.http_url))
    flags = {name: arguments[i + 1] for i, name in enumerate(arguments[:-1]) if name.startswith("--")}
    assert flags["--request-count"] == "64"
    few = {"--request-count": "12", "--concurrency": "4", "--isl": "30", "--osl": "11"}
    for name, value in few.items():
        arguments[arguments.index(name) + 1] = value
    results = tmp_path / "results"
    command = [os.environ["AIPERF_PYTHON"], "-m", "aiperf", *arguments, "--artifact-dir", str(results), "--ui", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (report,) = results.rglob("profile_export_aiperf.json")
    report = json.loads(report.read_text())
    assert report["request_count"]["avg"] == 12 and not report["error_summary"]
    # The token counts reported by the server.
    assert report["usage_completion_tokens"]["min"] == report["usage_completion_tokens"]["max"] == 11
    assert report["output_sequence_length"]["avg"] == 11
    assert report["input_sequence_length"]["avg"] == report["usage_prompt_tokens"]["avg"]
    assert abs(report["input_sequence_length"]["avg"] - 30) <= 2
    assert 0 < report["time_to_first_token"]["avg"] < report["request_latency"]["avg"]


@pytest.mark.deployments("iterative")
def test_aiperf_measures_openais_api_with_the_servers_token_counts(server, tmp_path):
    results = tmp_path / "results"
    command = [os.environ["AIPERF_PYTHON"], "-m", "aiperf", "profile", "--model", "stories", "--endpoint-type", "chat", "--streaming"]
    command += ["--use-server-token-count", "--tokenizer", "model_repository/stories/1", "--extra-inputs", "ignore_eos:true"]
    command += ["--concurrency", "4", "--request-count", "12", "--isl", "30", "--osl", "11"]
    with Front(server) as front:
        command += ["--url", front.url, "--artifact-dir", str(results), "--ui", "none"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (report,) = results.rglob("profile_export_aiperf.json")
    report = json.loads(report.read_text())
    assert report["request_count"]["avg"] == 12 and not report["error_summary"]
    assert report["usage_completion_tokens"]["min"] == report["usage_completion_tokens"]["max"] == 11
    assert report["output_sequence_length"]["avg"] == 11
    assert report["input_sequence_length"]["avg"] == report["usage_prompt_tokens"]["avg"]
    assert 0 < report["time_to_first_token"]["avg"] < report["request_latency"]["avg"]
