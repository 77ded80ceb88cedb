"""Requests to the server with OpenAI's API."""

import contextlib
import gzip
import http.client
import json
import re
import socket
import struct

from transport import LIMIT_S, Gone, NotEndedOnce
from whole import failure, whole

# The option SO_LINGER with which a socket that is closed sends RST instead of FIN.
RESETS = struct.pack("ii", 1, 0)


def connect(front, *, receive_buffer=None):
    """A connection. With a `receive_buffer` as small as the system allows, a slow reader blocks the front."""
    connection = http.client.HTTPConnection(front.address, timeout=LIMIT_S)
    connection.sock = socket.socket()
    if receive_buffer:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.sock.settimeout(LIMIT_S)
    host, port = front.address.split(":")
    connection.sock.connect((host, int(port)))
    return connection


def post(connection, path, fields, *, compressed=False):
    """Sends a request."""
    content = json.dumps(fields).encode()
    headers = {"Content-Type": "application/json"}
    if compressed:
        content, headers["Content-Encoding"] = gzip.compress(content), "gzip"
    connection.request("POST", path, content, headers)


def answer(connection, model):
    """The answer to the request that was sent, in the form of `whole`."""
    with _within_limit():
        response = connection.getresponse()
        content = response.read()
    if response.status != 200:
        raise refusal(response, content, model)
    return whole(json.loads(content))


def refusal(response, content, model):
    """The exception for an answer that is an error. Its text has no name of a model, so that it is the same for all."""
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        raise NotEndedOnce(f"status {response.status} with a body that is no error: {content[:300]}") from None
    if response.status in (429, 503) and error["code"] != "model_has_failed" and response.getheader("Retry-After") is None:
        raise NotEndedOnce(f"status {response.status} without Retry-After: {error}")
    return _failed(error, model, response.status)


def _failed(error, model, status=None):
    failed = failure({**error, "message": re.sub(f"'{re.escape(model)}(?=[':])", "'MODEL", error["message"])})
    failed.status = status
    failed.code = error["code"]
    return failed


@contextlib.contextmanager
def _within_limit():
    try:
        yield
    except TimeoutError:
        raise NotEndedOnce(f"the front sent nothing for {LIMIT_S} s") from None


class Stream:
    """An answer that is streamed: iterates over its chunks as they arrive."""

    def __init__(self, connection, model):
        self.model = model
        self.connection = connection
        self.is_whole = False
        with _within_limit():
            self._response = connection.getresponse()

    def __iter__(self):
        if self._response.status != 200:
            raise refusal(self._response, self._response.read(), self.model)
        with _within_limit():
            for line in self._response:
                if line == b"data: [DONE]\n":
                    self.is_whole = True
                elif self.is_whole and line.strip():
                    raise NotEndedOnce(f"a stream goes on behind its end: {line[:200]}")
                elif line.startswith(b"data: "):
                    chunk = json.loads(line.removeprefix(b"data: "))
                    if "error" in chunk:
                        raise _failed(chunk["error"], self.model)
                    yield chunk
        if not self.is_whole:
            raise Gone("a stream ended without [DONE]")


def close(connection, *, resets=False):
    """Closes a connection, unread or not."""
    if resets and connection.sock:
        with contextlib.suppress(OSError):
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
    connection.close()

