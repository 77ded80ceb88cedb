"""Properties that the harness itself must have."""

import asyncio
import contextlib
import http.client
import os
import signal
import subprocess
import threading

import grpc
import pytest

from harness import clients
from harness.clients import in_flight
from harness.repository import add_synthetic
from harness.server import Server, die_with_parent
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


def test_a_model_that_does_not_unload_is_described_by_what_it_holds(repository):
    add_synthetic(repository, "endless", {"max_seq_len": ENDLESS_SEQ_LEN})

    async def state_while_one_is_in_flight(server):
        async with clients.grpc(server) as client, in_flight(client, "endless", [1]):
            server.unload("endless")
            return server.state_of(["endless"])

    with Server(repository) as server:
        state = asyncio.run(state_while_one_is_in_flight(server))
    assert "not unloaded" in state and "['endless']" in state
    # The gauges, and the backend's threads among those of the server.
    assert "'request_type': 'active'" in state and "inflight" in state


def test_a_failure_tells_how_the_server_has_died(repository):
    add_synthetic(repository, "synthetic")
    with pytest.raises((ConnectionError, http.client.HTTPException)) as failure, Server(repository) as server:
        os.kill(server.pid, signal.SIGSEGV)
        while True:
            server.is_ready()
    (note,) = failure.value.__notes__
    status, first, *frames = note.splitlines()
    assert "exit status -" in status and first == "Signal (11) received."
    assert any("tritonserver" in frame for frame in frames)
