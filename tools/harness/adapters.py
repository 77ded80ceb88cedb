"""Random LoRA adapters of the demo model, as PEFT writes them."""

import json

import numpy

from harness.repository import STORIES

RANK = 8
CONFIG = json.loads((STORIES / "config.json").read_text())
_HIDDEN, _INNER = CONFIG["hidden_size"], CONFIG["intermediate_size"]
_QUERIES = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
# Inputs and outputs of the modules that they change.
_MODULES = {
    "self_attn.q_proj": (_HIDDEN, _QUERIES),
    "self_attn.o_proj": (_QUERIES, _HIDDEN),
    "mlp.gate_proj": (_HIDDEN, _INNER),
    "mlp.down_proj": (_INNER, _HIDDEN),
}


def write_adapter(folder, seed):
    """Writes an adapter with random weights of a magnitude that changes most answers."""
    rng = numpy.random.default_rng(seed)
    tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for module, (inputs, outputs) in _MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((RANK, inputs)) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((outputs, RANK)) / RANK**0.5
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK / 2, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    _write_safetensors(folder / "adapter_model.safetensors", tensors)


def num_bytes_of_one():
    """What one of these adapters takes in memory: ranks in panels of 16, outputs in panels of 64, 2 bytes each."""
    modules = (2 * (16 * inputs + -(-outputs // 64) * 64 * RANK) for inputs, outputs in _MODULES.values())
    return CONFIG["num_hidden_layers"] * sum(modules)


def _write_safetensors(path, tensors):
    header, data = {}, b""
    for name, values in tensors.items():
        values = numpy.ascontiguousarray(values, dtype=numpy.float32)
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
