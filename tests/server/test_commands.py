"""The commands that users type: `cargo xtask serve`, and the installation with cmake."""

import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from harness.clients import GenerateStream, generate
from harness.repository import ROOT, add_synthetic
from harness.server import Server, free_ports
from harness.synthetic import continuation

pytestmark = pytest.mark.shipped


class Serve:
    """A running `cargo xtask serve`."""

    def __init__(self, *arguments, grpc_port=None):
        self.http_port, free_port, metrics_port, self.openai_port = free_ports(4)
        grpc_port = grpc_port or free_port
        ports = [f"--http-port={self.http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}", f"--openai-port={self.openai_port}"]
        self.process = subprocess.Popen(
            ["cargo", "xtask", "serve", *ports, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._errors = []
        self._reader = threading.Thread(target=lambda: self._errors.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def wait_ready(self):
        line = self.process.stdout.readline()
        assert line == f"ready http://127.0.0.1:{self.http_port}\n", self.wait()[1]
        return self

    def wait(self):
        """The exit status, and all of standard error."""
        status = self.process.wait(120)
        self._reader.join()
        return status, "".join(self._errors)

    def server_pids(self):
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 2, "tritonserver, and the server with OpenAI's API"
        return [int(pid) for pid in children]

    # The part of a server's interface that harness.clients needs.
    http = Server.http


@pytest.fixture
def serve():
    started = []

    def start(*arguments, **ports):
        started.append(Serve(*arguments, **ports))
        return started[-1]

    yield start
    for serve in started:
        if serve.process.poll() is None:
            serve.process.kill()
        serve.process.wait()


def test_serve_answers_requests_to_the_demo_model_as_soon_as_it_is_ready(serve):
    served = serve().wait_ready()
    assert generate(served, "stories", "Once upon a time", max_tokens=10).text.startswith("Once upon a time")
    messages = [{"role": "user", "content": "Tell me a story."}]
    body = json.dumps({"model": "stories", "messages": messages, "max_tokens": 10})
    status, answer = served.http("POST", "/v1/chat/completions", body, port=served.openai_port)
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 10
    # Its steps can be seen, without any setting.
    connection = http.client.HTTPConnection("127.0.0.1", served.openai_port, timeout=60)
    connection.request("GET", "/live")
    events = (json.loads(line.removeprefix(b"data: ")) for line in connection.getresponse() if line.startswith(b"data: "))
    assert next(events) == {"models": ["shapes", "stories"]}
    generate(served, "stories", "Once upon a time", max_tokens=10)
    seen = next(events)
    assert seen["model"] == "stories" and seen["steps"]
    connection.close()
    served.process.send_signal(signal.SIGINT)
    status, errors = served.wait()
    assert status == 0, errors
    assert served.process.stdout.read() == "", "one line, for programs"
    assert "curl" in errors
    # The tests have built all that it runs.
    assert "Compiling" not in errors


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_serve_finishes_the_running_stream_and_exits_with_zero(serve, repository, sent):
    add_synthetic(repository, "synthetic", {"synthetic_step_us": 5000})
    served = serve(f"--model-repository={repository}").wait_ready()
    tokens = []
    for response in GenerateStream(served, "synthetic", [1], max_tokens=200, stream=True):
        if len(tokens) == 5:
            served.process.send_signal(sent)
        tokens += response.ids
    assert tokens == continuation([1], 200)
    assert served.wait()[0] == 0


def test_killing_serve_leaves_no_server_behind(serve, repository):
    add_synthetic(repository, "synthetic")
    served = serve(f"--model-repository={repository}").wait_ready()
    pids = served.server_pids()
    served.process.kill()
    deadline = time.monotonic() + 30
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_serve_prints_why_a_model_prevents_the_server_from_starting(serve, repository):
    add_synthetic(repository, "synthetic", {"max_num_token": 8})
    served = serve(f"--model-repository={repository}")
    status, log = served.wait()
    assert status != 0
    assert served.process.stdout.read() == ""
    assert "did you mean 'max_num_tokens'" in log
    assert "tritonserver exited unexpectedly" in log


def test_serve_rejects_a_port_in_use(serve):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused = serve(grpc_port=port)
        status, errors = refused.wait()
    assert status != 0
    assert f"--grpc-port {port}" in errors


def test_serve_rejects_a_missing_folder(serve):
    refused = serve("--model-repository=/nowhere")
    status, errors = refused.wait()
    assert status != 0
    assert "/nowhere" in errors


def test_cmake_builds_and_installs_a_backend_directory_that_serves(tmp_path, repository):
    cmake = pathlib.Path(sys.executable).parent / "cmake"
    build, prefix = tmp_path / "build", tmp_path / "prefix"

    # With the flags of `cargo xtask`, nothing is built that lies below target/ already.
    flags = {"CARGO_ENCODED_RUSTFLAGS": os.environ["RELEASE_RUSTFLAGS"], "CARGO_INCREMENTAL": "0"}
    environment = {**os.environ, **flags}

    def run(*arguments):
        done = subprocess.run([cmake, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    # Where MPI is missing, test_mpi.py says so.
    plugin = pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight" / "libinflight_mpi.so"
    has_mpi = plugin.exists() and shutil.which("mpicc") is not None
    options = ["-DINFLIGHT_EMBED=ON", f"-DINFLIGHT_MPI={'ON' if has_mpi else 'OFF'}"]
    run("-S", "cmake", "-B", build, f"-DCARGO_TARGET_DIR={ROOT / 'target'}", *options)
    run("--build", build)
    run("--install", build, "--prefix", prefix)
    installed = {str(p.relative_to(prefix)) for p in prefix.rglob("*") if p.is_file()}
    assert installed == {
        "backends/inflight/batchstrategy.so",
        "backends/inflight/inflight-rank",
        "backends/inflight/libtriton_inflight.so",
        "include/inflight_batch_manager.h",
        "include/inflight_logits_processor.h",
        "lib/libinflight_embed.a",
    } | ({"backends/inflight/libinflight_mpi.so"} if has_mpi else set())
    assert (prefix / "backends/inflight/batchstrategy.so").readlink() == pathlib.Path("libtriton_inflight.so")
    add_synthetic(repository, "synthetic")
    with Server(repository, backends=prefix / "backends") as server:
        assert generate(server, "synthetic", [7], max_tokens=3).ids[-3:] == continuation([7], 3)
