"""The operations of a layer of Llama 3.1 8B by PyTorch, in bf16, for the figures of `gpu-check` to be read beside them.

Needs a GPU and PyTorch. Prints microseconds of one call as JSON, by name and number of rows: medians of 5 rounds.
Weights take turns, so that no cache holds them. Attention is FlashAttention's and cuDNN's, over keys and values without
blocks.
"""

import json
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
CONTEXT_LEN = 1024
BATCHES = (1, 32, 128, 256)
PROMPTS = (1024, 8192)
# Outputs and inputs.
PRODUCTS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
ATTENTION = {"FlashAttention": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
# More than the cache of any GPU.
ROTATED_BYTES = 512 << 20


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def microseconds(call, num_calls):
    """The time of one of many calls of `call(index)`."""
    for index in range(5):
        call(index)
    rounds = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for index in range(num_calls):
            call(index)
        end.record()
        torch.cuda.synchronize()
        rounds.append(1e3 * start.elapsed_time(end) / num_calls)
    return round(statistics.median(rounds), 2)


def attention(figures, rows, num_sequences, num_queries, context_len, num_calls):
    queries = random(num_sequences, NUM_Q_HEADS, num_queries, HEAD_DIM)
    caches = [random(num_sequences, NUM_KV_HEADS, context_len, HEAD_DIM) for _ in range(4)]

    def call(index):
        keys, values = caches[index % 4], caches[(index + 1) % 4]
        F.scaled_dot_product_attention(queries, keys, values, is_causal=num_queries > 1, enable_gqa=True)

    for name, backend in ATTENTION.items():
        with sdpa_kernel(backend):
            figures[f"{name}, {rows}"] = microseconds(call, num_calls)


def product(figures, name, num_rows):
    num_outputs, num_inputs = PRODUCTS[name]
    num_copies = max(2, ROTATED_BYTES // (2 * num_outputs * num_inputs))
    weights = [random(num_outputs, num_inputs) for _ in range(num_copies)]
    inputs = random(num_rows, num_inputs)
    time = microseconds(lambda index: F.linear(inputs, weights[index % num_copies]), 50)
    figures[f"{name}, batch of {num_rows}"] = time


def main():
    figures = {}
    for len_ in PROMPTS:
        attention(figures, f"prompt of {len_}", 1, len_, len_, 20)
    for num_rows in BATCHES:
        attention(figures, f"batch of {num_rows}", num_rows, 1, CONTEXT_LEN, 50)
        for name in PRODUCTS:
            product(figures, name, num_rows)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
