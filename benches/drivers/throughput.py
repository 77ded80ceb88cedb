"""Output tokens per second and latencies of a checkpoint, through gRPC streams of a real tritonserver.

All requests of a row start at once, are greedy and ignore the end token. The client runs on the same machine: the
figures include its share of the CPU.
"""

import argparse
import asyncio
import json
import pathlib
import random
import tempfile

import rows
from harness import clients
from harness.repository import add_model
from harness.server import Server

IDS = 'input [{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }]'


def milliseconds(seconds):
    return round(seconds * 1e3, 2)


async def measure(server, vocab_size, concurrency, options):
    rng = random.Random(concurrency)
    prompts = [[rng.randrange(vocab_size) for _ in range(options.input)] for _ in range(concurrency)]
    arguments = {"max_tokens": options.output, "ignore_eos": True, "stream": True}
    async with clients.grpc(server) as client:
        answers = await rows.at_once(client, "model", prompts, **arguments)
    num_tokens = sum(tokens for tokens, _ in answers)
    assert num_tokens == concurrency * options.output, f"got {num_tokens} tokens"
    seconds = max(m[-1] for _, m in answers) - min(m[0] for _, m in answers)
    first = [m[1] - m[0] for _, m in answers]
    between = [(m[-1] - m[1]) / max(1, tokens - 1) for tokens, m in answers]
    # After the last first token, all requests are generating.
    decoding = max(m[-1] for _, m in answers) - max(m[1] for _, m in answers)
    rows.show(
        {
            "concurrency": concurrency,
            "output_tokens_per_s": round(num_tokens / seconds, 1),
            "generation_tokens_per_s": round(concurrency * (options.output - 1) / max(decoding, 1e-9), 1),
            "ttft_ms_p50": milliseconds(rows.percentile(first, 0.5)),
            "ttft_ms_p99": milliseconds(rows.percentile(first, 0.99)),
            "tpot_ms_p50": milliseconds(rows.percentile(between, 0.5)),
            "tpot_ms_p99": milliseconds(rows.percentile(between, 0.99)),
            "input": options.input,
            "output": options.output,
        },
        options.json,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    concurrencies = [int(count) for count in options.concurrency.split(",")]
    parameters = {"max_seq_len": options.input + options.output}
    with tempfile.TemporaryDirectory() as folder:
        repository = pathlib.Path(folder) / "repository"
        fields = f"{IDS} max_batch_size: {max(concurrencies)}"
        add_model(repository, "model", parameters, fields=fields, checkpoint=options.model)
        with Server(repository) as server:
            asyncio.run(warm_up(server, vocab_size, options.input))
            for concurrency in concurrencies:
                asyncio.run(measure(server, vocab_size, concurrency, options))


async def warm_up(server, vocab_size, num_input):
    """The first steps touch memory that later steps find mapped."""
    async with clients.grpc(server) as client:
        await rows.at_once(client, "model", [[vocab_size - 1] * num_input], max_tokens=4, stream=True)


if __name__ == "__main__":
    main()
