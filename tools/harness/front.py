"""Starts the server with OpenAI's API in front of a tritonserver, and speaks to it."""

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess

from harness.server import STOP_TIMEOUT_S, die_with_parent

TIMEOUT_S = 120


@dataclasses.dataclass
class Answer:
    """What an HTTP request was answered with."""

    status: int
    headers: dict
    json: object


class Front:
    """A running `inflight-openai`, which writes what it logs to the file `log`. As a context manager it must exit
    cleanly, or the block fails."""

    def __init__(self, server, *arguments, log=None):
        command = [os.environ["INFLIGHT_OPENAI"], "--port=0", f"--triton={server.grpc_url}", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=die_with_parent,
        )
        ready = self.process.stdout.readline().split()
        assert ready[:1] == ["ready"], f"exit status {self.process.wait(STOP_TIMEOUT_S)}"
        self.url = ready[1]
        self.address = self.url.partition("://")[2]

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            assert self.stop() == 0
        else:
            self.process.kill()
            self.process.wait()

    def reload(self, log):
        """Has the front read its files again. Returns what it has written to its log, which is read from `log`, until
        it has."""
        self.process.send_signal(signal.SIGHUP)
        said = []
        while "read again" not in (line := log.readline()):
            said.append(line)
        return "".join(said)

    def sent(self, data):
        """A connection on which these bytes have been sent."""
        host, port = self.address.split(":")
        connection = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        connection.sendall(data)
        return connection

    def stop(self):
        """Stops the front; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    @contextlib.contextmanager
    def request(self, method, path, body=None, headers=None):
        """The response to an HTTP request, unread. Leaving the block closes the connection."""
        connection = http.client.HTTPConnection(self.address, timeout=TIMEOUT_S)
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
        try:
            connection.request(method, path, body, headers or {})
            yield connection.getresponse()
        finally:
            connection.close()

    def call(self, method, path, body=None, headers=None):
        """One HTTP exchange, answered with JSON."""
        with self.request(method, path, body, headers) as response:
            return Answer(response.status, dict(response.headers), json.loads(response.read()))

    def post(self, path, **fields):
        """The answer to a request that is not refused."""
        answer = self.call("POST", path, fields)
        assert answer.status == 200, answer.json
        return answer.json

    def stream(self, path, **fields):
        """The events of a stream that ends as it should."""
        with self.request("POST", path, {**fields, "stream": True}) as response:
            assert response.status == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream"
            *events, last = list(events_of(response))
        assert last == "[DONE]"
        return [json.loads(event) for event in events]


def events_of(response):
    """The data of each event, as they come."""
    while line := response.readline():
        assert line.startswith(b"data: "), line
        yield line.removeprefix(b"data: ").decode().rstrip("\n")
        assert response.readline() == b"\n"


def named_events_of(response):
    """The events of a stream whose events have names, as they come."""
    while line := response.readline():
        name = line.decode().removeprefix("event: ").rstrip("\n")
        event = json.loads(response.readline().decode().removeprefix("data: "))
        assert response.readline() == b"\n"
        assert event["type"] == name
        yield event


def counts(answer):
    """The numbers of tokens in an answer's `usage`, without details such as what was in the cache."""
    return {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
