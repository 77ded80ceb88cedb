"""Starts a real tritonserver on free ports, and stops it."""

import asyncio
import contextlib
import ctypes
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import warnings
import weakref

from harness import cancelling
from harness.processes import processes

PR_SET_PDEATHSIG = 1
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60
# How long new threads of a server get until they sleep.
THREAD_START_TIMEOUT_S = 5
# How long the backend waits until it frees the resources of an idle model that Triton does not finalize, and a time
# beyond that.
RESOURCES_TIMEOUT_S = 5
UNLOAD_TIMEOUT_S = 15
# How long streams and requests that a test has left get to end.
STATES_TIMEOUT_S = 2
# What the backend logs then. It holds no request of the model.
KEPT_BY_TRITON = "Triton still keeps it"
# How long a server that dies takes to be gone, and lines of its log in a message.
DEATH_TIMEOUT_S = 1
MAX_DEATH_LINES = 16
# Those that have been started and not stopped.
running = weakref.WeakSet()


def free_ports(count):
    """Unused ports of 127.0.0.1; found together, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def die_with_parent():
    """In the child: no server outlives a killed test run."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class ServerDied(Exception):
    """The server exited unexpectedly; the text is the end of its log."""


class FrontendDied(ServerDied):
    """Triton's frontends crashed for the first time in this run, and in a test that cancels streams: server 2.51 rarely
    does so then (docs/src/limitations.md). The test is run again."""


class Server:
    """A running tritonserver. As a context manager it must exit cleanly, or the block fails; except that server 2.51
    rarely loses a request whose client leaves, never unloads its model, and exits with an error for that reason.

    With `mpi_ranks`, `mpirun` starts it as rank 0 of so many processes, and `process` is mpirun. The others are
    processes of `second_host` if there is one. With `launch`, `process` is the command that it makes of the server's.
    """

    def __init__(
        self,
        repository,
        *arguments,
        backends=None,
        cwd=None,
        environment=None,
        mpi_ranks=None,
        second_host=None,
        launch=None,
    ):
        self.repository = pathlib.Path(repository)
        # Without model control, the server does not load or unload models on request.
        self.polls = "--model-control-mode=poll" in arguments
        self.log_path = self.repository.parent / f"{self.repository.name}.log"
        if not any(argument.startswith("--model-control-mode") for argument in arguments):
            # All models are loaded, as without model control, and can be unloaded individually.
            arguments = ("--model-control-mode=explicit", "--load-model=*", *arguments)
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        command = [
            os.environ["TRITONSERVER"],
            f"--model-repository={repository}",
            f"--backend-directory={backends or os.environ['TRITON_BACKENDS']}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            *(f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")),
            *arguments,
        ]
        if mpi_ranks is not None:
            program = pathlib.Path(backends or os.environ["TRITON_BACKENDS"]) / "inflight" / "inflight-rank"
            of_all, of_server, of_others = ["--mca", "btl", "self,vader"], [], []
            if second_host is not None:
                of_all, of_server, of_others = second_host.mpirun_arguments()
            mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", *of_all]
            others = ["-n", str(mpi_ranks - 1), *of_others, program, "--mpi"]
            command = [*mpirun, "-n", "1", *of_server, *command, ":", *others]
        if launch is not None:
            command = launch(command)
        self.is_under_mpirun = mpi_ranks is not None
        self.command, self.cwd, self.environment = command, cwd, {**os.environ, **(environment or {})}
        self.start()

    def start(self):
        """Starts the server; also one that has died, again."""
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.cwd,
                env=self.environment,
                preexec_fn=die_with_parent,
            )
        self._wait_ready()
        self.has_new_threads = True
        # Where in the log the states begin that are logged now.
        self.states_start = 0
        running.add(self)
        if cancelling.forgiveness.is_watched:
            self.log_states(True)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if kind is None:
            left = self.unload_all()
            if left and (num_lost := self.num_lost(left)):
                warnings.warn(f"Triton keeps {left}: by its log, {num_lost} requests of cancelled streams", stacklevel=2)
                # It would wait for the models until its exit time-out.
                self.process.kill()
                self.process.wait()
                return
            # While its threads are still there.
            state = self.state_of(left) if left else ""
            assert self.stop() == 0, f"{state}{self.log_tail()}"
        elif not self.has_ended():
            self.process.kill()
            self.process.wait()
        elif self.process.returncode != 0:
            # Its clients only know that the connection is gone.
            raise self.death() from error

    @property
    def pid(self):
        """The process id of tritonserver. (mpirun would end all its processes within a second, requests in flight or
        not.)"""
        return self.children("tritonserver")[0] if self.is_under_mpirun else self.process.pid

    def children(self, program):
        """The process ids of the processes with this program that `process` has started, ascending."""

        def is_child(folder):
            status = (folder / "status").read_text()
            return int(status.split("PPid:")[1].split()[0]) == self.process.pid

        return processes(program, is_child)

    @property
    def grpc_url(self):
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def http_url(self):
        return f"127.0.0.1:{self.http_port}"

    def stop(self):
        """Stops the server; returns its exit status. Waits a moment if a model has just been loaded."""
        if self.process.poll() is None:
            self._wait_for_new_threads()
            os.kill(self.pid, signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def unload_all(self):
        """Unloads all models, and waits until they and the last response are gone; returns those that are left.

        Server 2.51 destroys its HTTP endpoint before it has stopped, and `/generate` gives a client its answer before
        the backend's thread has deleted the response: a server that is stopped at this moment can crash.
        """
        if self.process.poll() is not None or self.polls:
            return []
        models = [name for name, state in self.model_states().items() if state == "READY"]
        for model in models:
            self.unload(model)
        start = time.monotonic()
        while left := [name for name, state in self.model_states().items() if state in ("READY", "UNLOADING")]:
            waited_s = time.monotonic() - start
            if waited_s > UNLOAD_TIMEOUT_S or (waited_s > RESOURCES_TIMEOUT_S and self.num_lost(left)):
                break
            # The log of cancelled streams is long.
            time.sleep(0.02 if waited_s < RESOURCES_TIMEOUT_S else 0.5)
        return left

    def num_lost(self, models):
        """How many streams and requests Triton has lost, by its own log, if the backend holds nothing of these
        models."""
        log = self.log()
        return cancelling.num_lost(log) if log.count(KEPT_BY_TRITON) == len(models) else 0

    def http(self, method, path, body=None, *, port=None):
        """One HTTP exchange: returns the status and the body's bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.http_port, timeout=60)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def is_ready(self):
        """Whether the server reports that it is ready for requests."""
        return self.http("GET", "/v2/health/ready")[0] == 200

    def is_alive(self):
        """Whether the process runs and answers."""
        return self.process.poll() is None and self.http("GET", "/v2/health/live")[0] == 200

    def log_states(self, is_on):
        """Has Triton log each change of the state of a request or a stream (harness/cancelling.py), or no longer.

        The log ends with streams and requests that have ended, or have had time for that: one that is done unseen looks
        lost, and one that the backend gives back unseen looks held.
        """
        deadline = time.monotonic() + STATES_TIMEOUT_S
        while not is_on and time.monotonic() < deadline:
            if cancelling.Seen.of(self.log(self.states_start)).is_complete():
                break
            time.sleep(0.05)
        self.states_start = self.log_path.stat().st_size
        level = 1 if is_on else 0
        status, body = self.http("POST", "/v2/logging", json.dumps({"log_verbose_level": level}))
        assert status == 200, body

    def load(self, model):
        """Loads a model; returns None, or the error."""
        status, body = self.http("POST", f"/v2/repository/models/{model}/load", "{}")
        self.has_new_threads = True
        return None if status == 200 else json.loads(body)["error"]

    def unload(self, model):
        """Requests to unload a model; returns before it is unloaded. Waits a moment if a model has just been loaded."""
        self._wait_for_new_threads()
        status, body = self.http("POST", f"/v2/repository/models/{model}/unload", "{}")
        assert status == 200, body

    def model_states(self):
        """READY, LOADING, UNLOADING or UNAVAILABLE for each model; None if it was never loaded."""
        _, body = self.http("POST", "/v2/repository/index", "{}")
        return {entry["name"]: entry.get("state") for entry in json.loads(body)}

    def model_state(self, model):
        """The state of one model."""
        return self.model_states().get(model)

    def wait_for_state(self, model, state):
        """Waits until the server reports this state for the model."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self.model_state(model) != state:
            assert time.monotonic() < deadline, f"{model} is {self.model_state(model)}, not {state}"
            time.sleep(0.02)

    def model_config(self, model):
        """The configuration as completed by the server."""
        status, body = self.http("GET", f"/v2/models/{model}/config")
        assert status == 200, body
        return json.loads(body)

    def metrics(self):
        """Every sample of /metrics: (family, sorted labels) -> value."""
        deadline = time.monotonic() + 5
        while True:
            try:
                _, body = self.http("GET", "/metrics", port=self.metrics_port)
                break
            except ConnectionRefusedError:
                # Requests are served slightly before the metrics page is.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        samples = {}
        for line in body.decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                family, _, labels = name.partition("{")
                pairs = (label.partition("=") for label in labels.rstrip("}").split(",") if label)
                samples[family, tuple(sorted((k, v.strip('"')) for k, _, v in pairs))] = float(value)
        return samples

    def log(self, start=0):
        """Everything that the server has logged, from a byte on."""
        with open(self.log_path, "rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")

    def log_tail(self):
        """The end of the log, for messages, without the table of options."""
        lines = [line for line in self.log().splitlines() if not line.startswith("+--")]
        return "\n".join(lines[-50:])

    def has_ended(self):
        """Whether the server has ended, or is ending: its connections close a moment before."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DEATH_TIMEOUT_S)
        return self.process.returncode is not None

    def death(self):
        """How the server has ended, in a few lines: the frames that it prints if a signal ends it, or the end of its
        log."""
        lines = self.log_tail().splitlines()
        signals = (index for index, line in enumerate(lines) if line.startswith("Signal ("))
        last = lines[max(signals, default=-MAX_DEATH_LINES) :][:MAX_DEATH_LINES]
        text = "\n".join([f"tritonserver has ended with exit status {self.process.returncode}:", *last])
        if not cancelling.forgiveness.forgives(last):
            return ServerDied(text)
        # Of a test that passes when it runs again, nothing else is left.
        warnings.warn(text, stacklevel=2)
        return FrontendDied(text)

    def state_of(self, models):
        """Why these models may not unload, in words: what they hold, and where the server's threads wait."""
        labels = {("model", model) for model in models}
        held = [
            f"{family} {dict(found)} {value}"
            for (family, found), value in self.metrics().items()
            if value and labels & set(found) and ("request" in family or "block" in family)
        ]
        threads = [
            f"{(task / 'comm').read_text().strip()}: {(task / 'wchan').read_text()}"
            for task in sorted(pathlib.Path(f"/proc/{self.pid}/task").iterdir())
        ]
        return "\n".join([f"not unloaded: {models}", str(cancelling.Seen.of(self.log())), *held, *threads, ""])

    def _wait_for_new_threads(self):
        """Waits until each thread has been asleep once since a model was loaded.

        Server 2.51 says that a model is loaded while its threads may still be about to start or, after the warm-up, to
        wait for requests. A model that is unloaded then stays UNLOADING, or crashes the server
        (docs/src/limitations.md).
        """
        if not self.has_new_threads:
            return
        self.has_new_threads = False
        asleep, deadline = set(), time.monotonic() + THREAD_START_TIMEOUT_S
        while time.monotonic() < deadline:
            states = thread_states(self.pid)
            asleep |= {thread for thread, state in states.items() if state != "R"}
            if asleep >= states.keys():
                return
            time.sleep(0.005)

    def _wait_ready(self):
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerDied(f"exit status {self.process.returncode}\n{self.log_tail()}")
            try:
                if self.is_ready():
                    return
            except OSError:
                pass
            time.sleep(0.05)
        self.process.kill()
        self.process.wait()
        raise ServerDied(f"not ready after {START_TIMEOUT_S} s\n{self.log_tail()}")


def log_states(is_on):
    """Has all servers that run log each change of the state of a request or a stream, or no longer."""
    for server in list(running):
        # One that a test has stopped or killed does not answer.
        with contextlib.suppress(OSError):
            if server.process.poll() is None:
                server.log_states(is_on)


def thread_states(pid):
    """The state of each thread of a process by its number, as `/proc` shows it: `R` if it runs or could; none if the
    process is gone."""
    states = {}
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            states[task.name] = (task / "stat").read_text().rpartition(")")[2].split()[0]
    return states


async def until(condition):
    """Waits for a condition."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        await asyncio.sleep(0.005)


def num_pending(server, model):
    """Requests for a model that Triton has not passed on yet."""
    return server.metrics().get(("nv_inference_pending_request_count", (("model", model), ("version", "1"))), 0)


def num_requests(server, model, kind):
    """A gauge of the last step: requests that were `active`, or `waiting` inside the backend."""
    labels = {("model", model), ("request_type", kind)}
    samples = server.metrics().items()
    found = (n for (family, own), n in samples if family == "nv_trt_llm_request_metrics" and labels <= set(own))
    return next(found, None)


def assert_blocks_come_back(server, model):
    """Waits until no blocks are in use; the server refreshes its metrics periodically."""

    def num_used():
        labels = {("model", model), ("kv_cache_block_type", "used")}
        samples = server.metrics().items()
        return next(
            value
            for (family, found), value in samples
            if family == "nv_trt_llm_kv_cache_block_metrics" and labels <= set(found)
        )

    deadline = time.monotonic() + 10
    while num_used() != 0:
        assert time.monotonic() < deadline, "blocks are still in use"
        time.sleep(0.1)
