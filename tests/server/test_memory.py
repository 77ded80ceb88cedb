"""Memory: the sizes that models choose, and the sizes that they report."""

import json

import pytest

from harness.repository import STORIES, add_model, add_synthetic
from harness.server import Server

# A cache sized by the machine's memory: the sequences could use more than is available.
BOUNDLESS = {
    "max_seq_len": 1 << 20,
    "max_num_requests": 65536,
    "max_num_tokens": 131072,
    "tokens_per_block": 1024,
    "kv_cache_free_gpu_mem_fraction": 0.5,
}


@pytest.fixture
def explicit(repository):
    with Server(repository, "--model-control-mode=explicit") as server:
        yield server


def held_bytes(server, model):
    status, body = server.http("GET", f"/v2/models/{model}/stats")
    assert status == 200, body
    (usage,) = json.loads(body)["model_stats"][0]["memory_usage"]
    assert (usage["type"], usage["id"]) == ("CPU", 0)
    return int(usage["byte_size"])


def test_memory_of_unwritten_caches_is_not_allocated_twice(explicit):
    for name in ("first", "second", "third"):
        add_synthetic(explicit.repository, name, BOUNDLESS)
    assert explicit.load("first") is None
    assert explicit.load("second") is None
    first, second = (held_bytes(explicit, name) for name in ("first", "second"))
    # Meanwhile other programs allocate and free memory.
    assert 0.4 * first < second < 0.6 * first
    explicit.unload("first")
    explicit.wait_for_state("first", "UNAVAILABLE")
    assert explicit.load("third") is None
    # Half of what the second left: three eighths of all, where the first had four.
    assert 0.6 * first < held_bytes(explicit, "third") < 0.9 * first


def test_a_model_reports_the_memory_of_its_weights_and_its_cache(explicit):
    add_model(explicit.repository, "stories", {"max_tokens_in_paged_kv_cache": 4096}, checkpoint=STORIES)
    assert explicit.load("stories") is None
    weights = (STORIES / "model.safetensors").stat().st_size
    # Keys and values in bf16, of 5 layers with 2 heads of 64.
    cache = 4096 * 2 * 2 * 5 * 2 * 64
    assert weights * 0.9 < held_bytes(explicit, "stories") - cache < weights * 1.5


def test_a_cache_whose_blocks_are_padded_counts_the_padding(explicit):
    """The kernels read 16 positions at a time, so a block of 20 takes as much memory as a block of 32."""
    for tokens_per_block in (20, 32):
        parameters = {"tokens_per_block": tokens_per_block, "max_tokens_in_paged_kv_cache": 200 * tokens_per_block}
        add_model(explicit.repository, f"blocks_of_{tokens_per_block}", parameters, checkpoint=STORIES)
        assert explicit.load(f"blocks_of_{tokens_per_block}") is None
    assert held_bytes(explicit, "blocks_of_20") == held_bytes(explicit, "blocks_of_32")
