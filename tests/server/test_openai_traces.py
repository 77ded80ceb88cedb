"""Traces that requests to the server with OpenAI's API belong to, and tritonserver's own traces continue."""

import http.server
import queue
import threading

import pytest

from harness.front import Front
from harness.repository import STORIES, add_model
from harness.server import Server

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
TIMEOUT_S = 60


@pytest.fixture
def collector():
    """Takes what OpenTelemetry's exporter in tritonserver sends."""
    received = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.put(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.received = received
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "path, fields",
    [
        ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "stream": True}),
    ],
)
def test_tritonservers_spans_belong_to_the_clients_trace(repository, collector, path, fields):
    add_model(repository, "stories", checkpoint=STORIES)
    url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    settings = ["mode=opentelemetry", "rate=1", "level=TIMESTAMPS", f"opentelemetry,url={url}"]
    with Server(repository, *(f"--trace-config={setting}" for setting in settings)) as server, Front(server) as front:
        with front.request("POST", path, {"model": "stories", **fields}, HEADERS) as response:
            assert response.status == 200, response.read()
            response.read()
        # Spans come in batches, in JSON or in protobuf.
        ids = [TRACE_ID.encode(), TRACE_ID.upper().encode(), bytes.fromhex(TRACE_ID)]
        while not any(id in (batch := collector.received.get(timeout=TIMEOUT_S)) for id in ids):
            pass
        assert b"InferRequest" in batch
