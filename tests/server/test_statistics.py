"""Observability: the record of every step, and Prometheus metrics."""

import asyncio
import json
import re
import resource

import pytest

from harness import clients
from harness.repository import add_synthetic
from harness.server import Server, num_requests, until
from harness.synthetic import Gate

NUM_STREAMS, NUM_TOKENS, PROMPT_LENGTH = 8, 50, 20


@pytest.fixture(scope="module")
def run(tmp_path_factory, deployment):
    """A server that has run a known load: the server, the records, and the model's samples."""
    folder = tmp_path_factory.mktemp("statistics")
    stats_file = folder / "steps.jsonl"
    parameters = {"stats_file": stats_file, "synthetic_step_us": 3000, "max_tokens_in_paged_kv_cache": 3200}
    deployment.add_synthetic(folder / "repository", "model", {**parameters, "max_seq_len": 320})
    with deployment.server(folder / "repository", "--log-verbose=1", "--metrics-interval-ms=100") as server:

        async def main():
            async with clients.grpc(server) as client:
                prompts = [[n] * PROMPT_LENGTH for n in range(NUM_STREAMS)]
                requests = (clients.stream(client, "model", p, max_tokens=NUM_TOKENS) for p in prompts)
                await asyncio.gather(*requests)

        clients.run(main())
        yield server, [json.loads(line) for line in stats_file.read_text().splitlines()]


FIELDS = {
    "Timestamp",
    "Iteration Counter",
    "Active Request Count",
    "Max Request Count",
    "Max KV cache blocks",
    "Free KV cache blocks",
    "Used KV cache blocks",
    "Reused KV cache blocks",
    "Fraction used KV cache blocks",
    "Tokens per KV cache block",
    "Scheduled Requests",
    "Context Requests",
    "Generation Requests",
    "Total Context Tokens",
    "MicroBatch ID",
    "Paused Requests",
    "Waiting Requests",
    "Request count",
    "Total Input Tokens",
    "Total Output Tokens",
    "Runtime CPU Memory Usage",
    "Runtime GPU Memory Usage",
    "Runtime Pinned Memory Usage",
    "KV cache transfer time",
}


def test_every_step_has_a_record_with_the_batch_managers_field_names(run):
    _, records = run
    for record in records:
        assert FIELDS <= record.keys(), FIELDS - record.keys()
        assert re.fullmatch(r"\d\d-\d\d-\d{4} \d\d:\d\d:\d\d", record["Timestamp"])
    counters = [record["Iteration Counter"] for record in records]
    assert counters == list(range(counters[0], counters[0] + len(counters)))


def test_the_records_add_up_to_the_load(run):
    _, records = run
    assert sum(r["Total Context Tokens"] for r in records) == NUM_STREAMS * PROMPT_LENGTH
    assert sum(r["Context Requests"] for r in records) == NUM_STREAMS
    assert sum(r["Generation Requests"] for r in records) == NUM_STREAMS * (NUM_TOKENS - 1)
    assert max(r["Scheduled Requests"] for r in records) == NUM_STREAMS
    for r in records:
        assert r["Scheduled Requests"] == r["Context Requests"] + r["Generation Requests"]
        assert r["Waiting Requests"] == r["Active Request Count"] - r["Scheduled Requests"]
        assert r["Used KV cache blocks"] + r["Free KV cache blocks"] == r["Max KV cache blocks"] == 100
        assert (r["Tokens per KV cache block"], r["Paused Requests"]) == (32, 0)


def test_every_step_has_every_stream_in_flight(run):
    _, records = run
    full = [r for r in records if r["Active Request Count"] == NUM_STREAMS]
    assert len(full) > NUM_TOKENS / 2
    assert all(r["Scheduled Requests"] == NUM_STREAMS for r in full)


def test_the_durations_of_the_model_and_of_the_step_are_recorded(run):
    _, records = run
    for r in records[1:]:
        assert 3000 <= r["Model Duration (us)"] <= r["Step Duration (us)"]


def test_the_records_are_also_in_the_verbose_log(run):
    server, records = run
    assert server.log().count("Iteration Counter") >= len(records)


def test_a_record_in_lockstep_is_a_batch(repository, deployment, tmp_path):
    stats_file = tmp_path / "steps.jsonl"
    # The token budget would hold two of the prompts, but it does not limit a batch.
    parameters = {"gpt_model_type": "V1", "max_num_tokens": 40, "tokens_per_block": 8, "stats_file": stats_file}
    parameters |= {"synthetic_step_us": 2000, "max_seq_len": 320, "max_num_requests": 8}
    deployment.add_synthetic(repository, "model", parameters)
    lengths = [3, 30, 7, 18, 1, 25]
    with deployment.server(repository, "--metrics-interval-ms=100") as server:

        async def main():
            async with clients.grpc(server) as client:
                prompts = [[n] * PROMPT_LENGTH for n in range(len(lengths))]
                asks = (clients.stream(client, "model", p, max_tokens=m, stream=False) for p, m in zip(prompts, lengths))
                await asyncio.gather(*asks)

        clients.run(main())
    records = [json.loads(line) for line in stats_file.read_text().splitlines()]
    total = {name: sum(r[name] for r in records) for name in records[0] if isinstance(records[0][name], int)}
    assert [r["Iteration Counter"] for r in records] == [*range(1, len(records) + 1)]
    assert len(records) < 4, "a batch at a time"
    assert total["Scheduled Requests"] == total["Context Requests"] == len(lengths)
    assert total["Total Context Tokens"] == len(lengths) * PROMPT_LENGTH
    assert total["Total Generation Tokens"] == sum(lengths)
    for r in records:
        num_slots = r["Total Generation Tokens"] + r["Empty Generation Slots"]
        assert num_slots % r["Scheduled Requests"] == 0 and num_slots // r["Scheduled Requests"] in lengths
        assert "Generation Requests" not in r and "MicroBatch ID" not in r
        assert r["Active Request Count"] <= r["Max Request Count"]
        assert r["Model Duration (us)"] <= r["Step Duration (us)"]


def test_a_full_disk_costs_records_and_no_line_is_torn(repository, tmp_path):
    """Writes beyond a size fail as on a full disk, in the middle of a line."""
    stats_file = tmp_path / "steps.jsonl"
    add_synthetic(repository, "model", {"stats_file": stats_file, "max_seq_len": 320})
    limited = "trap '' XFSZ; ulimit -S -f 64; exec \"$@\""
    with Server(repository, launch=lambda command: ["bash", "-c", limited, "bash", *command]) as server:

        def serve_until_logged(words):
            for _ in range(1000):
                clients.generate(server, "model", [1, 2, 3], max_tokens=100)
                if words in server.log():
                    return
            raise AssertionError(server.log_tail())

        serve_until_logged("statistics are lost until")
        full = stats_file.read_text()
        assert full.endswith("}\n") and len(full) <= 64 * 1024
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        serve_until_logged("statistics are written again")
    records = [json.loads(line) for line in stats_file.read_text().splitlines()]
    numbers = [record["Iteration Counter"] for record in records]
    assert numbers == sorted(numbers) and numbers[-1] > len(records), "some are missing in the middle"
    assert len(records) > full.count("\n")


def test_metrics_show_the_progress_of_a_lockstep_batch(repository, deployment, tmp_path):
    gate = Gate(tmp_path / "gate", num_steps=6)
    # The record of a step that takes a tenth of a second is written before the next step ends.
    parameters = {"gpt_model_type": "V1", "synthetic_gate": gate.file, "synthetic_step_us": 110_000}
    deployment.add_synthetic(repository, "model", parameters)
    expected = {
        # Each of the three sequences computes the prompt. A step shows the tokens of those before it.
        "total_context_tokens": 3 * PROMPT_LENGTH,
        "total_generation_tokens": 3 * 5,
        "empty_generation_slots": 0,
    }

    def gauges(server):
        samples = server.metrics().items()
        return {dict(labels)["v1_specific_metric"]: n for (name, labels), n in samples if name == "nv_trt_llm_v1_metrics"}

    async def main(server):
        async with clients.grpc(server) as client:
            options = {"n": 3, "temperature": 1.0, "max_tokens": 8, "stream": False}
            answer = asyncio.create_task(clients.stream(client, "model", [5] * PROMPT_LENGTH, **options))
            await until(lambda: gauges(server) == expected)
            assert num_requests(server, "model", "active") == 3
            gate.open()
            await answer
            await until(lambda: num_requests(server, "model", "active") == 0)

    with deployment.server(repository) as server:
        clients.run(asyncio.wait_for(main(server), clients.TIMEOUT_S))


def sample(server, family, **labels):
    """The only sample of the family with at least these labels."""
    wanted = {*labels.items(), ("model", "model")}
    found = [value for (name, pairs), value in server.metrics().items() if name == family and wanted <= {*pairs}]
    assert len(found) == 1, (family, labels, found)
    return found[0]


GAUGES = {
    "nv_trt_llm_request_metrics": ("request_type", ["active", "max", "scheduled", "context", "waiting"]),
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block_type", ["max", "free", "used", "tokens_per", "fraction"]),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        ["total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"],
    ),
    "nv_trt_llm_general_metrics": ("general_type", ["timestamp", "iteration_counter"]),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", ["cpu", "gpu", "pinned"]),
}


def test_the_metric_families_of_dashboards_exist(run):
    server, records = run
    for family, (label, values) in GAUGES.items():
        for value in values:
            sample(server, family, **{label: value})
    assert sample(server, "nv_trt_llm_request_metrics", request_type="max") == records[-1]["Max Request Count"]
    assert sample(server, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max") == 100
    assert sample(server, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used") == 0
    assert sample(server, "nv_trt_llm_request_metrics", request_type="active") == 0
    for kind, name in (("cpu", "CPU"), ("gpu", "GPU"), ("pinned", "Pinned")):
        taken = sample(server, "nv_trt_llm_runtime_memory_metrics", memory_type=kind)
        assert taken == records[-1][f"Runtime {name} Memory Usage"]
    counter = sample(server, "nv_trt_llm_general_metrics", general_type="iteration_counter")
    assert counter == records[-1]["Iteration Counter"]


@pytest.mark.parametrize(
    "family, count, total",
    [
        ("nv_llm_input_token_len", NUM_STREAMS, NUM_STREAMS * PROMPT_LENGTH),
        ("nv_llm_output_token_len", NUM_STREAMS, NUM_STREAMS * NUM_TOKENS),
    ],
)
def test_token_counts_are_histograms(run, family, count, total):
    server, _ = run
    assert sample(server, f"{family}_count") == count
    assert sample(server, f"{family}_sum") == total


def test_triton_counts_each_request_once(run):
    server, records = run
    assert sample(server, "nv_inference_request_success") == NUM_STREAMS
    assert sample(server, "nv_inference_count") == NUM_STREAMS
    assert sample(server, "nv_inference_exec_count") >= len(records)


def test_a_statistics_file_triggers_a_reload_by_polling_only_inside_the_models_folder(tmp_path):
    repository = tmp_path / "repository"
    add_synthetic(repository, "relative", {"stats_file": "steps.jsonl"})
    add_synthetic(repository, "inside", {"stats_file": repository / "inside" / "steps.jsonl"})
    arguments = ["--model-control-mode=poll", "--repository-poll-secs=1"]

    def num_loads(model):
        return len(re.findall(f"loading: {model}:1", server.log()))

    def next_poll(name):
        """Waits for the end of a poll that began after now: it loads a new model."""
        add_synthetic(repository, name)
        server.wait_for_state(name, "READY")

    with Server(repository, *arguments, cwd=tmp_path) as server:
        clients.generate(server, "relative", [1], max_tokens=5)
        clients.generate(server, "inside", [1], max_tokens=5)
        next_poll("first")
        next_poll("second")
        assert num_loads("relative") == 1
        assert num_loads("inside") > 1
        server.wait_for_state("inside", "READY")
        records = (tmp_path / "steps.jsonl").read_text().splitlines()
        assert len(records) >= 5
        warnings = [line for line in server.log().splitlines() if line.startswith("W") and "stats_file is in" in line]
        assert all("inside" in line for line in warnings) and warnings
        assert f"relative_0: statistics go to {tmp_path / 'steps.jsonl'}" in server.log()
