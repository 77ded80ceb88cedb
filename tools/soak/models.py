"""The served models: both strategies and both drivers, two instances, few blocks, speculation, and one that is loaded
and unloaded."""

from contents import ADAPTERS
from harness.adapters import page_bytes, write_adapter
from harness.repository import ALLOW_OLDEST, FULL_ANSWER, QUEUED, STORIES, TIGHT, add_model, add_synthetic

IDS = 'input [{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }]'
TWO_INSTANCES = "instance_group [{ count: 2 kind: KIND_CPU }]"
OLDEST = (
    f"{ALLOW_OLDEST} sequence_batching {{ iterative_sequence: true max_sequence_idle_microseconds: 86400000000 "
    "oldest { max_candidate_sequences: 24 } }"
)
# Settings common to all models, and therefore to the reference server too.
COMMON = {
    "max_beam_width": 4,
    "max_seq_len": 256,
    "num_threads": 2,
    # Beside the repository. Half of the adapters have room.
    "lora_dir": "../../adapters",
    "lora_cache_host_memory_bytes": len(ADAPTERS) // 2 * page_bytes(),
}
BLOCKS = {"max_tokens_in_paged_kv_cache": 8192}
# Blocks for a few requests only, as many as in the tests, with as many positions per request as the other
# models.
FEW_BLOCKS = {**TIGHT, **COMMON, "max_tokens_in_paged_kv_cache": 1280}

# By input: text or ids. The decoupled models stream.
DECOUPLED = ["direct", "oldest", "guessing", "guest"]
WHOLE = ["full"]
# Those of the server with OpenAI's API: with the queued driver, too.
BEHIND_FRONT = [*DECOUPLED, "queued"]
DECOUPLED_IDS = ["ids"]
GUEST = "guest"
# The model of the reference server.
REFERENCE = "full"
# Cancelled gRPC calls sometimes make server 2.51 keep a request, and with it the model: they are only sent to
# a model that is not unloaded before the end.
CANCELLED_OVER_GRPC = "direct"


def add_models(repository):
    """Writes the models of the server under load."""
    add_adapters(repository)
    steps_of(repository).mkdir()

    def add(name, parameters, fields):
        parameters = {**parameters, "stats_file": steps_of(repository) / f"{name}.jsonl"}
        add_model(repository, name, parameters, fields=fields, checkpoint=STORIES)

    usual = {**COMMON, **BLOCKS}
    add("direct", usual, f"max_batch_size: 12 {TWO_INSTANCES}")
    add("oldest", FEW_BLOCKS, f"max_batch_size: 24 {OLDEST} {TWO_INSTANCES}")
    add("guessing", {**usual, "speculation": "prompt_lookup", "enable_trt_overlap": "true"}, "max_batch_size: 12")
    add("full", usual, f"max_batch_size: 12 {FULL_ANSWER}")
    add("queued", usual, f"max_batch_size: 12 {QUEUED}")
    add_guest(repository, 0)
    steps = {"synthetic_step_us": 500, "max_seq_len": 256}
    add_synthetic(repository, "ids", steps, fields=f"max_batch_size: 12 {IDS} {TWO_INSTANCES}")


def steps_of(repository):
    """The folder of the models' records."""
    return repository.parent / "steps"


def add_adapters(repository):
    """Writes the adapters that contents name."""
    for adapter in ADAPTERS:
        folder = repository.parent / "adapters" / str(adapter)
        if not folder.exists():
            write_adapter(folder, adapter)


def add_guest(repository, version):
    """Writes the configuration of the model that is loaded and unloaded; each version differs but gives the
    same answers."""
    budget = {"max_num_tokens": 64 + 16 * (version % 3), "tokens_per_block": (16, 32)[version % 2]}
    version_folder = repository / GUEST / "1"
    checkpoint = None if version_folder.exists() else STORIES
    add_model(repository, GUEST, {**COMMON, **BLOCKS, **budget}, fields="max_batch_size: 12", checkpoint=checkpoint)


def add_reference(repository):
    """Writes the models of the reference server, which answers one request at a time, without reuse of
    earlier blocks."""
    add_adapters(repository)
    plain = {**COMMON, "enable_kv_cache_reuse": "false"}
    add_model(repository, REFERENCE, plain, fields=f"max_batch_size: 12 {FULL_ANSWER}", checkpoint=STORIES)
    add_synthetic(repository, "ids", {"max_seq_len": 256, "synthetic_step_us": 0}, fields=f"max_batch_size: 12 {IDS} {FULL_ANSWER}")
