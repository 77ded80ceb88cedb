"""Writes model repositories: a folder and a config.pbtxt for each model."""

import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
STORIES = ROOT / "model_repository" / "stories" / "1"
SHAPES = ROOT / "model_repository" / "shapes" / "1"


def add_model(repository, name, parameters=None, *, fields="", checkpoint=None):
    """Adds a model, or rewrites its configuration; returns the folder of its version.

    `parameters` are the backend's, `fields` is additional text of the config.pbtxt. The files of `checkpoint` are
    linked, not copied.
    """
    folder = pathlib.Path(repository) / name
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    lines = ['backend: "inflight"', fields]
    for key, value in (parameters or {}).items():
        value = json.dumps(str(value))
        lines.append(f"parameters {{ key: {json.dumps(key)} value {{ string_value: {value} }} }}")
    (folder / "config.pbtxt").write_text("\n".join(lines) + "\n")
    for file in pathlib.Path(checkpoint).iterdir() if checkpoint else ():
        (version / file.name).symlink_to(file.resolve())
    return version


def add_synthetic(repository, name, parameters=None, *, fields=""):
    """Adds a model with the synthetic runner: token ids in, token ids out, all outputs known in advance."""
    defaults = {"runner": "synthetic", "max_seq_len": 4096, "synthetic_step_us": 1000}
    return add_model(repository, name, {**defaults, **(parameters or {})}, fields=fields)


# Few and small blocks: sequences are constantly paused and computed again.
TIGHT = {
    "batch_scheduler_policy": "max_utilization",
    "max_num_requests": 24,
    "max_num_tokens": 48,
    "tokens_per_block": 4,
    "max_seq_len": 256,
    "max_tokens_in_paged_kv_cache": 640,
}

# Requests wait in Triton's own queue until the engine could start them.
QUEUED = "dynamic_batching {}"

# Iterative sequences with the strategy `oldest`, whose batcher loses slots when clients leave.
ALLOW_OLDEST = 'parameters { key: "allow_iterative_oldest" value { string_value: "true" } }'

FULL_ANSWER = "model_transaction_policy { decoupled: false }"
