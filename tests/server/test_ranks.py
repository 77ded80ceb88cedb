"""A model on several processes of one host: the same answers as on any other number, and a clear error, no orphan and a
load that works again whatever happens to a process."""

import asyncio
import collections
import contextlib
import os
import pathlib
import re
import resource
import shutil
import signal
import threading
import time

import numpy
import pytest

from harness import clients, costs, seeds
from harness.adapters import page_bytes, write_adapter
from harness.clients import GrpcStream, Refused, described, generate
from harness.repository import ROOT, STORIES, TIGHT, add_model
from harness.server import STOP_TIMEOUT_S, Server, assert_blocks_come_back, until

FIXTURES = ROOT / "tests" / "fixtures"
# No wait of a test that expects no fault ends in the processes' own time limit.
# A failed instance stays so, for the tests of what it does then.
RANKS = {"tensor_parallel_size": 2, "num_threads": 1, "rank_timeout_seconds": 100, "max_rank_restarts": 0}
ALONE = {"num_threads": 1, "deterministic": "true"}
STAGES = {**RANKS, "tensor_parallel_size": 1, "pipeline_parallel_size": 2, "enable_trt_overlap": "true"}
PROMPTS = ["Once upon a time", "The fox", "A little girl named", "One day, the dog", "In the garden there was"]
LONG = {"max_tokens": 900, "ignore_eos": True}


def requests():
    """Requests of all kinds: greedy ones, sampled ones, with penalties, of different lengths."""
    kinds = [
        {},
        {"temperature": 1.2, "seed": 3, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"temperature": 0.8, "seed": 11, "top_p": 0.9},
    ]
    return [
        (prompt, {"max_tokens": 12 + 3 * i + 5 * j, "return_log_probs": True, "ignore_eos": True, **kind})
        for i, prompt in enumerate(PROMPTS)
        for j, kind in enumerate(kinds)
    ]


def bits(answers):
    return [described(answer) for answer in answers]


def processes(server):
    """The process ids of the other ranks of a server's models."""
    return server.children("inflight-rank")


def has_ended(pid):
    """Whether a process has ended: nobody may be there who waits for it."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in ("Z", "X")


def wait_for(condition, what):
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    repository = tmp_path_factory.mktemp("ranks") / "repository"
    add = deployment.add_model
    beams = {"max_beam_width": 4}
    add(repository, "one", {"num_threads": 1, **beams}, checkpoint=STORIES)
    add(repository, "alone", {**ALONE, **beams}, checkpoint=STORIES)
    add(repository, "two", {**RANKS, **beams}, checkpoint=STORIES)
    add(repository, "four", {**RANKS, "tensor_parallel_size": 4, **beams}, checkpoint=STORIES)
    host = {"kv_cache_host_memory_bytes": 1 << 24}
    add(repository, "tight", {**RANKS, **TIGHT, **host}, checkpoint=STORIES)
    drafts = {"speculation": "prompt_lookup", "enable_trt_overlap": "true"}
    add(repository, "drafts", {**RANKS, **drafts}, checkpoint=STORIES)
    add(repository, "stages", {**STAGES, **TIGHT, **host}, checkpoint=STORIES)
    add(repository, "stages_of_two", {**STAGES, "tensor_parallel_size": 2, "enable_trt_overlap": "false"}, checkpoint=STORIES)
    add(repository, "stages_of_one", {**STAGES, "deterministic": "true"}, checkpoint=STORIES)
    with deployment.server(repository) as server:
        yield server


def test_any_number_of_processes_gives_the_same_bits(server):
    assert len(processes(server)) == 1 + 3 + 1 + 1 + 1 + 3 + 1
    expected = [clients.streams(server, "two", [request])[0] for request in requests()]
    models = ("alone", "two", "four", "tight", "drafts", "stages_of_two", "stages_of_one")
    for model in models:
        assert bits(clients.streams(server, model, requests())) == bits(expected), model
    for model in models:
        assert_blocks_come_back(server, model)


def test_stages_give_the_bits_of_one_process(server):
    expected = bits(clients.streams(server, "one", requests()))
    assert bits(clients.streams(server, "stages", requests())) == expected
    assert_blocks_come_back(server, "stages")


@pytest.mark.deployments("iterative")
def test_experts_and_adapters_are_the_same_on_any_number_of_processes(repository, tmp_path):
    for index in range(5):
        write_adapter(tmp_path / str(index), index)
    shutil.copytree(FIXTURES / "adapters" / "all-modules", tmp_path / "for-another-model")
    mixture = {"gpt_model_path": FIXTURES / "qwen2-moe", "weight_only_precision": "int8"}
    # Each adapter takes a page, so they leave the memory for one another.
    adapters = {"lora_dir": tmp_path, "lora_cache_host_memory_bytes": 2 * page_bytes() + 1}
    for name, ranks in [("alone", ALONE), ("two", RANKS), ("four", {**RANKS, "tensor_parallel_size": 4})]:
        add_model(repository, f"mixture_{name}", {**ranks, **mixture})
        add_model(repository, f"adapters_{name}", {**ranks, **adapters}, checkpoint=STORIES)
    options = {"max_tokens": 12, "ignore_eos": True, "return_log_probs": True}
    prompts = [([3 + (7 * i + j) % 90 for j in range(5 + i)], options) for i in range(6)]
    adapted = [(PROMPTS[i % 5], {**options, **({"lora_name": str(i % 6)} if i % 6 < 5 else {})}) for i in range(18)]
    with Server(repository) as server:
        for kind, asked in [("mixture", prompts), ("adapters", adapted)]:
            alone, two, four = (bits(clients.streams(server, f"{kind}_{name}", asked)) for name in ("alone", "two", "four"))
            assert alone == two == four, kind
        with pytest.raises(Refused, match="for-another-model"):
            clients.streams(server, "adapters_two", [("The fox", {**options, "lora_name": "for-another-model"})])
        assert bits(clients.streams(server, "adapters_two", adapted)) == two
        assert len({str(answer) for answer in two[:5]}) == 5
        # Another version of an adapter is another one on all processes.
        write_adapter(tmp_path / "new", 9)
        for file in (tmp_path / "new").iterdir():
            file.rename(tmp_path / "0" / file.name)
        first, replaced = [adapted[0]], []
        for name in ("adapters_two", "adapters_four"):
            # A model looks for new versions once a second.
            wait_for(lambda: bits(clients.streams(server, name, first)) != two[:1], f"{name} keeps the old version")
            replaced.append(bits(clients.streams(server, name, first)))
        assert replaced[0] == replaced[1]


def are_near(prompt, logits, others):
    """Whether logits of a prompt differ by no more than rounding to bf16 costs; what is no number is not near."""
    return bool((numpy.abs(logits - others) <= costs.OF_STORIES[prompt]).all())


def test_one_process_differs_only_in_rounding(server):
    options = {"max_tokens": 1, "return_context_logits": True, "exclude_input_in_output": True}
    asked = [(prompt, options) for prompt in PROMPTS]
    answers = zip(PROMPTS, clients.streams(server, "one", asked), clients.streams(server, "two", asked), strict=True)
    for prompt, one, two in answers:
        [one], [two] = one.tensors("context_logits"), two.tensors("context_logits")
        assert one.shape == two.shape
        print(prompt, numpy.abs(one - two).max() / costs.OF_STORIES[prompt])
        assert are_near(prompt, one, two)
        # A tenth of the logits is missing, or noise.
        tenth = numpy.arange(two.size).reshape(two.shape) % 10 == 0
        noise = seeds.rng("noise", prompt)
        noisy = two + two.std() * numpy.array([noise.gauss(0, 0.2) for _ in range(two.size)]).reshape(two.shape)
        for wrong in (numpy.where(tenth, 0, two), numpy.where(tenth, numpy.nan, two), noisy):
            assert not are_near(prompt, one, wrong)


def test_beams_are_the_same_on_any_number_of_processes(server):
    options = {"beam_width": 4, "max_tokens": 20, "stream": False, "return_log_probs": True}
    asked = [(prompt, {**options, "exclude_input_in_output": True}) for prompt in PROMPTS]
    found = [clients.streams(server, model, asked) for model in ("alone", "two", "four")]
    alone, two, four = ([[described(beam) for beam in answer.sequences()] for answer in answers] for answers in found)
    assert alone == two == four
    assert all(len(beams) == 4 for beams in two)


@pytest.mark.cancelling
def test_cancelled_and_bad_requests_change_nothing_for_the_others(server):
    expected = bits(clients.streams(server, "two", requests()))

    async def bad(client, options, reason):
        with pytest.raises(Refused, match=reason):
            await clients.stream(client, "tight", "The fox", **options)

    async def main():
        async with clients.grpc(server) as client:
            good = [clients.stream(client, "tight", prompt, **options) for prompt, options in requests()]
            long = {"max_tokens": 200, "ignore_eos": True}
            others = [clients.cancelled_stream(client, "tight", prompt, **long) for prompt in PROMPTS]
            others += [
                bad(client, {"max_tokens": 5, "top_p": 2.0}, "top_p"),
                bad(client, {"max_tokens": 5, "temperature": -1.0}, "temperature"),
                bad(client, {"max_tokens": 5, "beam_width": 3}, "beam_width"),
            ]
            answers = await asyncio.gather(*good, *others)
            return answers[: len(good)]

    assert bits(clients.run(main())) == expected
    assert_blocks_come_back(server, "tight")


# Faults. Each test has a server of its own.


@pytest.fixture
def faulty(request, repository, deployment):
    """A server with a model whose processes wait for each other for 8 s, and one in one process."""
    ranks = getattr(request, "param", RANKS)
    deployment.add_model(repository, "two", {**ranks, "rank_timeout_seconds": 8}, checkpoint=STORIES)
    deployment.add_model(repository, "one", {"num_threads": 1}, checkpoint=STORIES)
    with deployment.server(repository) as server:
        yield server


def answer(server, model="two"):
    return clients.streams(server, model, [("The fox", {"max_tokens": 20, "ignore_eos": True})])[0].ids


def failures_after(server, fault, num_streams=4):
    """The errors of requests in flight in the middle of which `fault` happens."""

    async def one(client, prompt, started):
        try:
            async for _ in GrpcStream(client, "two", prompt, stream=True, **LONG):
                started.set()
        except Refused as error:
            return str(error)
        finally:
            started.set()

    async def main():
        async with clients.grpc(server) as client:
            started = [asyncio.Event() for _ in range(num_streams)]
            prompts = (PROMPTS[i % len(PROMPTS)] for i in range(num_streams))
            tasks = [asyncio.create_task(one(client, prompt, event)) for prompt, event in zip(prompts, started)]
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), clients.TIMEOUT_S)
            assert not any(task.done() for task in tasks), "they are in flight"
            fault()
            return await asyncio.wait_for(asyncio.gather(*tasks), clients.TIMEOUT_S)

    return clients.run(main())


def assert_failed_and_loads_again(server, pids, expected):
    """No process of the model is left, its requests get an error, the other model serves, and a new load serves the
    same. (Server 2.51 does not ask whether an instance is ready.)"""
    for pid in pids:
        wait_for(lambda: has_ended(pid), f"process {pid} is left")
    assert processes(server) == []
    with pytest.raises(Refused, match="the model instance has failed.*rank 1"):
        answer(server)
    assert len(answer(server, "one")) > 0
    server.unload("two")
    server.wait_for_state("two", "UNAVAILABLE")
    assert server.load("two") is None
    assert answer(server) == expected
    assert len(processes(server)) == 1


@pytest.mark.parametrize("faulty", [RANKS, STAGES], ids=["ranks", "stages"], indirect=True)
def test_a_process_that_is_killed_in_a_step_is_an_error_for_every_request_in_flight(faulty):
    expected = answer(faulty)
    [pid] = processes(faulty)
    errors = failures_after(faulty, lambda: os.kill(pid, signal.SIGKILL))
    for error in errors:
        assert error is not None and "rank 1" in error and "SIGKILL" in error, errors
    assert_failed_and_loads_again(faulty, [pid], expected)


def test_a_process_that_is_stopped_in_a_step_is_an_error_within_the_time_limit(faulty):
    expected = answer(faulty)
    [pid] = processes(faulty)
    errors = failures_after(faulty, lambda: os.kill(pid, signal.SIGSTOP))
    for error in errors:
        assert error is not None and "rank 1" in error, errors
    assert any("8s, the time limit" in error for error in errors), errors
    assert_failed_and_loads_again(faulty, [pid], expected)


def test_a_process_that_is_killed_between_requests_fails_the_instance(faulty):
    expected = answer(faulty)
    [pid] = processes(faulty)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "the process of rank 1 has ended (signal: 9 (SIGKILL))" in faulty.log(), "it is not noticed")
    assert_failed_and_loads_again(faulty, [pid], expected)


@pytest.mark.deployments("iterative")
def test_a_failed_instance_is_counted_and_loaded_anew_by_itself_and_by_a_load_over_it(repository, deployment):
    version = deployment.add_model(repository, "two", {**RANKS, "max_rank_restarts": 1}, checkpoint=STORIES)
    with deployment.server(repository) as server:
        labels = (("model", "two"), ("version", "1"))

        def num_failed():
            return server.metrics()["nv_inflight_failed_instances", labels]

        def kill_a_rank():
            [pid] = processes(server)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: num_failed() == 1, "the failure is not counted")

        expected = answer(server)
        assert num_failed() == 0
        kill_a_rank()
        wait_for(lambda: num_failed() == 0, "the instance is not loaded anew")
        assert answer(server) == expected
        kill_a_rank()
        with pytest.raises(Refused, match="the model instance has failed.*touch its config.pbtxt.*rank 1"):
            answer(server)
        (version.parent / "config.pbtxt").touch()
        assert server.load("two") is None
        wait_for(lambda: num_failed() == 0, "the load does not replace it")
        assert answer(server) == expected


def test_a_process_that_pauses_for_less_than_the_time_limit_changes_nothing(faulty):
    expected = answer(faulty)
    [pid] = processes(faulty)

    async def main():
        async with clients.grpc(faulty) as client:
            asked = {"max_tokens": 20, "ignore_eos": True}
            tasks = [asyncio.create_task(clients.stream(client, "two", "The fox", **asked)) for _ in range(3)]
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
            return await asyncio.gather(*tasks)

    assert [answer.ids for answer in clients.run(main())] == [expected] * 3


def test_signals_that_end_a_server_are_left_to_it(faulty):
    expected = answer(faulty)
    [pid] = processes(faulty)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert answer(faulty) == expected
    assert processes(faulty) == [pid]


def test_an_unload_ends_the_processes_and_a_load_starts_new_ones(faulty):
    expected = answer(faulty)
    for _ in range(3):
        pids = processes(faulty)
        assert len(pids) == 1
        faulty.unload("two")
        faulty.wait_for_state("two", "UNAVAILABLE")
        for pid in pids:
            wait_for(lambda: has_ended(pid), f"process {pid} is left")
        assert faulty.load("two") is None
        assert answer(faulty) == expected


def starve(pid, *_):
    """A process gets no more memory than it has."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    has_bytes = 1024 * int(status.split("VmSize:")[1].split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (has_bytes, has_bytes))


@pytest.mark.deployments("iterative")
def test_a_process_that_gets_no_memory_for_an_adapter_is_an_error(repository, deployment, tmp_path):
    adapters = [str(index) for index in range(8)]
    for index, name in enumerate(adapters):
        write_adapter(tmp_path / name, index)
    deployment.add_model(repository, "two", {**RANKS, "lora_dir": tmp_path}, checkpoint=STORIES)
    deployment.add_model(repository, "one", {"num_threads": 1}, checkpoint=STORIES)
    with deployment.server(repository) as server:
        expected = answer(server)
        [pid] = processes(server)
        starve(pid)
        with pytest.raises(Refused, match="rank 1"):
            for name in adapters:
                clients.streams(server, "two", [("The fox", {"max_tokens": 5, "lora_name": name})])
        assert_failed_and_loads_again(server, [pid], expected)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_server_that_is_killed_leaves_no_process(repository, deployment, is_stopped):
    deployment.add_model(repository, "four", {**RANKS, "tensor_parallel_size": 4}, checkpoint=STORIES)
    server = deployment.server(repository)
    try:
        pids = processes(server)
        assert len(pids) == 3
        if is_stopped:
            os.kill(pids[1], signal.SIGSTOP)
    finally:
        server.process.kill()
        server.process.wait()
    for pid in pids:
        wait_for(lambda: has_ended(pid), f"process {pid} is left")


# Loads that fail. The drivers do not matter.


@pytest.mark.deployments("iterative")
def test_a_program_that_is_missing_or_of_another_build_is_named(repository, tmp_path):
    folder = tmp_path / "backends" / "inflight"
    folder.mkdir(parents=True)
    shutil.copy(pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight" / "libtriton_inflight.so", folder)
    add_model(repository, "one", {"num_threads": 1}, checkpoint=STORIES)
    add_model(repository, "two", RANKS, checkpoint=STORIES)
    arguments = ["--model-control-mode=explicit", "--load-model=one"]
    with Server(repository, *arguments, backends=folder.parent) as server:
        error = server.load("two")
        assert "inflight-rank" in error and "No such file" in error, error
        program = folder / "inflight-rank"
        program.write_text("""#!/bin/sh\nprintf '\\021\\000\\000\\000{"build":"0 old"}' >&0\nexec sleep 1000\n""")
        program.chmod(0o755)
        error = server.load("two")
        assert "is of build 0 old" in error and "install both" in error, error
        real = pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight" / "inflight-rank"
        changed = tmp_path / "changed"
        program.write_text(f'#!/bin/sh\ntouch {changed}/config.json\nexec {real} "$@"\n')
        shutil.copytree(STORIES, changed, symlinks=False)
        add_model(repository, "changing", {**RANKS, "gpt_model_path": changed})
        error = server.load("changing")
        assert "are not those that rank 0 has opened" in error, error
        program.unlink()
        program.symlink_to(real)
        assert server.load("two") is None
        assert answer(server) == answer(server)
        assert len(answer(server, "one")) == 20


def cpus_of_threads(pid, name):
    """The CPUs that the threads of a process with this name may use, each as the system writes them."""
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    threads = [task for task in tasks if (task / "comm").read_text().startswith(name)]
    statuses = [line.split(":") for task in threads for line in (task / "status").read_text().splitlines()]
    return {value.strip() for key, value in statuses if key == "Cpus_allowed_list"}


@pytest.mark.deployments("iterative")
def test_ranks_have_the_cpus_that_they_are_given(repository):
    # The server's first and last CPU; each rank has two threads, so that one is not Triton's.
    first, *_, last = cpus = sorted(os.sched_getaffinity(0))
    parameters = {"num_threads": 2, "rank_cpus": f"{last};{first}"}
    add_model(repository, "bound", {**RANKS, **parameters}, checkpoint=STORIES)
    add_model(repository, "free", {**RANKS, "num_threads": 2}, checkpoint=STORIES)
    with Server(repository, "--model-control-mode=explicit", "--load-model=free") as server:
        expected = bits(clients.streams(server, "free", requests()))
        server.unload("free")
        server.wait_for_state("free", "UNAVAILABLE")
        wait_for(lambda: processes(server) == [], "a process is left")
        assert server.load("bound") is None
        [rank] = processes(server)
        assert cpus_of_threads(server.pid, "inflight-cpu-") == {str(last)}
        assert cpus_of_threads(rank, "inflight-cpu-") == {str(first)}
        assert bits(clients.streams(server, "bound", requests())) == expected
        # Nothing of the server stays bound after its part of a step.
        server.unload("bound")
        server.wait_for_state("bound", "UNAVAILABLE")
        assert server.load("free") is None
        assert len(os.sched_getaffinity(server.pid)) == len(cpus)


def bytes_read(pid):
    """The bytes that a process has read from files so far."""
    return int(pathlib.Path(f"/proc/{pid}/io").read_text().split("rchar:")[1].split()[0])


@pytest.mark.deployments("iterative")
def test_each_rank_reads_only_its_share(repository):
    # Floats, experts, quantised weights, and a GGUF file.
    models = [STORIES, *(FIXTURES / name for name in ("qwen2-moe", "quantised/bnb-nf4", "quantised/gguf-q4_k"))]
    with Server(repository, "--model-control-mode=explicit") as server:
        for number, folder in enumerate(models):
            num_read = {}
            for num_ranks in (2, 4):
                name = f"model_{number}_{num_ranks}"
                parameters = {**RANKS, "tensor_parallel_size": num_ranks, "gpt_model_path": folder}
                add_model(repository, name, parameters)
                assert server.load(name) is None
                num_read[num_ranks] = [bytes_read(pid) for pid in processes(server)]
                server.unload(name)
                server.wait_for_state(name, "UNAVAILABLE")
                wait_for(lambda: processes(server) == [], "a process is left")
            of_weights = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))
            # A quarter of the weights more on one of two ranks than on one of four, but for what every rank has: norms,
            # heads that it shares, and other files.
            assert min(num_read[2]) - max(num_read[4]) > of_weights / 8, (folder.name, of_weights, num_read)
            if folder == STORIES:
                for num_ranks, counts in num_read.items():
                    assert max(counts) < 1.15 * of_weights / num_ranks, (of_weights, num_read)


@pytest.mark.deployments("iterative")
def test_what_cannot_be_split_is_refused_with_the_reason(repository):
    add_model(repository, "one", {"num_threads": 1}, checkpoint=STORIES)
    cases = {
        "kv_file": (
            {"kv_cache_file": "kv", "kv_cache_host_memory_bytes": 1 << 24},
            STORIES,
            ["kv_cache_file"],
        ),
        "gpu": ({"gpu_device_ids": 0}, STORIES, ["there is no CUDA driver"]),
        "groups": ({"tensor_parallel_size": 4}, FIXTURES / "quantised" / "awq", ["4 query heads", "same groups"]),
        "heads": ({"tensor_parallel_size": 5}, STORIES, ["5 ranks", "only 4 query heads"]),
        "many": ({"tensor_parallel_size": 17}, STORIES, ["'17'", "1 to 16"]),
        "product": ({"tensor_parallel_size": 4, "pipeline_parallel_size": 5}, STORIES, ["is 5", "size 4", "at most 16"]),
        "layers": ({"tensor_parallel_size": 1, "pipeline_parallel_size": 9}, STORIES, ["is 9", "layers"]),
        "synthetic": ({"runner": "synthetic"}, None, ["synthetic"]),
        "cpus": ({"rank_cpus": "0;1;0"}, STORIES, ["0;1;0", "3 lists", "2 ranks"]),
        "no_cpu": ({"rank_cpus": "0;1023"}, STORIES, ["CPU 1023", "taskset"]),
    }
    for name, (parameters, checkpoint, _) in cases.items():
        add_model(repository, name, {**RANKS, **parameters}, checkpoint=checkpoint)
    with Server(repository, "--model-control-mode=explicit", "--load-model=one") as server:
        for name, (_, _, words) in cases.items():
            error = server.load(name)
            assert error is not None, name
            for word in words:
                assert word in error, (name, error)
        wait_for(lambda: processes(server) == [], "a process is left")
        assert generate(server, "one", "The fox", max_tokens=3, stream=False).ids


# Random faults: whatever happens, answers are right or errors name a rank, nothing is left, and a load works again.

TIME_LIMIT_S = 4
LOAD_TIME_LIMIT_S = 8


class FaultyProgram:
    """A folder of backends whose `inflight-rank` can be told what one of its processes does first."""

    def __init__(self, folder):
        real = pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight"
        self.backends = folder / "backends"
        own = self.backends / "inflight"
        own.mkdir(parents=True)
        shutil.copy(real / "libtriton_inflight.so", own)
        self._first = own / "first"
        program = own / "inflight-rank"
        program.write_text(f'#!/bin/sh\n[ ! -f {self._first} ] || . {self._first}\nexec {real}/inflight-rank "$@"\n')
        program.chmod(0o755)

    @contextlib.contextmanager
    def does_first(self, argument, line):
        """The processes that have this argument run a line of the shell before they are a rank."""
        self._first.write_text(f'case "$1" in {argument}) {line};; esac\n')
        yield
        self._first.unlink()


def kill(pid, _):
    os.kill(pid, signal.SIGKILL)


def stop(pid, _):
    os.kill(pid, signal.SIGSTOP)


def stop_for(pid, seconds):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def pause(pid, rng):
    stop_for(pid, rng.uniform(0, 0.2))


def delay(pid, _):
    """Slower than the time limit."""
    stop_for(pid, TIME_LIMIT_S + 1)


def nothing(*_):
    pass


# Of processes in a step, and of processes that load.
FAULTS = [kill, kill, stop, pause, delay, starve, nothing]
LOAD_FAULTS = [kill, stop, pause, starve]


def happen(fault, pid, rng):
    # A fault may come after the end of its process.
    with contextlib.suppress(OSError, IndexError):
        fault(pid, rng)


def starts(rng, checkpoint):
    """What a process may do first, and whether the load fails then."""
    greeting = """printf '\\021\\000\\000\\000{"build":"0 old"}' >&0"""
    return {
        "little memory": (f"ulimit -v {rng.randrange(2_000, 700_000)}", False),
        "slow": (f"sleep {rng.uniform(0.1, 1.5):.2f} </dev/null", False),
        "never": ("exec sleep 1000", True),
        "stopped": ("kill -STOP $$", True),
        "ends": ("exit 7", True),
        "other files": (f"touch {checkpoint}/config.json", True),
        "missing files": (f"mv {checkpoint}/config.json {checkpoint}/moved", True),
        "other version": (f"{greeting}; exec sleep 1000", True),
    }


def load_with_signal(server, own, fault, rng):
    """Loads the model while something happens to one of its processes. Returns the error; it must name a rank."""
    result = []
    thread = threading.Thread(target=lambda: result.append(server.load("three")))
    thread.start()
    time.sleep(rng.uniform(0, 0.5))
    if pids := own():
        happen(fault, rng.choice(pids), rng)
    thread.join(clients.TIMEOUT_S)
    assert not thread.is_alive(), "the load never ends"
    assert result[0] is None or re.search("rank [12]", result[0]), result
    return result[0]


def load_after(server, program, rank, line):
    """Loads the model, and has the process of one rank run a line of the shell first. Returns the load error, which
    must name a rank: that one, if its memory limit leaves no room for a KV cache."""
    with program.does_first(f"rank={rank}", line):
        error = server.load("three")
    assert error is None or re.search("rank [12]", error), (line, error)
    if error is not None and "the KV cache has" in error:
        assert bytes_that_a_process_may_take(error, rank) < 1024 * int(line.removeprefix("ulimit -v ")), (line, error)
    return error


def bytes_that_a_process_may_take(error, rank):
    """What an error says that the process of this rank may take."""
    said = re.search(rf"the process of rank {rank} may take (\d+) bytes \(ulimit -v\)", error)
    assert said is not None, (rank, error)
    return int(said[1])


@pytest.mark.deployments("iterative")
def test_the_process_with_the_least_memory_decides_on_the_kv_cache(repository, deployment, tmp_path):
    program = FaultyProgram(tmp_path)
    # So small a share of the memory that sequences have use for all of it.
    deployment.add_model(repository, "two", {**RANKS, "kv_cache_free_gpu_mem_fraction": 0.01}, checkpoint=STORIES)
    # A share in which a sequence has room with all of the memory, and not with the limit.
    deployment.add_model(repository, "small", {**RANKS, "kv_cache_free_gpu_mem_fraction": 0.0005}, checkpoint=STORIES)
    arguments = ["--model-control-mode=explicit", "--load-model=two"]
    with deployment.server(repository, *arguments, backends=program.backends) as server:
        expected = answer(server)
        server.unload("two")
        server.wait_for_state("two", "UNAVAILABLE")
        limit_bytes = 2 << 30
        with program.does_first("rank=1", f"ulimit -v {limit_bytes // 1024}"):
            assert server.load("two") is None
            error = server.load("small")
        assert "which do not hold one sequence" in error, error
        assert limit_bytes / 2 < bytes_that_a_process_may_take(error, 1) < limit_bytes, error
        assert server.load("small") is None
        assert answer(server) == expected
        unlimited, limited = (int(count) for count in re.findall(r"two_0: (\d+) KV blocks of 32 tokens", server.log()))
        # Keys and values of half of the 2 heads of 64 elements in each of 5 layers, in bf16.
        of_rank = limited * 32 * 5 * 2 * 64 * 2
        assert limit_bytes / 200 < of_rank < limit_bytes / 100, (limited, unlimited)
        assert unlimited > 1.5 * limited


@pytest.mark.complete
def test_random_faults_leave_nothing_behind(repository, deployment, tmp_path):
    num_faults = int(os.environ.get("INFLIGHT_NUM_FAULTS", 8))
    rng = seeds.rng("faults of ranks")
    program = FaultyProgram(tmp_path)
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(STORIES, checkpoint, symlinks=False)
    for index in range(3):
        write_adapter(tmp_path / "adapters" / str(index), index)
    # Where a rank has no core for as long as its time limit, that is a fault, too.
    deployment.add_model(repository, "calm", RANKS, checkpoint=STORIES)
    three = {**RANKS, "tensor_parallel_size": 3, "lora_dir": tmp_path / "adapters"}
    quick = {"rank_timeout_seconds": TIME_LIMIT_S, "rank_load_timeout_seconds": LOAD_TIME_LIMIT_S}
    deployment.add_model(repository, "three", {**three, **quick, "gpt_model_path": checkpoint})
    deployment.add_model(repository, "calm_three", three, checkpoint=STORIES)
    asked = [
        (prompt, {**options, **({"lora_name": str(index % 4)} if index % 4 < 3 else {})})
        for index, (prompt, options) in enumerate(requests()[:8])
    ]
    outcomes = collections.Counter()
    explicit = ("--model-control-mode=explicit", "--load-model=calm_three")
    with deployment.server(repository, *explicit, backends=program.backends) as server:
        expected = bits(clients.streams(server, "calm_three", asked))
        server.unload("calm_three")
        server.wait_for_state("calm_three", "UNAVAILABLE")
        assert server.load("calm") is None
        # All that the server has started, and not only those that have become ranks.
        calm = set(server.children(""))
        of_calm = answer(server, "calm")

        def own():
            return [pid for pid in processes(server) if pid not in calm]

        for number in range(num_faults):
            draw = rng.random()
            if draw < 0.25:
                what, (line, fails) = rng.choice(list(starts(rng, checkpoint).items()))
                error = load_after(server, program, rng.choice((1, 2)), line)
                assert error is not None or not fails, (number, what)
                moved = checkpoint / "moved"
                if moved.exists():
                    moved.rename(checkpoint / "config.json")
                outcomes[f"load: {what}", "works" if error is None else "error"] += 1
            elif draw < 0.4:
                fault = rng.choice(LOAD_FAULTS)
                error = load_with_signal(server, own, fault, rng)
                outcomes[f"load: {fault.__name__}", "works" if error is None else "error"] += 1
            else:
                assert server.load("three") is None
                error = None
            pids = own()
            fault = rng.choice(FAULTS)
            if len(pids) == 2:
                timer = threading.Timer(rng.uniform(0, 0.4), happen, (fault, rng.choice(pids), rng))
                timer.start()
                answers = clients.streams(server, "three", asked, may_fail=True)
                timer.join(clients.TIMEOUT_S)
                for one, right in zip(answers, expected, strict=True):
                    if isinstance(one, Refused):
                        assert re.search("rank [12]", str(one)), (number, fault, one)
                    else:
                        assert described(one) == right, (number, fault)
                num_refused = sum(isinstance(one, Refused) for one in answers)
                outcome = {0: "answers", len(asked): "errors"}.get(num_refused, "answers and errors")
                outcomes[f"step: {fault.__name__}", outcome] += 1
            with contextlib.suppress(AssertionError):
                server.unload("three")
            server.wait_for_state("three", "UNAVAILABLE")
            wait_for(lambda: set(server.children("")) <= calm, f"a process is left: {number}, {fault}")
            assert answer(server, "calm") == of_calm
        assert server.load("three") is None
        assert bits(clients.streams(server, "three", asked)) == expected
    for (what, outcome), count in sorted(outcomes.items()):
        print(f"{what}: {outcome}: {count}")
