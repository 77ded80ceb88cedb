"""Hugging Face's client, as it comes from PyPI, against the API of Text Embeddings Inference."""

import json
import os
import pathlib
import re
import subprocess

import pytest

from harness.front import Front
from harness.repository import ROOT, add_model
from harness.server import Server

pytestmark = pytest.mark.complete

FIXTURES = ROOT / "tests" / "fixtures"
SCRIPT = pathlib.Path(__file__).parent / "clients" / "huggingface_calls.py"
TEXT = "a b c"


def ask(front, task):
    """The client's view of the answers at the root of the server."""
    command = [os.environ["AIPERF_PYTHON"], SCRIPT, front.url, task, TEXT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_texts_have_vectors(repository):
    folder = FIXTURES / "embeddings/qwen3"
    add_model(repository, "m", {"task": "embed", "gpt_model_path": folder, "tokenizer_dir": folder})
    with Server(repository) as server, Front(server) as front:
        answers = ask(front, "embed")
        assert answers["raw"] == [pytest.approx(front.post("/embed", inputs=TEXT, normalize=False)[0])]
        assert answers["default"] == [pytest.approx(front.post("/embed", inputs=TEXT)[0])]
        assert answers["raw"] != answers["default"] and answers["mistake"] == 413
        (example,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/src/tei.md").read_text(), re.M | re.S)
        example = example.replace("http://localhost:9000", front.url) + "print(vector.shape)"
        command = [os.environ["AIPERF_PYTHON"], "-c", example]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.strip() == f"(1, {len(answers['raw'][0])})"


def test_texts_have_classes(repository):
    folder = FIXTURES / "classes/bert"
    add_model(repository, "m", {"task": "classify", "gpt_model_path": folder, "tokenizer_dir": folder})
    with Server(repository) as server, Front(server) as front:
        expected = [[it["label"], it["score"]] for it in front.post("/predict", inputs=TEXT)]
        assert ask(front, "classify") == expected and len(expected) == 3
