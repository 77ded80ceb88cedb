"""Strategies by which Triton's dynamic batcher forms batches: the backend's own, and a user's."""

import asyncio
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from harness import clients
from harness.clients import generate
from harness.repository import QUEUED, ROOT, STORIES, add_model, add_synthetic
from harness.server import Server, num_pending, num_requests, until
from harness.synthetic import Gate, continuation

NUM_REQUESTS = 6
WIDE = f"max_batch_size: 8 {QUEUED}"
# Without one, the dynamic batcher prepares batches ahead.
LEVELS = "max_batch_size: 8 dynamic_batching { priority_levels: 3 default_priority_level: 2 }"


@pytest.fixture(scope="session")
def example():
    """The example of a strategy in Rust, built."""
    # With the whole workspace, as the library under test: alone, its dependencies would be built again.
    command = ["cargo", "build", "--workspace", "--lib", "--bins", "--examples", "--message-format=json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    messages = map(json.loads, done.stdout.splitlines())
    files = [name for message in messages for name in message.get("filenames", [])]
    return next(name for name in files if name.endswith("batch_strategy_example.so"))


def batches(server, model):
    """The sizes of the batches that Triton has formed for a model, in order."""
    return [int(size) for size in re.findall(rf"{model}_0: a batch of (\d+) requests", server.log())]


def waiting_server(repository):
    """A server whose batchers begin when `NUM_REQUESTS` requests wait, and that logs the sizes of batches."""
    return Server(repository, "--log-verbose=1", environment={"TRITONSERVER_DELAY_SCHEDULER": str(NUM_REQUESTS)})


def ask_all(server, model, length, max_tokens=12):
    """Sends requests with prompts of this many tokens; their answers are right."""
    prompts = [[n] * length for n in range(NUM_REQUESTS)]
    answers = clients.streams(server, model, [(prompt, {"max_tokens": max_tokens}) for prompt in prompts])
    for prompt, answer in zip(prompts, answers):
        assert answer.ids == continuation(prompt, max_tokens)


def test_a_batch_closes_when_the_token_budget_or_the_blocks_are_spent(repository):
    small = {"max_seq_len": 64, "tokens_per_block": 16}
    for policy, num_blocks in (("max_utilization", 5), ("guaranteed_no_evict", 9)):
        blocks = {"batch_scheduler_policy": policy, "max_tokens_in_paged_kv_cache": 16 * num_blocks}
        add_synthetic(repository, policy, {**small, **blocks}, fields=LEVELS)
    add_synthetic(repository, "tokens", {"max_num_tokens": 100}, fields=LEVELS)
    add_synthetic(repository, "static", {"max_num_tokens": 100, "batch_scheduler_policy": "static_batch"}, fields=LEVELS)
    add_synthetic(repository, "roomy", {"max_num_tokens": 1000}, fields=WIDE)
    with waiting_server(repository) as server:
        assert server.log().count("Loading custom batching strategy library") == 5
        # 40 of 100 tokens each.
        ask_all(server, "tokens", 40)
        assert batches(server, "tokens")[0] == 2
        # Prompts of two blocks, of five; no more than that is needed to start.
        ask_all(server, "max_utilization", 20)
        assert batches(server, "max_utilization")[0] == 2
        # Prompt and output, 20 + 13 tokens, are three blocks, of nine.
        ask_all(server, "guaranteed_no_evict", 20, max_tokens=13)
        assert batches(server, "guaranteed_no_evict")[0] == 3
        # The whole batch starts at once, and is not divided.
        ask_all(server, "static", 40)
        ask_all(server, "roomy", 40)
        assert batches(server, "static") == batches(server, "roomy") == [NUM_REQUESTS]
        for model in ("tokens", "max_utilization", "guaranteed_no_evict"):
            assert sum(batches(server, model)) == NUM_REQUESTS


def test_a_request_larger_than_the_room_is_served(repository):
    add_synthetic(repository, "tokens", {"max_num_tokens": 64}, fields=LEVELS)
    with waiting_server(repository) as server:
        ask_all(server, "tokens", 200)
        assert batches(server, "tokens") == [1] * NUM_REQUESTS


def test_what_does_not_fit_stays_in_the_queue_and_a_higher_priority_overtakes_it(repository, tmp_path):
    gate = Gate(tmp_path / "gate", num_steps=1)
    # Blocks for two requests of 64 tokens.
    model = {"max_seq_len": 64, "tokens_per_block": 16, "max_tokens_in_paged_kv_cache": 128, "synthetic_gate": gate.file}
    add_synthetic(repository, "tight", {**model, "batch_scheduler_policy": "guaranteed_no_evict"}, fields=LEVELS)

    async def main():
        async with clients.grpc(server) as client:

            def send(n, **options):
                options = {"max_tokens": 60, "return_perf_metrics": True, **options}
                return asyncio.create_task(clients.stream(client, "tight", [n] * 4, **options))

            long = send(0)
            await until(lambda: num_requests(server, "tight", "active") == 1)
            short = send(1, max_tokens=50)
            await until(lambda: batches(server, "tight") == [1, 1])
            behind = []
            for n in range(2, 6):
                behind.append(send(n))
                await until(lambda: num_pending(server, "tight") == len(behind))
            # The short one ends in step 52, and makes room for one.
            gate.allow(56)
            await until(lambda: num_pending(server, "tight") == 3)
            urgent = send(6, priority=1)
            await until(lambda: num_pending(server, "tight") == 4)
            gate.open()
            return await asyncio.gather(long, short, *behind, urgent)

    with Server(repository, "--log-verbose=1") as server:
        answers = clients.run(main())
    for n, answer in enumerate(answers):
        assert answer.ids == continuation([n] * 4, 50 if n == 1 else 60)
    started = [int(answer.last.tensors["first_scheduled_time_ns"].item()) for answer in answers]
    # Where two have ended before Triton looks again, two start in one step, within a microsecond.
    assert max(started[:3]) < started[6] < min(started[3:6]) + 1000


def test_texts_are_measured_by_the_texts_before_them(repository):
    add_model(repository, "stories", {"max_num_tokens": 100}, fields=LEVELS, checkpoint=STORIES)
    text = "Once upon a time there was a little girl who had a dog. " * 2
    with waiting_server(repository) as server:
        answers = clients.streams(server, "stories", [(text, {"max_tokens": 5})] * NUM_REQUESTS)
        assert {answer.text for answer in answers} == {answers[0].text}
        # 112 bytes, taken for 28 tokens.
        assert batches(server, "stories")[0] == 3


def test_a_users_strategy_limits_the_volume_of_batches(repository, example):
    for name, limit in (("volume", 200), ("unlimited", 10_000)):
        version = add_synthetic(repository, name, {"MAX_BATCH_VOLUME_BYTES": limit}, fields=LEVELS)
        shutil.copy(example, version.parent / "batchstrategy.so")
    # Named, and in the version's folder.
    version = add_synthetic(repository, "named", fields=LEVELS)
    shutil.copy(example, version / "strategy.so")
    parameters = {"MAX_BATCH_VOLUME_BYTES": 200, "TRITON_BATCH_STRATEGY_PATH": version / "strategy.so"}
    add_synthetic(repository, "named", parameters, fields=LEVELS)
    with waiting_server(repository) as server:
        for model, first in (("volume", 2), ("named", 2), ("unlimited", NUM_REQUESTS)):
            # 80 bytes each.
            ask_all(server, model, 20)
            assert batches(server, model)[0] == first
            assert sum(batches(server, model)) == NUM_REQUESTS
            server.unload(model)
            server.wait_for_state(model, "UNAVAILABLE")


def test_strategies_that_cannot_work_fail_the_load(repository, example):
    version = add_synthetic(repository, "no_limit", fields=LEVELS)
    shutil.copy(example, version / "batchstrategy.so")
    version = add_synthetic(repository, "bad_limit", {"MAX_BATCH_VOLUME_BYTES": "many"}, fields=LEVELS)
    shutil.copy(example, version / "batchstrategy.so")
    version = add_synthetic(repository, "copied", fields=LEVELS)
    library = pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight/libtriton_inflight.so"
    shutil.copy(library, version / "batchstrategy.so")
    version = add_synthetic(repository, "linked", fields=LEVELS)
    (version / "batchstrategy.so").symlink_to(library)
    add_synthetic(repository, "nowhere", {"TRITON_BATCH_STRATEGY_PATH": "/nowhere.so"}, fields=LEVELS)
    add_synthetic(repository, "sequences", {"TRITON_BATCH_STRATEGY_PATH": "x"})
    with Server(repository, "--model-control-mode=explicit") as server:
        for model, words in (
            ("no_limit", "needs the parameter MAX_BATCH_VOLUME_BYTES"),
            ("bad_limit", "'many', not a number of bytes"),
            ("copied", "a link to the backend's library, not a copy"),
            ("nowhere", "nowhere.so"),
            ("sequences", "'TRITON_BATCH_STRATEGY_PATH' is for a batch strategy, and sequence_batching has none"),
        ):
            assert words in server.load(model)
        assert server.load("linked") is None
        assert generate(server, "linked", [7], max_tokens=3).ids[-3:] == continuation([7], 3)
