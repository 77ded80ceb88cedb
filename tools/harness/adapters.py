"""Random LoRA adapters of the demo model, as PEFT writes them, and as TensorRT-LLM's clients send them."""

import json

import numpy

from harness import clients
from harness.repository import STORIES

RANK = 8
CONFIG = json.loads((STORIES / "config.json").read_text())
_HIDDEN, _INNER = CONFIG["hidden_size"], CONFIG["intermediate_size"]
_QUERIES = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
_KEYS = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
# Inputs and outputs of the modules that they change.
_MODULES = {
    "self_attn.q_proj": (_HIDDEN, _QUERIES),
    "self_attn.o_proj": (_QUERIES, _HIDDEN),
    "mlp.gate_proj": (_HIDDEN, _INNER),
    "mlp.down_proj": (_INNER, _HIDDEN),
}
_OTHER_MODULES = {
    "self_attn.k_proj": (_HIDDEN, _KEYS),
    "self_attn.v_proj": (_HIDDEN, _KEYS),
    "mlp.up_proj": (_HIDDEN, _INNER),
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
    write_safetensors(folder / "adapter_model.safetensors", tensors)


def adapter_rows(seed, num_extra_values=0):
    """The arrays `lora_weights` and `lora_config` of a random adapter, of which each row ends in some more zeros."""
    rng = numpy.random.default_rng(seed)
    # Those of the queries and of the projection down.
    modules = [(1, _MODULES["self_attn.q_proj"]), (6, _MODULES["mlp.down_proj"])]
    rows, config = [], []
    for layer in range(CONFIG["num_hidden_layers"]):
        for module_id, (inputs, outputs) in modules:
            a = rng.standard_normal((RANK, inputs)) / inputs**0.5
            b = rng.standard_normal((outputs, RANK)) / RANK**0.5
            rows.append(numpy.concatenate([a.reshape(-1), b.reshape(-1)]))
            config.append([module_id, layer, RANK])
    weights = numpy.zeros((len(rows), max(map(len, rows)) + num_extra_values), dtype=numpy.float16)
    for row, values in zip(weights, rows, strict=True):
        row[: len(values)] = values
    return weights, numpy.array(config, dtype=numpy.int32)


def write_rows(folder, weights, config):
    """Writes such an adapter as TensorRT-LLM's converter does."""
    folder.mkdir(parents=True)
    numpy.save(folder / "model.lora_weights.npy", weights)
    numpy.save(folder / "model.lora_config.npy", config)


def rows_inputs(prompt, weights, config, weights_type="FP16"):
    """The inputs of a request with this text, or these token ids, that brings such an adapter."""
    if isinstance(prompt, str):
        own = clients.tensor("text_input", numpy.array([[prompt.encode()]], dtype=object), "BYTES")
    else:
        own = clients.tensor("input_ids", numpy.array([prompt], dtype=numpy.int32), "INT32")
    weights = clients.tensor("lora_weights", weights[None], weights_type)
    return [own, weights, clients.tensor("lora_config", config[None], "INT32")]


def num_bytes_of_one():
    """What the weights of one of these adapters take in memory."""
    return CONFIG["num_hidden_layers"] * sum(_num_bytes(RANK, *widths) for widths in _MODULES.values())


def page_bytes(optimal_rank=8, max_rank=64):
    """A page: an adapter of the optimal rank in every module, or a module of the largest rank if that is more."""
    modules = [*_MODULES.values(), *_OTHER_MODULES.values()]
    optimal = CONFIG["num_hidden_layers"] * sum(_num_bytes(optimal_rank, *widths) for widths in modules)
    return max(optimal, *(_num_bytes(max_rank, *widths) for widths in modules))


def rows_of(num_pages):
    """The least number of rows of the narrowest module that make so many pages."""
    narrowest = min(inputs + outputs for inputs, outputs in [*_MODULES.values(), *_OTHER_MODULES.values()])
    return -(-num_pages * page_bytes() // (2 * narrowest))


def _num_bytes(rank, inputs, outputs):
    """Ranks are in panels of 16, outputs in panels of 64, and a weight has 2 bytes."""
    return 2 * (-(-rank // 16) * 16 * inputs + -(-outputs // 64) * 64 * rank)


def write_safetensors(path, tensors):
    """Writes arrays by name, as f32."""
    header, data = {}, b""
    for name, values in tensors.items():
        values = numpy.ascontiguousarray(values, dtype=numpy.float32)
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
