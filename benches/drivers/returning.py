"""Time to first token of conversations that return, with and without KV cache blocks in host memory: real tritonserver.

Users take turns. When one returns with the conversation so far and a few tokens more, the others have taken its blocks:
the pool has room for one conversation and a half. Both models are measured in the same run, one after the other in each
round; the one with host memory has room there for all conversations.
"""

import argparse
import asyncio
import json
import pathlib
import random
import statistics
import tempfile

import rows
from harness import clients
from harness.repository import STORIES, add_model
from harness.server import Server

IDS = 'input [{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }]'
BLOCK = 16
# What a user says when it returns.
NUM_NEW = 16
OUTPUT = 4
MODELS = ["pool_only", "host_memory"]


def gauge(server, model, kind):
    wanted = {("model", model), ("kv_cache_block_type", kind)}
    (value,) = [value for (_, pairs), value in server.metrics().items() if wanted <= {*pairs}]
    return value


async def first_tokens_ms(client, model, conversations):
    """The times to first token of one request after the other, in milliseconds."""
    found = []
    for prompt in conversations:
        _, moments = await rows.timed(client, model, prompt, max_tokens=OUTPUT, ignore_eos=True, stream=True)
        found.append((moments[1] - moments[0]) * 1e3)
    return found


async def measure(server, vocab_size, options):
    rng = random.Random(1)
    said = lambda count: [rng.randrange(3, vocab_size) for _ in range(count)]
    times = {model: {"first": [], "again": []} for model in MODELS}
    async with clients.grpc(server) as client:
        for model in MODELS:
            await first_tokens_ms(client, model, [said(BLOCK)])
        for _ in range(options.rounds):
            first = [said(options.tokens) for _ in range(options.users)]
            again = [prompt + said(NUM_NEW) for prompt in first]
            for model in MODELS:
                times[model]["first"] += await first_tokens_ms(client, model, first)
                times[model]["again"] += await first_tokens_ms(client, model, again)
    again = {}
    for model in MODELS:
        again[model] = statistics.median(times[model]["again"])
        row = {
            "model": model,
            "users": options.users,
            "tokens": options.tokens,
            "first_turn_ttft_ms": round(statistics.median(times[model]["first"]), 2),
            "return_ttft_ms": round(again[model], 2),
            "onboarded_blocks": int(gauge(server, model, "onboarded")),
        }
        if model == MODELS[-1]:
            row["return_ttft_ratio"] = round(again[MODELS[0]] / again[model], 2)
        rows.show(row, options.json)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=pathlib.Path, default=STORIES)
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = json.loads((options.model / "config.json").read_text())
    max_seq_len = -(-(options.tokens + NUM_NEW + OUTPUT) // BLOCK) * BLOCK
    parameters = {
        "tokens_per_block": BLOCK,
        "max_seq_len": max_seq_len,
        "max_num_requests": 2,
        "max_tokens_in_paged_kv_cache": max_seq_len * 3 // 2,
    }
    # Keys and values of bf16, padded.
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * 2 * config["num_hidden_layers"] * heads * (-(-head_dim // 16) * 16)
    host_memory = {"kv_cache_host_memory_bytes": per_token * max_seq_len * options.users}
    with tempfile.TemporaryDirectory() as folder:
        repository = pathlib.Path(folder) / "repository"
        for model, more in zip(MODELS, [{}, host_memory]):
            fields = f"{IDS} max_batch_size: 2"
            add_model(repository, model, parameters | more, fields=fields, checkpoint=options.model)
        with Server(repository, "--metrics-interval-ms=50") as server:
            asyncio.run(measure(server, config["vocab_size"], options))


if __name__ == "__main__":
    main()
