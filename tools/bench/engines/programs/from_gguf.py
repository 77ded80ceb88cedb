"""A llama's GGUF file as a bf16 checkpoint of Hugging Face's form: from_gguf.py FILE FOLDER [--off-grid].

The weights of such a file lie on a grid, and a format that has the same grid loses nothing. With --off-grid each is
moved at random, evenly, by up to half a step of the grid to either side: they are then as continuous as those of any
checkpoint, at the cost of as much error as the file has.
"""

import argparse
import json
import pathlib

import gguf
import numpy
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL = 3


def steps(weights, kind):
    """The grid's step at each weight: blocks of 32 neighbours, whose ends are ends of the grid."""
    blocks = weights.reshape(-1, 32)
    if kind == gguf.GGMLQuantizationType.Q4_1:
        step = (blocks.max(1) - blocks.min(1)) / 15
    elif kind == gguf.GGMLQuantizationType.Q8_0:
        step = abs(blocks).max(1) / 127
    else:
        raise SystemExit(f"the grid of {kind.name} is not known")
    return step.repeat(32).reshape(weights.shape)


def tensors(reader, heads, off_grid):
    """Every tensor under its name in transformers, in bf16."""
    rng = numpy.random.default_rng(1)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if off_grid and values.ndim == 2:
            values += steps(values, tensor.tensor_type) * rng.uniform(-0.5, 0.5, values.shape)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in heads:
                # llama.cpp has the pairs of a rotation beside each other, transformers half a head apart.
                pairs = values.reshape(heads[parts[2]], -1, 2, values.shape[1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            name = f"model.layers.{parts[1]}.{MODULES[parts[2]]}"
        else:
            name = WHOLE[parts[0]]
        yield f"{name}.weight", torch.from_numpy(values.copy()).to(torch.bfloat16)


def tokenizer(field):
    """SmolLM's: GPT-2's byte-level BPE, and every digit by itself."""
    if field("tokenizer.ggml.model") != "gpt2" or field("tokenizer.ggml.pre") != "smollm":
        raise SystemExit("its tokenizer is not SmolLM's")
    words, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word, kind in zip(words, kinds) if kind == CONTROL])
    return made


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--off-grid", action="store_true")
    options = parser.parse_args()
    reader = gguf.GGUFReader(options.file)

    def field(name):
        return reader.fields[name].contents()

    num_heads, num_kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    weights = dict(tensors(reader, heads, options.off_grid))
    save_file(weights, options.folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field("llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "vocab_size": len(weights["model.embed_tokens.weight"]),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }
    (options.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer(field).save(str(options.folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (options.folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
