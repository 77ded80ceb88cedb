"""A model whose ranks are the processes of `mpirun`: the same bits as with processes that the server has started,
models one after the other, and nothing is left whatever happens to a process."""

import collections
import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import threading

import pytest

from harness import clients, deployments, seeds
from harness.adapters import page_bytes, write_adapter
from harness.repository import ROOT, STORIES, add_model
from harness.second_host import SecondHost
from harness.server import STOP_TIMEOUT_S, Server, assert_blocks_come_back, num_requests

from test_examples import mpi_job
from test_ranks import (
    FIXTURES,
    LOAD_TIME_LIMIT_S,
    PROMPTS,
    RANKS,
    TIME_LIMIT_S,
    FaultyProgram,
    answer,
    bits,
    delay,
    happen,
    has_ended,
    kill,
    nothing,
    pause,
    requests,
    starve,
    stop,
    wait_for,
)

pytestmark = pytest.mark.complete

# What happens to a process of mpirun, and what may end it, and so all.
MPI_FAULTS = [kill, stop, stop, pause, delay, starve, nothing]
MAY_END = (kill, starve)
MPI = {**RANKS, "rank_transport": "mpi"}
PLUGIN = pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight" / "libinflight_mpi.so"


def is_missing():
    return "no MPI" if shutil.which("mpirun") is None else None if PLUGIN.exists() else "no plug-in for MPI"


@pytest.fixture(autouse=True)
def mpi():
    """Skips a test, and says so in the summary, where MPI is missing."""
    if reason := is_missing():
        pytest.skip(reason)


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
def second_host(tmp_path):
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(SecondHost(tmp_path))
        except OSError as error:
            pytest.skip(f"no second host: {error}")


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


ON_GPUS = {"deterministic": "true", "max_tokens_in_paged_kv_cache": 4096, "cuda_graph_cache_size": 2}
GPU_RANKS = {"tensor_parallel_size": (2, 1), "pipeline_parallel_size": (1, 2)}


def add_gpu_models(repository, names, ranks):
    """Models whose instances are on GPU 0, with two ranks that share each layer, and with two stages."""
    for number, name in enumerate(names):
        sizes = {key: values[number] for key, values in GPU_RANKS.items()}
        parameters = {**ranks, **ON_GPUS, **sizes}
        # Only the GPU of the instance: the others are those that the ranks' hosts have.
        add_model(repository, name, {**parameters, "gpu_device_ids": 0}, checkpoint=STORIES)


def on_stand_in(folder, num_gpus):
    return {**deployments.stand_in(folder / "stand_in"), "CUDA_STAND_IN_DEVICES": str(num_gpus)}


def test_gpus_of_two_hosts_have_the_bits_of_gpus_of_one(repository, second_host, tmp_path):
    names = ["two", "stages"]
    asked = requests()[:8]
    add_gpu_models(tmp_path / "spawned", names, RANKS)
    with Server(tmp_path / "spawned", environment=on_stand_in(tmp_path, 2)) as server:
        expected = {name: bits(clients.streams(server, name, asked)) for name in names}
    add_gpu_models(repository, names, MPI)
    explicit = "--model-control-mode=explicit"
    environment = on_stand_in(tmp_path, 1)
    with Server(repository, explicit, environment=environment, mpi_ranks=2, second_host=second_host) as server:
        [rank] = second_host.processes("inflight-rank")
        for name in names:
            assert server.load(name) is None
            assert bits(clients.streams(server, name, asked)) == expected[name], name
            assert_blocks_come_back(server, name)
            server.unload(name)
            server.wait_for_state(name, "UNAVAILABLE")
    wait_for(lambda: has_ended(rank), "a rank is left")


def test_a_rank_of_mpirun_that_has_no_gpu_of_its_own_is_named(repository, tmp_path):
    add_gpu_models(repository, ["two"], MPI)
    add_model(repository, "missing", {**MPI, **ON_GPUS, "gpu_device_ids": "0,3"}, checkpoint=STORIES)
    add_model(repository, "cpu", MPI, checkpoint=STORIES)
    with Server(repository, "--model-control-mode=explicit", environment=on_stand_in(tmp_path, 1), mpi_ranks=2) as server:
        error = server.load("two")
        assert "ranks 0 and 1 would both have GPU 0 of their host" in error and "gpu_device_ids" in error, error
        error = server.load("missing")
        assert "the process of rank 1: there is no GPU 3: the driver shows 1" in error, error
        assert server.load("cpu") is None
        assert len(answer(server, "cpu")) == 20


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
        # `#SBATCH --signal=B:TERM` has Slurm send it to the script, and Kubernetes has nobody who sends it to the
        # server.
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


def test_a_rank_with_other_files_is_named(repository, tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        shutil.copytree(STORIES, folder / "checkpoint", symlinks=False)
    os.utime(folders[1] / "checkpoint" / "config.json", (1, 1))
    program = FaultyProgram(tmp_path)
    shutil.copy(PLUGIN, program.backends / "inflight")
    # Each process has the folder that it was started in.
    add_model(repository, "two", {**MPI, "gpt_model_path": "/proc/self/cwd/checkpoint"})
    explicit = "--model-control-mode=explicit"
    with program.does_first("--mpi", f"cd {folders[1]}"):
        with Server(repository, explicit, mpi_ranks=2, backends=program.backends, cwd=folders[0]) as server:
            error = server.load("two")
            assert "rank 1" in error and "are not those that rank 0 has opened" in error, error
            # A process of mpirun stays for the next load.
            shutil.copy2(folders[0] / "checkpoint" / "config.json", folders[1] / "checkpoint")
            assert server.load("two") is None
            assert len(answer(server)) == 20


def test_random_faults_under_mpirun_end_all_or_change_nothing(repository):
    num_faults = int(os.environ.get("INFLIGHT_NUM_FAULTS", 4))
    rng = seeds.rng("faults under mpirun")
    quick = {"rank_timeout_seconds": TIME_LIMIT_S, "rank_load_timeout_seconds": LOAD_TIME_LIMIT_S}
    add_model(repository, "three", {**MPI, **quick, "tensor_parallel_size": 3}, checkpoint=STORIES)
    add_model(repository, "calm", {"num_threads": 1}, checkpoint=STORIES)
    asked = requests()[:8]
    outcomes = collections.Counter()
    server = expected = None
    for number in range(num_faults):
        if server is None:
            server = Server(repository, mpi_ranks=3)
            pids = [server.process.pid, server.pid, *ranks(server)]
            of_calm, answers = answer(server, "calm"), bits(clients.streams(server, "three", asked))
            expected = expected or answers
            assert answers == expected
        fault, is_at_load, pid = rng.choice(MPI_FAULTS), rng.random() < 0.3, rng.choice(ranks(server))
        where = f"fault {number}: {fault.__name__}{' at load' * is_at_load}"
        if is_at_load:
            server.unload("three")
            server.wait_for_state("three", "UNAVAILABLE")
        timer = threading.Timer(rng.uniform(0, 0.4), happen, (fault, pid, rng))
        timer.start()
        failures = []
        try:
            if is_at_load and (error := server.load("three")) is not None:
                failures.append(error)
            else:
                answers = clients.streams(server, "three", asked, may_fail=True)
                failures = [one for one in answers if isinstance(one, Exception)]
                right = [one for one, kind in zip(expected, answers, strict=True) if not isinstance(kind, Exception)]
                assert bits([one for one in answers if not isinstance(one, Exception)]) == right, where
        except OSError:
            assert fault in MAY_END, where
        timer.join(clients.TIMEOUT_S)
        has_all_ended = fault is kill or server.process.poll() is not None
        what = "all end" if has_all_ended else "errors" if failures else "works"
        outcomes[f"{'load' if is_at_load else 'step'}: {fault.__name__}", what] += 1
        if has_all_ended:
            assert fault in MAY_END, where
            assert server.process.wait(STOP_TIMEOUT_S) != 0, where
            for pid in pids:
                wait_for(lambda: has_ended(pid), f"process {pid} is left: {where}")
            server = None
            continue
        for error in failures:
            assert re.search("rank [012]", str(error)), (where, error)
        os.kill(pid, signal.SIGCONT)
        assert answer(server, "calm") == of_calm, where
        if fault is starve:
            # Its process has no more memory for later models.
            server.stop()
            server = None
            continue
        with contextlib.suppress(AssertionError):
            server.unload("three")
        server.wait_for_state("three", "UNAVAILABLE")
        assert server.load("three") is None, where
        assert bits(clients.streams(server, "three", asked)) == expected, where
    if server is not None:
        server.stop()
    for (what, outcome), count in sorted(outcomes.items()):
        print(f"{what}: {outcome}: {count}")


def test_a_server_that_mpirun_has_not_started_is_told_so(repository):
    add_model(repository, "one", {"num_threads": 1}, checkpoint=STORIES)
    add_model(repository, "two", MPI, checkpoint=STORIES)
    with Server(repository, "--model-control-mode=explicit", "--load-model=one") as server:
        assert "was not started by mpirun" in server.load("two")
        assert len(answer(server, "one")) == 20
