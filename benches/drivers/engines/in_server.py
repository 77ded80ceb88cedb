"""Comparison inside one tritonserver: our backend, and OpenVINO GenAI behind the Python backend, with the
same client."""

import asyncio
import dataclasses
import os
import pathlib
import random
import shutil
import sys
import tempfile

import rows
import throughput
from harness.repository import add_model
from harness.server import Server, ServerDied

from . import setup
from .openvino import OpenVino
from .programs import moments


class InServer:
    """A server with both models; the one that is not being measured is idle."""

    name = "openvino in tritonserver"

    def __init__(self, checkpoint, precision, loads):
        self.engine = OpenVino(checkpoint, precision)
        self.precision = self.engine.precision
        self.rng = random.Random(0)
        self.folder = tempfile.TemporaryDirectory()
        repository = pathlib.Path(self.folder.name) / "repository"
        longest = max(load.input + load.output for load in loads)
        fields = f"{throughput.IDS} max_batch_size: {max(load.concurrency for load in loads)}"
        parameters = {"max_seq_len": longest, "weight_only_precision": "auto" if precision == "bf16" else precision}
        add_model(repository, "ours", parameters, fields=fields, checkpoint=checkpoint)
        peer = repository / "peer"
        (peer / "1").mkdir(parents=True)
        shutil.copy(setup.HERE / "triton_openvino/config.pbtxt", peer)
        shutil.copy(setup.HERE / "triton_openvino/model.py", peer / "1")
        os.environ["PEER_MODEL"] = str(self.engine.model)
        packages = [numpy_1(self.engine.python), setup.packages(self.engine.python), setup.HERE / "programs"]
        os.environ["PEER_PACKAGES"] = os.pathsep.join(map(str, packages))
        try:
            self.server = Server(repository, backends=backends(pathlib.Path(self.folder.name)))
        except ServerDied as error:
            raise setup.Unavailable(error) from None

    def measure(self, loads):
        """One round of the peer."""
        return asyncio.run(self.measure_model("peer", loads))

    def measure_ours(self, loads):
        """One round of ours."""
        return asyncio.run(self.measure_model("ours", loads))

    def prompts(self, count, num_tokens):
        """Prompts that no earlier round has used: their keys and values would still be cached."""
        return [[self.rng.randrange(300, 1000) for _ in range(num_tokens)] for _ in range(count)]

    async def measure_model(self, model, loads):
        async def at_once(concurrency, num_input, num_output):
            prompts = self.prompts(concurrency, num_input)
            async with throughput.clients.grpc(self.server) as client:
                arguments = {"max_tokens": num_output}
                # The peer has no such options: it always does this.
                arguments |= {"ignore_eos": True, "stream": True} if model == "ours" else {}
                answers = await rows.at_once(client, model, prompts, **arguments)
            start = min(came[0] for _, came in answers)
            for count, came in answers:
                assert count == num_output == len(came) - 1, f"got {count} tokens, {len(came) - 1} responses: {model}"
            return moments.rate(num_input, [[moment - start for moment in came[1:]] for _, came in answers])

        # One-time work is not measured.
        for load in loads:
            await at_once(*moments.small(dataclasses.astuple(load)))
        return {load: await at_once(*dataclasses.astuple(load)) for load in loads}

    def stop(self):
        """Stops the server."""
        self.server.stop()
        self.folder.cleanup()


def numpy_1(python):
    """A folder with the last numpy 1: the bundle's Python backend sends no bytes of a numpy 2 array."""
    stamp = setup.requirements("numpy_1")
    arguments = ["--no-deps", "--requirement", setup.HERE / "numpy_1.txt", "--target"]
    return setup.made("numpy-1", stamp, lambda folder: setup.pip(python, *arguments, folder))


def backends(folder):
    """A backend directory with ours and the Python backend, whose stub must match our Python."""
    bundle = pathlib.Path(os.environ["TRITONSERVER"]).parents[1]
    stub = bundle / f"python_backend_stubs/{sys.version_info[0]}.{sys.version_info[1]}/triton_python_backend_stub"
    if not (bundle / "backends/python/libtriton_python.so").is_file() or not stub.is_file():
        raise setup.Unavailable(f"{bundle} has no Python backend for this Python")
    python = folder / "backends/python"
    python.mkdir(parents=True)
    for file in (bundle / "backends/python").glob("*.*"):
        (python / file.name).symlink_to(file)
    (python / stub.name).symlink_to(stub)
    (folder / "backends/inflight").symlink_to(pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight")
    return folder / "backends"
