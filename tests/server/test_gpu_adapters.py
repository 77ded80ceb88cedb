"""LoRA adapters on a GPU, which is the stand-in for one."""

import concurrent.futures

import pytest

from harness import deployments, seeds
from harness.adapters import page_bytes, rows_of, write_adapter
from harness.clients import generate
from harness.repository import STORIES, add_model
from harness.server import Server

# Several models share the memory of one GPU.
ON_GPU = {
    "gpu_device_ids": 0,
    "deterministic": "true",
    "max_tokens_in_paged_kv_cache": 16384,
    "cuda_graph_cache_size": 2,
}
NUM_ADAPTERS = 8
NUM_TOGETHER = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu_adapters")
    for index in range(NUM_ADAPTERS):
        write_adapter(folder / "adapters" / str(index), index)
    repository = folder / "repository"
    all_fit = {"lora_dir": folder / "adapters", "lora_cache_host_memory_bytes": NUM_ADAPTERS * page_bytes() + 1}
    add_model(repository, "cpu", all_fit, checkpoint=STORIES)
    add_model(repository, "gpu", {**all_fit, **ON_GPU}, checkpoint=STORIES)
    few = {"lora_cache_num_device_module_layer": rows_of(NUM_TOGETHER)}
    add_model(repository, "gpu_few", {**all_fit, **few, **ON_GPU}, checkpoint=STORIES)
    with Server(repository, environment=deployments.stand_in(folder / "stand_in")) as server:
        yield server


def requests(num):
    rng = seeds.rng("adapters on a GPU")
    for _ in range(num):
        options = {"max_tokens": rng.choice([4, 12]), "seed": rng.randrange(1000)}
        if rng.random() < 0.5:
            options["temperature"] = 1.0
        if adapter := rng.randrange(NUM_ADAPTERS + 1):
            options["lora_name"] = str(adapter - 1)
        yield rng.choice(["Once upon a time", "The old mill"]), options


def texts(server, model, asked):
    """The texts of requests that are asked for at once."""
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as clients:
        answers = [clients.submit(generate, server, model, prompt, **options) for prompt, options in asked]
        return [answer.result().text for answer in answers]


@pytest.mark.complete
def test_each_adapter_gives_on_a_gpu_what_it_gives_alone(server):
    asked = list(requests(24))
    alone = [texts(server, "gpu", [one])[0] for one in asked]
    assert texts(server, "gpu", asked) == alone
    # Here there is room for two on the GPU: others wait, and take their place.
    assert texts(server, "gpu_few", asked) == alone


def test_an_adapter_on_a_gpu_answers_as_on_the_cpu(server):
    asked = [("Once upon a time", {"max_tokens": 12, "lora_name": str(index)}) for index in range(NUM_ADAPTERS)]
    asked.append(("Once upon a time", {"max_tokens": 12}))
    on_gpu, on_cpu = texts(server, "gpu", asked), texts(server, "cpu", asked)
    assert len(set(on_gpu)) > NUM_ADAPTERS // 2, on_gpu
    # Rounding differs, and may decide where two words are equally likely; tests/models compares the logits.
    assert sum(ours == theirs for ours, theirs in zip(on_gpu, on_cpu, strict=True)) > NUM_ADAPTERS // 2, (on_gpu, on_cpu)
