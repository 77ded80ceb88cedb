"""KV cache blocks that a GPU gives up: in pinned memory of the host, and in a file between two servers."""

import pytest

from harness import clients, deployments
from harness.repository import STORIES, add_model
from harness.server import Server

# Room for one conversation on the GPU, and for all of them in host memory: a position takes 2560 bytes.
SMALL = {
    "gpu_device_ids": 0,
    "deterministic": "true",
    "cuda_graph_mode": "false",
    "tokens_per_block": 16,
    "max_seq_len": 256,
    "max_tokens_in_paged_kv_cache": 256,
}
HOST_MEMORY = {"kv_cache_host_memory_bytes": 64 * 16 * 2560}
CONVERSATIONS = [f"{name} and the fox went to the river. " * 16 for name in ["Lily", "Tom", "Anna"]]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """The environment of a server whose backend finds the stand-in."""
    return deployments.stand_in(tmp_path_factory.mktemp("gpu") / "stand_in")


def ask(server, model, prompt):
    """The ids of an answer."""

    async def main():
        async with clients.grpc(server) as client:
            return (await clients.stream(client, model, prompt, max_tokens=12)).ids

    return clients.run(main())


def num_onboarded(server, model):
    """Blocks that have come back from host memory."""
    wanted = {("model", model), ("kv_cache_block_type", "onboarded")}
    (value,) = [value for (_, labels), value in server.metrics().items() if wanted <= {*labels}]
    return value


def test_conversations_return_from_pinned_memory_with_the_same_answers(repository, stand_in):
    add_model(repository, "without", SMALL, checkpoint=STORIES)
    add_model(repository, "with", {**SMALL, **HOST_MEMORY}, checkpoint=STORIES)
    with Server(repository, environment=stand_in) as server:
        answers = {model: [ask(server, model, prompt) for _ in range(2) for prompt in CONVERSATIONS] for model in ["without", "with"]}
        assert answers["with"] == answers["without"]
        assert num_onboarded(server, "without") == 0
        # Of each conversation that returns, most of its ten blocks.
        assert num_onboarded(server, "with") >= 3 * 6


def test_a_restarted_server_finds_what_a_gpu_has_cached(repository, stand_in, tmp_path):
    file = tmp_path / "stories.kv"
    add_model(repository, "kept", {**SMALL, **HOST_MEMORY, "kv_cache_file": file}, checkpoint=STORIES)
    with Server(repository, environment=stand_in) as server:
        first = [ask(server, "kept", prompt) for prompt in CONVERSATIONS]
    with Server(repository, environment=stand_in) as server:
        assert f"KV cache blocks from {file}" in server.log()
        assert [ask(server, "kept", prompt) for prompt in CONVERSATIONS] == first
        assert num_onboarded(server, "kept") >= 3 * 3
