"""Checkpoint files that change while a model is being loaded, and afterwards."""

import os
import shutil
import threading

import pytest

from harness.clients import generate
from harness.repository import STORIES, add_model
from harness.server import Server

PROMPT = "Once there was a fox"


@pytest.fixture
def explicit(repository):
    with Server(repository, "--model-control-mode=explicit") as server:
        yield server


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the demo model's files, outside of the model repository."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(STORIES, folder)
    return folder


def instances(count):
    return f"instance_group [{{ count: {count} kind: KIND_CPU }}]"


def story(server):
    return generate(server, "model", PROMPT, max_tokens=32).text


def test_a_truncated_file_does_not_affect_a_loaded_model_but_fails_an_added_instance(explicit, checkpoint):
    parameters = {"gpt_model_path": checkpoint}
    add_model(explicit.repository, "model", parameters, fields=instances(1))
    assert explicit.load("model") is None
    expected = story(explicit)
    weights = checkpoint / "model.safetensors"
    size = weights.stat().st_size

    # Another instance of the same files reads them again, without a new load of the model.
    add_model(explicit.repository, "model", parameters, fields=instances(2))
    assert explicit.load("model") is None
    assert explicit.log().count("TRITONBACKEND_ModelInitialize: model") <= 1

    os.truncate(weights, size // 2)
    assert story(explicit) == expected
    add_model(explicit.repository, "model", parameters, fields=instances(3))
    reason = explicit.load("model")
    assert reason is not None and str(weights) in reason, reason
    assert "has been cut short" in reason or "has been written to" in reason, reason
    assert "load the model again" in reason
    assert explicit.is_alive()
    assert story(explicit) == expected


@pytest.mark.parametrize("precision", ["auto", "int4"])
def test_a_file_may_shrink_at_any_time_during_a_load(explicit, checkpoint, precision):
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    parameters = {"gpt_model_path": checkpoint, "weight_only_precision": precision}
    add_model(explicit.repository, "model", parameters)
    done = threading.Event()

    def shrink():
        share = 0
        while not done.is_set():
            share = (share + 37) % 100
            os.truncate(weights, len(whole) * share // 100)
            weights.write_bytes(whole)

    thread = threading.Thread(target=shrink)
    thread.start()
    try:
        for _ in range(40):
            reason = explicit.load("model")
            assert reason is None or str(weights) in reason
            assert explicit.is_alive()
    finally:
        done.set()
        thread.join()
    assert explicit.load("model") is None
    assert story(explicit)
