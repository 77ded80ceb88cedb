"""Properties that the harness itself must have."""

import asyncio
import collections
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import types

import grpc
import pytest

from harness import clients, left_out, tiers
from harness.cancelling import forgiveness, is_in_frontend, num_lost
from harness.clients import GrpcStream, in_flight
from harness.repository import add_synthetic
from harness.server import FrontendDied, Server, ServerDied, die_with_parent, thread_states, until
from harness.synthetic import ENDLESS_SEQ_LEN


def test_programs_start_while_grpc_clients_are_busy():
    over = threading.Event()

    async def call():
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await channel.unary_unary("/nobody/listens")(b"", timeout=0.02)

    async def be_busy():
        while not over.is_set():
            await asyncio.gather(*(call() for _ in range(8)))

    client = threading.Thread(target=asyncio.run, args=(be_busy(),))
    client.start()
    try:
        programs = (subprocess.Popen(["true"], preexec_fn=die_with_parent) for _ in range(150))
        statuses = [program.wait(20) for program in programs]
    finally:
        over.set()
        client.join()
    assert statuses == [0] * 150


@pytest.mark.cancelling
def test_a_model_that_does_not_unload_is_described_by_what_it_holds(repository):
    add_synthetic(repository, "endless", {"max_seq_len": ENDLESS_SEQ_LEN})

    async def state_while_one_is_in_flight(server):
        async with clients.grpc(server) as client, in_flight(client, "endless", [1]):
            server.unload("endless")
            return server.state_of(["endless"])

    with Server(repository) as server:
        state = asyncio.run(state_while_one_is_in_flight(server))
    assert "not unloaded" in state and "['endless']" in state
    # The gauges, and the backend's threads among the server's.
    assert "'request_type': 'active'" in state and "inflight" in state


def test_a_thread_that_waits_is_told_from_one_that_runs():
    program = "import sys, threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\nprint()\nsys.stdout.flush()\n"
    with subprocess.Popen([sys.executable, "-c", program + "while True: pass"], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"\n"
        asyncio.run(until(lambda: sorted(thread_states(process.pid).values()) == ["R", "S"]))
        process.kill()
    assert thread_states(process.pid) == {}


def test_a_failure_tells_how_the_server_has_died(repository):
    add_synthetic(repository, "synthetic")
    with pytest.raises(ServerDied) as death, Server(repository) as server:
        os.kill(server.pid, signal.SIGSEGV)
        while True:
            server.is_ready()
    status, signal_line, *frames = str(death.value).splitlines()
    assert "exit status -" in status and signal_line == "Signal (11) received."
    assert any("tritonserver" in frame for frame in frames)
    # This test cancels nothing.
    assert not isinstance(death.value, FrontendDied)


IN_THE_HANDLER = """\
Signal (11) received.
 0# 0x000055BABF50552D in /opt/tritonserver/bin/tritonserver
 1# 0x00007F86CEA5A050 in /lib/x86_64-linux-gnu/libc.so.6
"""


@pytest.mark.parametrize(
    ("inner", "is_frontend"),
    [
        (" 2# 0x000055BABF4B20C4 in /opt/tritonserver/bin/tritonserver", True),
        (" 2# abort in /lib/libc.so.6\n 3# 0x00005 in /opt/bin/tritonserver", True),
        (" 2# TRITONBACKEND_ResponseSend in /opt/lib/libtritonserver.so\n 3# 0x00005 in /opt/bin/tritonserver", False),
        (" 2# memcpy in /lib/libc.so.6\n 3# 0x00005 in /opt/inflight/libtriton_inflight.so\n 4# 0x5 in /opt/bin/tritonserver", False),
        ("", False),
    ],
    ids=["frontend", "frontend_by_libc", "core", "backend_by_libc", "nowhere"],
)
def test_only_the_innermost_frame_tells_what_has_died(inner, is_frontend):
    assert is_in_frontend((IN_THE_HANDLER + inner).splitlines()) == is_frontend


def test_a_server_that_ends_without_a_signal_is_not_a_crash_of_its_frontend():
    assert not is_in_frontend(["error: creating server: Internal - failed to load all models"])


def test_only_a_test_that_cancels_runs_again_after_a_crash_in_the_frontend_and_once_in_a_run(repository, tmp_path):
    """A test file of its own, of which three tests kill the server that they share, the first one only when it runs
    first."""
    file = tmp_path / "test_it.py"
    file.write_text(END_THEIR_SERVER)
    add_synthetic(repository, "synthetic")
    here = pathlib.Path(__file__).parent
    shutil.copy(here / "conftest.py", tmp_path)
    arguments = ["-c", here / "pytest.ini", "--rootdir", tmp_path, "-q", f"--basetemp={tmp_path / 'base'}", file]
    environment = {**os.environ, "REPOSITORY": str(repository)}
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(command, env=environment, cwd=here, capture_output=True, text=True, timeout=120)
    assert "2 failed, 2 passed, 1 warning, 1 rerun" in done.stdout and done.returncode == 1, done.stdout
    reruns = [line.split("::")[1] for line in done.stdout.splitlines() if line.startswith("RERUN")]
    failures = [line.split("::")[1].split(" - ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert (reruns, failures) == (["test_one"], ["test_that_cancels_nothing", "test_another"]), done.stdout
    assert "Signal (11) received." in done.stdout


END_THEIR_SERVER = """
import os, signal
import pytest
from harness.server import Server

pids = []

@pytest.fixture(scope="module")
def server():
    with Server(os.environ["REPOSITORY"]) as server:
        yield server

def end(server):
    os.kill(server.pid, signal.SIGSEGV)
    while True:
        server.is_ready()

def test_that_cancels_nothing(server):
    end(server)

@pytest.mark.cancelling
def test_one(server):
    pids.append(server.pid)
    if len(pids) == 1:
        end(server)
    assert server.is_ready()

def test_two(server):
    assert server.is_ready() and server.pid == pids[1] != pids[0]

@pytest.mark.cancelling
def test_another(server):
    end(server)
"""


def test_a_test_that_is_not_marked_cannot_cancel():
    assert not forgiveness.may_cancel
    with pytest.raises(AssertionError, match="pytest.mark.cancelling"):
        GrpcStream.cancel(None)


def test_a_stream_that_is_left_before_its_end_fails_a_test_that_is_not_marked(repository):
    add_synthetic(repository, "synthetic")

    async def read(max_responses):
        async with clients.grpc(server) as client:
            responses = aiter(GrpcStream(client, "synthetic", [1], stream=True, max_tokens=30))
            for _ in range(max_responses):
                if (await anext(responses)).final:
                    break
            await responses.aclose()

    server = Server(repository)
    try:
        asyncio.run(read(100))
        forgiveness.end_test()
        asyncio.run(read(3))
        with pytest.raises(AssertionError, match="1 streams were left.*pytest.mark.cancelling"):
            forgiveness.end_test()
    finally:
        # Server 2.51 may have lost the request.
        server.process.kill()
        server.process.wait()


def stream_log(num_streams, num_done, num_given=1, num_given_back=1):
    """What Triton logs of streams with a request each."""
    of_stream = "ModelStreamInferHandler"
    begun = [f'"New request handler for {of_stream}, 0"', f'"Process for {of_stream}, rpc_ok=1, context 0, 7 step READ"']
    # Reading a cancelled stream.
    none = f'"Process for {of_stream}, rpc_ok=0, context 0, 7 step READ"'
    states = "[request id: <id_unknown>] Setting state from"
    given = [f'"{states} INITIALIZED to PENDING"', f'"{states} PENDING to EXECUTING"', f'"{states} EXECUTING to EXECUTING"']
    lines = num_streams * [*begun, none] + num_given * given
    lines += num_given_back * [f'"{states} EXECUTING to RELEASED"'] + num_done * [f'"Done for {of_stream}, 0"']
    return "\n".join(lines)


def test_tritons_own_log_says_what_its_frontend_has_lost():
    assert num_lost("") == 0
    assert num_lost(stream_log(num_streams=9, num_done=18)) == 0
    assert num_lost(stream_log(num_streams=9, num_done=16)) == 2
    # The backend has one of the requests.
    assert num_lost(stream_log(num_streams=9, num_done=16, num_given=3, num_given_back=2)) == 0


@pytest.mark.complete
@pytest.mark.cancelling
def test_a_model_that_stays_is_one_of_which_triton_logs_a_loss(repository):
    """Streams that are cut off at their last response, some of which the frontend of server 2.51 loses."""
    add_synthetic(repository, "synthetic")

    async def cut_off(client):
        stream = GrpcStream(client, "synthetic", [1], stream=True, max_tokens=30)
        num_responses = 0
        async for _ in stream:
            num_responses += 1
            if num_responses == 29:
                stream.cancel()
                break

    async def main(server):
        async with clients.grpc(server) as client:
            for _ in range(10):
                await asyncio.gather(*(cut_off(client) for _ in range(10)))

    server = Server(repository)
    try:
        server.log_states(True)
        asyncio.run(main(server))
        left = server.unload_all()
        assert (left != []) == (num_lost(server.log()) > 0), server.state_of(left)
    finally:
        server.process.kill()
        server.process.wait()


class Item:
    """A test, as pytest collects it."""

    def __init__(self, path, name, mark=None, deployment=None):
        self.path, self.nodeid, self.mark = pathlib.Path(path), f"{path}::{name}", mark
        if deployment:
            self.callspec = types.SimpleNamespace(params={"deployment": deployment})

    def get_closest_marker(self, name):
        return self.mark if name == self.mark else None


class Config:
    """The options of a run."""

    def __init__(self, **options):
        self.options, self.hook = {"seed": "1", "part": 0, "share": "all", **options}, self

    def getoption(self, name):
        return self.options[name]

    def pytest_deselected(self, items):
        assert items


def test_each_test_is_in_one_tier_and_the_summary_gets_those_that_the_quick_tier_leaves_out(monkeypatch, tmp_path):
    variants = [Item(f"test_{file}.py", f"test_it[{n}]") for file in range(13) for n in range(15)]
    others = [Item("test_a.py", "test_long", "complete"), Item("test_a.py", "test_package", "shipped"), Item("test_a.py", "test_short")]
    others.append(Item("test_gpu_blocks.py", "test_on_a_gpu"))

    monkeypatch.setattr(left_out, "FILE", tmp_path / "left_out")

    def chosen(**options):
        items = variants + others
        tiers.deselect(Config(**options), items)
        return [item.nodeid for item in items]

    quick = chosen(tier="quick")
    lines = (tmp_path / "left_out").read_text().splitlines()
    reasons = collections.Counter(line.rpartition(": left out of the quick tier, ")[2] for line in lines)
    assert reasons == {"as it is marked `complete`": 1, "as it is marked `shipped`": 1, "which has one in 10 of its test's variants": 13 * 13}
    assert len(quick) == 13 * 2 + 2 and "test_a.py::test_short" in quick
    assert quick == chosen(tier="quick") != chosen(tier="quick", seed="2")
    rest = [nodeid for part in range(tiers.NUM_PARTS) for nodeid in chosen(tier="rest", part=part)]
    assert "test_a.py::test_long" in rest
    on_gpu = chosen(tier="quick", share="gpu")
    assert on_gpu == ["test_gpu_blocks.py::test_on_a_gpu"]
    halves = [chosen(tier="quick", share=share) for share in ("even", "odd")]
    assert all(halves) and sorted(sum(halves, on_gpu)) == sorted(quick)
    shipped = chosen(tier="shipped")
    assert shipped == ["test_a.py::test_package"]
    assert sorted(quick + rest) == sorted(chosen(tier="tested"))
    assert sorted(quick + rest + shipped) == sorted(chosen(tier="all")) == sorted(item.nodeid for item in variants + others)


def test_the_tests_of_a_file_have_one_deployment_in_the_quick_tier(monkeypatch, tmp_path):
    monkeypatch.setattr(left_out, "FILE", tmp_path / "left_out")
    names = [f"test_{function}[{{}}-{variant}]" for function in "abc" for variant in range(8)]
    deployments = ("iterative", "queued")
    by_deployment = [Item("test_file.py", name.format(own), deployment=own) for own in deployments for name in names]
    only_queued = Item("test_file.py", "test_d[queued]", deployment="queued")

    def chosen(seed):
        items = [*by_deployment, only_queued]
        tiers.deselect(Config(tier="quick", seed=seed), items)
        return items

    of_files = set()
    for seed in range(20):
        *others, last = chosen(str(seed))
        assert len(others) == 6 and last is only_queued
        (own,) = {item.callspec.params["deployment"] for item in others}
        of_files.add(own)
    assert of_files == set(deployments)
    assert chosen("1") == chosen("1")


TESTS = """
import threading

import pytest

def test_hangs():
    threading.Event().wait()

@pytest.mark.skipif(True, reason="no such machine")
def test_is_skipped():
    raise AssertionError

def test_passes():
    pass
"""


def test_a_test_that_hangs_fails_and_one_that_skips_itself_is_in_the_summary(tmp_path):
    (tmp_path / "conftest.py").write_text("from harness import left_out\n\npytest_runtest_logreport = left_out.logreport\n")
    (tmp_path / "test_three.py").write_text(TESTS)
    skipped = tmp_path / "skipped"
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout=1", "--rootdir", tmp_path, tmp_path]
    environment = {**os.environ, "INFLIGHT_SKIPPED_TESTS": str(skipped), "PYTHONPATH": path}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert "1 failed, 1 passed, 1 skipped" in ended.stdout and "Timeout (>1.0s)" in ended.stdout, ended.stdout
    assert skipped.read_text() == "test_three.py: test_is_skipped: no such machine\n"


def test_every_test_has_a_time_limit(pytestconfig):
    assert 0 < float(pytestconfig.getini("timeout")) <= 600
