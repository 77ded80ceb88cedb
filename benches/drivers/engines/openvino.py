"""OpenVINO GenAI's continuous batching, on a model exported by optimum-intel."""

import json

from . import setup
from .loads import argument, rates

EXPORT_TIMEOUT_S = 1800
RUN_TIMEOUT_S = 1800
# Our precision, and optimum's name for the weight format.
PRECISIONS = {"bf16": "fp16", "int8": "int8", "int4": "int4"}


class OpenVino:
    """One process per round; token ids in and out."""

    name = "openvino"

    def __init__(self, checkpoint, precision):
        self.python = setup.environment("openvino")
        self.weights = PRECISIONS[precision]
        self.model = setup.converted(checkpoint, f"openvino-{self.weights}", lambda folder: self.export(checkpoint, folder))
        self.precision = f"{self.weights} weights, {self.run('--describe')[-1]['precision']}"

    def export(self, checkpoint, folder):
        program = "from optimum.commands.optimum_cli import main; main()"
        arguments = ["export", "openvino", "--model", checkpoint, "--task", "text-generation-with-past"]
        arguments += ["--weight-format", self.weights, folder]
        setup.run(self.python, "-c", program, *arguments, timeout=EXPORT_TIMEOUT_S)

    def run(self, *arguments):
        script = setup.HERE / "programs/openvino_round.py"
        text = setup.run(self.python, script, self.model, *arguments, timeout=RUN_TIMEOUT_S)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def measure(self, loads):
        return rates(loads, self.run(argument(loads)))
