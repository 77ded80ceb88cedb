"""Properties that the harness itself must have."""

import asyncio
import contextlib
import subprocess
import threading

import grpc

from harness.server import die_with_parent


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
