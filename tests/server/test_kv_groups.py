"""Models of mixed windows, whose layers have KV cache blocks by groups, on several processes and on the stand-in for a
GPU: with few blocks and requests that are cancelled, the others get the answers that they get alone, and all blocks
come back."""

import json

import pytest

from harness import clients, deployments
from harness.clients import described, streams_beside_cancelled
from harness.repository import ROOT, TIGHT, add_model
from harness.server import Server, assert_blocks_come_back

FIXTURES = ROOT / "tests" / "fixtures"
# Every second layer of a gpt-oss sees 20 positions; of the Gemma 3 the first of two sees 21.
CHECKPOINTS = ["gpt-oss", "gemma3"]
# Layers with heads of two sizes, which one process computes.
OF_ONE_PROCESS = ["gemma4", "gemma4-moe"]
MAX_SEQ_LEN = 128
ON_CPU = {"num_threads": 1, "rank_timeout_seconds": 100}
ON_GPU = {**deployments.ON_GPU, "num_threads": 1, "rank_timeout_seconds": 100, "max_tokens_in_paged_kv_cache": 4096}
RANKS = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2, "enable_trt_overlap": "true"}
ON_TWO_GPUS = {"gpu_device_ids": "1,0"}
# How models are served, and the same with room for all, whose bits are theirs.
WAYS = {
    "one": (ON_CPU, ON_CPU),
    "two": ({**ON_CPU, **RANKS}, {**ON_CPU, **RANKS}),
    "stages_of_two": ({**ON_CPU, **RANKS, **STAGES}, {**ON_CPU, **RANKS}),
    "gpu": (ON_GPU, ON_GPU),
    "two_gpus": ({**ON_GPU, **RANKS, **ON_TWO_GPUS}, {**ON_GPU, **RANKS, **ON_TWO_GPUS}),
    "stages_on_gpus": ({**ON_GPU, **STAGES, **ON_TWO_GPUS}, ON_GPU),
}
NUM_CANCELLED = 4


def requests(max_tokens):
    """Requests whose prompts begin alike, so that blocks are reused, and end behind the windows."""
    kinds = [{}, {"temperature": 1.2, "seed": 3, "top_k": 20}, {"repetition_penalty": 1.3}]
    for index in range(6):
        beginning = [(37 * at + index % 2) % 150 + 3 for at in range(24)]
        own = [(13 * at + 7 * index) % 150 + 3 for at in range(3 + 8 * index)]
        options = {"max_tokens": max_tokens + index, "ignore_eos": True, "return_log_probs": True, **kinds[index % len(kinds)]}
        yield beginning + own, options


def serve(server, model, asked):
    """What requests get that are asked for at once, beside some that are cancelled in flight."""
    return streams_beside_cancelled(server, model, asked, [prompt for prompt, _ in asked[:NUM_CANCELLED]])


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.complete] if "gpus" in way else []) for way in WAYS])
@pytest.mark.cancelling
def test_requests_get_the_answers_that_they_get_alone(repository, tmp_path, way):
    how, roomy = WAYS[way]
    on_gpu = "gpu_device_ids" in how
    # A stage with a layer of the Gemma 3 has one kind of them. The stand-in takes its time.
    names = CHECKPOINTS[:1] if on_gpu or "pipeline_parallel_size" in how else CHECKPOINTS
    names = OF_ONE_PROCESS if way == "one" else names
    # Steps on CPUs are so short that many and long requests have to meet.
    max_tokens, num_times = (24, 2) if on_gpu else (50, 4)
    different = list(requests(max_tokens))
    for name in names:
        checkpoint = {"gpt_model_path": FIXTURES / name, "max_seq_len": MAX_SEQ_LEN}
        tight = {**how, **TIGHT, **checkpoint, "max_tokens_in_paged_kv_cache": MAX_SEQ_LEN}
        add_model(repository, f"{name}-alone", {**roomy, **checkpoint, "tokens_per_block": 4})
        add_model(repository, name, {**tight, "stats_file": tmp_path / f"{name}.jsonl"})
    environment = None
    if on_gpu:
        devices = {"CUDA_STAND_IN_DEVICES": "2", "CUDA_STAND_IN_MEMORY_BYTES": str(8 << 30)}
        environment = {**deployments.stand_in(tmp_path / "stand_in"), **devices}
    with Server(repository, environment=environment) as server:
        for name in names:
            expected = [described(clients.streams(server, f"{name}-alone", [one])[0]) for one in different]
            assert serve(server, name, num_times * different) == num_times * expected, name
            assert_blocks_come_back(server, name)
            records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
            assert max(record["Paused Requests"] for record in records) > 0, name
            # As many positions take a block of each group.
            num_groups, rest = divmod(4 * records[-1]["Max KV cache blocks"], MAX_SEQ_LEN)
            assert num_groups > 1 and rest == 0, (name, records[-1])
