"""The cache of rounded weights."""

import pytest

from harness import deployments
from harness.clients import generate
from harness.repository import STORIES, add_model
from harness.server import Server

INT8 = {"weight_only_precision": "int8"}
PROMPT = "Once there was a fox"


@pytest.fixture(params=["cpu", "gpu"])
def loading(request, repository, tmp_path):
    """A server; the parameters of a model on this device; the end of its file's name."""
    on_gpu = request.param == "gpu"
    environment = deployments.stand_in(tmp_path / "stand_in") if on_gpu else {}
    small = {"max_tokens_in_paged_kv_cache": 16384}
    parameters = {"gpu_device_ids": 0, "deterministic": "true", "cuda_graph_mode": "false", **small} if on_gpu else {}
    with Server(repository, "--model-control-mode=explicit", environment=environment) as server:
        yield server, INT8 | parameters, ".gpu.weights" if on_gpu else ".weights"


def test_a_second_load_reads_the_weights_cached_by_the_first(loading, tmp_path):
    explicit, int8, ending = loading

    def story(name):
        assert explicit.load(name) is None
        text = generate(explicit, name, PROMPT, max_tokens=8).text
        explicit.unload(name)
        explicit.wait_for_state(name, "UNAVAILABLE")
        return text

    folder = tmp_path / "below" / "weights"
    add_model(explicit.repository, "rounded", int8, checkpoint=STORIES)
    add_model(explicit.repository, "kept", {**int8, "weight_cache_dir": folder}, checkpoint=STORIES)
    expected = story("rounded")
    file = folder / f"kept-1{ending}"
    assert not file.exists()
    assert story("kept") == expected
    assert [path.name for path in folder.iterdir()] == [file.name]
    written = file.stat()
    assert f"from {file}" not in explicit.log()

    assert story("kept") == expected
    assert f"rounded matrices from {file}" in explicit.log()
    assert file.stat().st_mtime_ns == written.st_mtime_ns

    file.write_bytes(file.read_bytes()[:-1])
    assert story("kept") == expected
    assert f"{file}: is not a whole safetensors file" in explicit.log()
    assert file.stat().st_size == written.st_size
