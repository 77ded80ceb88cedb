"""A model whose ranks are the processes of `mpirun`: the same bits as with processes that the server has started, models one after
the other, and nothing is left whatever happens to a process."""

import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import threading

import pytest

from harness import clients
from harness.adapters import page_bytes, write_adapter
from harness.missing import skip
from harness.repository import ROOT, STORIES, add_model
from harness.second_host import SecondHost
from harness.server import STOP_TIMEOUT_S, Server, num_requests

from test_examples import mpi_job
from test_ranks import FIXTURES, PROMPTS, RANKS, answer, bits, has_ended, requests, wait_for

MPI = {**RANKS, "rank_transport": "mpi"}
PLUGIN = pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight" / "libinflight_mpi.so"


def is_missing():
    return "no MPI" if shutil.which("mpirun") is None else None if PLUGIN.exists() else "no plug-in for MPI"


@pytest.fixture(autouse=True)
def mpi(request):
    """Skips a test, and says so in the summary, where MPI is missing."""
    if reason := is_missing():
        skip(f"test_mpi.py: {request.node.name}", reason)


def ranks(server):
    return server.children("inflight-rank")


def test_ranks_of_mpirun_give_the_same_bits_for_one_model_after_the_other(repository):
    add_model(repository, "spawned", RANKS, checkpoint=STORIES)
    add_model(repository, "two", MPI, checkpoint=STORIES)
    add_model(repository, "stages", {**MPI, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}, checkpoint=STORIES)
    add_model(repository, "three", {**MPI, "tensor_parallel_size": 3}, checkpoint=STORIES)
    arguments = ["--model-control-mode=explicit", "--load-model=spawned", "--load-model=two"]
    with Server(repository, *arguments, mpi_ranks=2) as server:
        [pid] = ranks(server)
        expected = bits(clients.streams(server, "spawned", requests()))
        assert bits(clients.streams(server, "two", requests())) == expected
        assert "one at a time" in server.load("stages")
        server.unload("two")
        server.wait_for_state("two", "UNAVAILABLE")
        error = server.load("three")
        assert "mpirun has started 2 processes, and the model has 3 ranks" in error, error
        assert server.load("stages") is None
        assert answer(server, "stages") == answer(server, "stages")
        server.unload("stages")
        server.wait_for_state("stages", "UNAVAILABLE")
        assert server.load("two") is None
        assert bits(clients.streams(server, "two", requests())) == expected
        assert ranks(server) == [pid], "it computes one model after the other"
    wait_for(lambda: has_ended(pid), "a rank is left")


def test_four_ranks_of_mpirun_give_the_same_bits(repository):
    four = {"tensor_parallel_size": 4}
    add_model(repository, "spawned", {**RANKS, **four}, checkpoint=STORIES)
    add_model(repository, "four", {**MPI, **four}, checkpoint=STORIES)
    add_model(repository, "stages_of_two", {**MPI, "pipeline_parallel_size": 2}, checkpoint=STORIES)
    # A prompt long enough for split sums.
    story = " and then ".join(PROMPTS * 6)
    asked = [*requests(), (story, {"max_tokens": 8, "ignore_eos": True, "return_log_probs": True})]
    arguments = ["--model-control-mode=explicit", "--load-model=spawned", "--load-model=four"]
    with Server(repository, *arguments, mpi_ranks=4) as server:
        expected = bits(clients.streams(server, "spawned", asked))
        assert bits(clients.streams(server, "four", asked)) == expected
        server.unload("four")
        server.wait_for_state("four", "UNAVAILABLE")
        assert server.load("stages_of_two") is None
        assert bits(clients.streams(server, "stages_of_two", asked)) == expected


def test_experts_and_adapters_over_mpi_give_the_same_bits(repository, tmp_path):
    for index in range(3):
        write_adapter(tmp_path / str(index), index)
    # Each adapter takes a page, so they leave the memory for one another.
    adapters = {"lora_dir": tmp_path, "lora_cache_host_memory_bytes": 2 * page_bytes() + 1}
    mixture = {"gpt_model_path": FIXTURES / "qwen2-moe", "weight_only_precision": "int8"}
    options = {"max_tokens": 12, "ignore_eos": True, "return_log_probs": True}
    asked = {
        "adapters": [(PROMPTS[i % 5], {**options, "lora_name": str(i % 3)}) for i in range(12)],
        "mixture": [([3 + (7 * i + j) % 90 for j in range(5 + i)], options) for i in range(4)],
    }
    for name, transport in [("spawned", RANKS), ("mpi", MPI)]:
        add_model(repository, f"adapters_{name}", {**transport, **adapters}, checkpoint=STORIES)
        add_model(repository, f"mixture_{name}", {**transport, **mixture})
    arguments = ["--model-control-mode=explicit"]
    for name in ("adapters_spawned", "mixture_spawned", "adapters_mpi"):
        arguments.append(f"--load-model={name}")
    with Server(repository, *arguments, mpi_ranks=2) as server:
        for kind, requests in asked.items():
            expected = bits(clients.streams(server, f"{kind}_spawned", requests))
            assert server.load(f"{kind}_mpi") is None
            assert bits(clients.streams(server, f"{kind}_mpi", requests)) == expected
            server.unload(f"{kind}_mpi")
            server.wait_for_state(f"{kind}_mpi", "UNAVAILABLE")


def test_a_rank_that_is_stopped_is_an_error_and_computes_again_when_it_continues(repository):
    add_model(repository, "two", {**MPI, "rank_timeout_seconds": 2}, checkpoint=STORIES)
    with Server(repository, "--model-control-mode=explicit", "--load-model=two", mpi_ranks=2) as server:
        expected = answer(server)
        [pid] = ranks(server)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(clients.Refused, match="rank 0 has waited for rank 1"):
            answer(server)
        os.kill(pid, signal.SIGCONT)
        server.unload("two")
        server.wait_for_state("two", "UNAVAILABLE")
        assert server.load("two") is None
        assert answer(server) == expected


@pytest.fixture
def second_host(request, tmp_path):
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(SecondHost(tmp_path))
        except OSError as error:
            skip(f"test_mpi.py: {request.node.name}", f"no second host: {error}")


def test_ranks_of_two_hosts_give_the_same_bits_and_an_error_while_the_network_is_gone(repository, second_host):
    add_model(repository, "spawned", RANKS, checkpoint=STORIES)
    add_model(repository, "two", {**MPI, "rank_timeout_seconds": 5}, checkpoint=STORIES)
    add_model(repository, "patient", MPI, checkpoint=STORIES)
    arguments = ["--model-control-mode=explicit", "--load-model=spawned", "--load-model=patient"]
    with Server(repository, *arguments, mpi_ranks=2, second_host=second_host) as server:
        assert ranks(server) == []
        [rank] = second_host.processes("inflight-rank")
        expected = bits(clients.streams(server, "spawned", requests()))
        assert bits(clients.streams(server, "patient", requests())) == expected
        server.unload("patient")
        server.wait_for_state("patient", "UNAVAILABLE")
        assert server.load("two") is None
        whole = answer(server)
        second_host.cut()
        with pytest.raises(clients.Refused, match="rank 0 has waited for rank 1"):
            answer(server)
        second_host.mend()
        server.unload("two")
        server.wait_for_state("two", "UNAVAILABLE")
        assert server.load("two") is None
        assert answer(server) == whole
    wait_for(lambda: has_ended(rank), "a rank is left")


def command_of_script():
    """The book's batch script for Slurm."""
    page = (ROOT / "docs/src/ranks.md").read_text()
    [script] = re.findall(r"^```sh\n(#!/bin/bash\n#SBATCH .*?)^```$", page, re.MULTILINE | re.DOTALL)
    return script


def command_of_job():
    """What the launcher of the book's job for Kubernetes runs."""
    container = mpi_job()["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    return "exec " + shlex.join([*container["command"], *container["args"]])


@pytest.mark.parametrize(
    "command, of_server",
    [
        (command_of_script, "tritonserver --model-repository=/shared/models --backend-directory=$backends"),
        (command_of_job, "tritonserver --model-repository=/models --backend-directory=/opt/tritonserver/backends"),
    ],
    ids=["slurm", "kubernetes"],
)
def test_the_examples_for_clusters_serve_on_two_hosts_and_drain(repository, second_host, command, of_server):
    add_model(repository, "two", MPI, checkpoint=STORIES)
    request = [("The fox", {"max_tokens": 400, "ignore_eos": True})]

    def launch(own):
        text = command()
        for documented, real in [
            (of_server, shlex.join(own)),
            ("/opt/tritonserver/backends", os.environ["TRITON_BACKENDS"]),
        ]:
            assert text.count(documented) == 1, documented
            text = text.replace(documented, real)
        # A process group of its own, with mpirun.
        return ["setsid", "bash", "-c", text]

    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**second_host.mpirun_environment(), **as_root}
    server = Server(repository, environment=environment, launch=launch)
    try:
        [rank] = second_host.processes("inflight-rank")
        expected = clients.streams(server, "two", request)
        answers = []
        client = threading.Thread(target=lambda: answers.extend(clients.streams(server, "two", request)))
        client.start()
        wait_for(lambda: num_requests(server, "two", "active") == 1, "it is not in flight")
        # `#SBATCH --signal=B:TERM` has Slurm send it to the script, and Kubernetes has nobody who sends it to the server.
        pids = [server.process.pid] if command is command_of_script else server.children("tritonserver")
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        client.join(clients.TIMEOUT_S)
        assert bits(answers) == bits(expected)
        assert server.process.wait(STOP_TIMEOUT_S) == 0, server.log_tail()
        wait_for(lambda: has_ended(rank), "a rank is left")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("killed", ["rank", "server", "mpirun"])
def test_one_process_that_is_killed_ends_all(repository, killed):
    add_model(repository, "two", MPI, checkpoint=STORIES)
    server = Server(repository, "--model-control-mode=explicit", "--load-model=two", mpi_ranks=2)
    assert answer(server)
    pids = {"rank": ranks(server)[0], "server": server.pid, "mpirun": server.process.pid}
    os.kill(pids[killed], signal.SIGKILL)
    assert server.process.wait(STOP_TIMEOUT_S) != 0
    for pid in pids.values():
        wait_for(lambda: has_ended(pid), f"process {pid} is left")


def test_a_server_that_mpirun_has_not_started_is_told_so(repository):
    add_model(repository, "one", {"num_threads": 1}, checkpoint=STORIES)
    add_model(repository, "two", MPI, checkpoint=STORIES)
    with Server(repository, "--model-control-mode=explicit", "--load-model=one") as server:
        assert "was not started by mpirun" in server.load("two")
        assert len(answer(server, "one")) == 20
