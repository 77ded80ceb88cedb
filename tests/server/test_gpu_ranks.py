"""A model on two GPUs, which are stand-ins, as is NCCL: a process and a GPU each."""

import os
import signal

import pytest
from test_ranks import answer, assert_failed_and_loads_again, failures_after, processes

from harness import clients, deployments
from harness.repository import STORIES, add_model
from harness.server import Server

ON_GPUS = {
    "tensor_parallel_size": 2,
    "gpu_device_ids": "1,0",
    "deterministic": "true",
    "cuda_graph_cache_size": 2,
    "num_threads": 1,
    "rank_timeout_seconds": 30,
}


@pytest.fixture
def server(repository, tmp_path):
    add_model(repository, "two", ON_GPUS, checkpoint=STORIES)
    add_model(repository, "one", {"num_threads": 1}, checkpoint=STORIES)
    add_model(repository, "wrong", {**ON_GPUS, "gpu_device_ids": "0,2"}, checkpoint=STORIES)
    environment = {**deployments.stand_in(tmp_path / "stand_in"), "CUDA_STAND_IN_DEVICES": "2"}
    with Server(repository, "--model-control-mode=explicit", "--load-model=one", "--load-model=two", environment=environment) as server:
        yield server


def test_two_gpus_answer_and_a_killed_process_is_an_error_and_no_orphan(server):
    options = {"max_tokens": 16, "ignore_eos": True}
    asked = [(prompt, options) for prompt in ("Once upon a time", "The fox", "A little girl named")]
    together = [found.ids for found in clients.streams(server, "two", asked)]
    alone = [clients.streams(server, "two", [request])[0].ids for request in asked]
    assert together == alone
    on_cpu = [found.ids for found in clients.streams(server, "one", asked)]
    assert sum(ours == theirs for ours, theirs in zip(together, on_cpu)) >= 2, (together, on_cpu)

    expected = answer(server)
    [pid] = processes(server)
    errors = failures_after(server, lambda: os.kill(pid, signal.SIGKILL))
    for error in errors:
        assert error is not None and "rank 1" in error and "SIGKILL" in error, errors
    assert_failed_and_loads_again(server, [pid], expected)
    assert "there is no GPU 2: the driver shows 2" in server.load("wrong")
