"""Reuse of KV cache blocks between requests, and a cache that is far too small."""

import asyncio
import time

import pytest

from harness import clients, seeds
from harness.repository import add_synthetic
from harness.server import Server
from harness.synthetic import continuation

BLOCK = 16
PREFIX = [n % 97 for n in range(20 * BLOCK)]


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    add_synthetic = deployment.add_synthetic
    repository = tmp_path_factory.mktemp("kv_cache") / "repository"
    reuse = {"tokens_per_block": BLOCK, "synthetic_step_us": 0, "synthetic_token_us": 20}
    add_synthetic(repository, "reuse", reuse)
    add_synthetic(repository, "whole_blocks", {**reuse, "enable_partial_reuse": "false"})
    add_synthetic(repository, "no_reuse", {**reuse, "enable_kv_cache_reuse": "false"})
    # The pool holds one conversation, and host memory four: the synthetic runner keeps 8 bytes of a position.
    small = {**reuse, "max_seq_len": 22 * BLOCK, "max_tokens_in_paged_kv_cache": 22 * BLOCK}
    add_synthetic(repository, "pool_only", small)
    add_synthetic(repository, "host_memory", {**small, "kv_cache_host_memory_bytes": 4 * 22 * BLOCK * 8})
    for policy in ["max_utilization", "guaranteed_no_evict"]:
        # Up to 64 requests of 40 tokens on average at a time; the cache has room for a third of them.
        pressure = {
            "batch_scheduler_policy": policy,
            "tokens_per_block": 4,
            "max_seq_len": 128,
            "max_num_requests": 64,
            "max_tokens_in_paged_kv_cache": 64 * 40 // 3,
            "synthetic_step_us": 100,
        }
        add_synthetic(repository, policy, pressure, fields="max_batch_size: 64")
    with deployment.server(repository, "--metrics-interval-ms=50") as server:
        yield server


def blocks(server, model, kind):
    """A gauge of the model's KV cache, after the last step's record."""
    wanted = {("model", model), ("kv_cache_block_type", kind)}
    before = None
    for _ in range(100):
        (now,) = [value for (_, pairs), value in server.metrics().items() if wanted <= {*pairs}]
        if now == before:
            return now
        before = now
        time.sleep(0.1)
    raise AssertionError(f"{kind} does not settle")


def ask(server, model, prompt, **options):
    """The tokens of one request alone."""

    async def main():
        async with clients.grpc(server) as client:
            return await clients.stream(client, model, prompt, max_tokens=3, **options)

    answer = clients.run(main())
    assert answer.ids == continuation(prompt, 3)


def reused_by(server, model, prompt, **options):
    """Number of blocks that a request reuses."""
    before = blocks(server, model, "reused")
    ask(server, model, prompt, **options)
    return blocks(server, model, "reused") - before


def test_an_earlier_prompt_is_not_computed_again(server):
    assert reused_by(server, "reuse", [1, *PREFIX]) == 0
    # The 20th block ends after the prompt's last token but one; the rest of it is copied.
    assert reused_by(server, "reuse", [1, *PREFIX, 5, 6]) == 20
    assert reused_by(server, "reuse", [1, *PREFIX[:100], 7]) == 6 + 1
    assert reused_by(server, "whole_blocks", [1, *PREFIX]) == 0
    assert reused_by(server, "whole_blocks", [1, *PREFIX[:100], 7]) == 6
    assert blocks(server, "reuse", "used") == 0, "cached blocks count as free"


def test_a_conversation_that_returns_is_found_in_host_memory(server):
    for model, expected in [("pool_only", 0), ("host_memory", 20)]:
        conversations = [[10 + n, *PREFIX] for n in range(3)]
        for prompt in conversations:
            assert reused_by(server, model, prompt) == 0
        for prompt in conversations:
            # As its user goes on.
            assert reused_by(server, model, [*prompt, 8, 9]) == expected, model
        assert blocks(server, model, "onboarded") >= 2 * expected
        assert blocks(server, model, "offloaded") >= blocks(server, model, "onboarded")
        assert blocks(server, model, "host_max") == (4 * 22 if expected else 0)
        assert (blocks(server, model, "host_used") > 0) == (expected > 0)


def test_nothing_is_reused_if_reuse_is_disabled(server):
    for _ in range(2):
        assert reused_by(server, "no_reuse", PREFIX) == 0


def test_a_request_can_opt_out(server):
    assert reused_by(server, "reuse", [2, *PREFIX], kv_cache_reuse=False) == 0
    assert reused_by(server, "reuse", [2, *PREFIX]) == 0, "it has left no blocks in the cache"
    assert reused_by(server, "reuse", [2, *PREFIX], kv_cache_reuse=False) == 0
    assert reused_by(server, "reuse", [2, *PREFIX]) > 19


def test_requests_with_different_salts_share_nothing(server):
    prompt = [3, *PREFIX]
    for salt in [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]:
        assert reused_by(server, "reuse", prompt, **salt) == 0
        assert reused_by(server, "reuse", prompt, **salt) > 19


def test_concurrent_requests_wait_for_the_first_to_write_their_common_blocks(server):
    prompt = [4, *PREFIX]

    async def main():
        async with clients.grpc(server) as client:
            asked = (clients.stream(client, "reuse", [*prompt, n], max_tokens=5) for n in range(8))
            return await asyncio.gather(*asked)

    before = blocks(server, "reuse", "reused")
    for n, answer in enumerate(clients.run(main())):
        assert answer.ids == continuation([*prompt, n], 5)
    # Each of the seven other requests reuses all 20 whole blocks that the first has written.
    assert blocks(server, "reuse", "reused") - before >= 7 * 20


@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
def test_thousands_of_requests_are_all_served_with_a_third_of_the_memory_they_need(server, policy):
    num_requests, num_streams = 2000, 64
    asked = []
    rng = seeds.rng("pressure", policy)
    for _ in range(num_requests):
        prompt = [rng.randrange(5) for _ in range(rng.randrange(1, 40))]
        asked.append((prompt, rng.randrange(1, 60)))

    async def main():
        async with clients.grpc(server) as client:
            queue = list(enumerate(asked))

            async def one_after_the_other():
                while queue:
                    n, (prompt, max_tokens) = queue.pop()
                    answer = await clients.stream(client, policy, prompt, max_tokens=max_tokens, stream=n % 2 == 0)
                    assert answer.ids[-max_tokens:] == continuation(prompt, max_tokens)
                    assert answer.finish_reason == "length"

            await asyncio.gather(*(one_after_the_other() for _ in range(num_streams)))

    clients.run(main())
    assert blocks(server, policy, "used") == 0


def test_a_restarted_server_finds_what_was_cached(tmp_path):
    file = tmp_path / "conversations.kv"
    kept = {
        "tokens_per_block": BLOCK,
        "kv_cache_host_memory_bytes": 64 * BLOCK * 8,
        "kv_cache_file": file,
    }
    repository = tmp_path / "repository"
    add_synthetic(repository, "kept", kept)
    with Server(repository, "--metrics-interval-ms=50") as server:
        assert reused_by(server, "kept", [7, *PREFIX]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    with Server(repository, "--metrics-interval-ms=50") as server:
        assert reused_by(server, "kept", [7, *PREFIX, 1]) == 20
        assert blocks(server, "kept", "onboarded") == 20
    damaged = bytearray(file.read_bytes())
    damaged[-9] ^= 1
    file.write_bytes(damaged)
    with Server(repository, "--metrics-interval-ms=50") as server:
        assert reused_by(server, "kept", [7, *PREFIX, 1]) == 0
        assert "the KV cache begins empty" in server.log()
