"""A comparison of batching schemes: real tritonserver, synthetic runner, one workload of mixed lengths. Rows are JSON.

A step costs what a step of the llama-160m shape does (docs/src/results-server.md): 188, 1079 and 2020 generation
tokens/s with 1, 8 and 32 streams are steps of 5.3, 7.4 and 15.8 ms; least squares gives 4.84 ms + 0.342 ms per token.
Context tokens cost the same, which is about right: the output tokens/s of the same table give 0.28 ms. All times are
divided by `--speed-up`, so that a run takes minutes.

Two loads. `closed`: enough clients to fill every batch, each of which sends its next request after its answer.
`open`: Poisson arrivals, at a share of the throughput of in-flight batching. The schemes alternate for some rounds,
and a row has the medians of its rounds, so that a busy minute of the machine does not affect a single scheme.
"""

import argparse
import asyncio
import dataclasses
import itertools
import pathlib
import random
import statistics
import sys
import tempfile
import time

import rows
from harness import clients
from harness.repository import add_synthetic
from harness.server import Server

STEP_US = 4840
TOKEN_US = 342
PROMPT_TOKENS = (32, 256)
OUTPUT_TOKENS = (16, 512)
MAX_NUM_REQUESTS = 32
# Twice the batch size: when a request ends, its successor is already waiting in the backend.
NUM_CLIENTS = 2 * MAX_NUM_REQUESTS
# Scheme and policy. Best first: the picture has them in this order.
SCHEMES = [
    ("inflight_fused_batching", "guaranteed_no_evict"),
    ("inflight_batching", "guaranteed_no_evict"),
    ("inflight_fused_batching", "static_batch"),
    ("V1", "guaranteed_no_evict"),
]
IDS = 'input [{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }]'


@dataclasses.dataclass
class Request:
    """A request's lengths, and its arrival time in seconds from the start."""

    prompt: list
    num_tokens: int
    arrival: float = 0.0


@dataclasses.dataclass
class Outcome:
    """A request's result, with times in seconds."""

    num_tokens: int
    start: float
    first: float
    end: float


def capacity(speed_up):
    """Theoretical throughput of in-flight batching with full steps, in requests per second."""
    prompt, output = statistics.mean(PROMPT_TOKENS), statistics.mean(OUTPUT_TOKENS)
    # Each step adds a token to every sequence, and computes the contexts of as many requests as end.
    tokens_per_step = MAX_NUM_REQUESTS * (1 + prompt / output)
    step_s = (STEP_US + TOKEN_US * tokens_per_step) / speed_up / 1e6
    return MAX_NUM_REQUESTS / output / step_s


def workload(seed, num_requests, requests_per_s=None):
    """The same requests for every scheme: uniform lengths; Poisson arrivals, or all at the start."""
    rng = random.Random(seed)
    arrival = 0.0
    for _ in range(num_requests):
        prompt = [rng.randrange(32000) for _ in range(rng.randint(*PROMPT_TOKENS))]
        if requests_per_s is not None:
            arrival += rng.expovariate(requests_per_s)
        yield Request(prompt, rng.randint(*OUTPUT_TOKENS), arrival)


async def ask(client, model, request, streaming):
    options = {"max_tokens": request.num_tokens, "stream": streaming, "exclude_input_in_output": True}
    num_tokens, moments = await rows.timed(client, model, request.prompt, **options)
    assert num_tokens == request.num_tokens, f"got {num_tokens} tokens instead of {request.num_tokens}"
    return Outcome(num_tokens, moments[0], moments[1], moments[-1])


async def closed(client, model, requests, streaming):
    """Each client takes the next request after its answer."""
    requests = iter(requests)

    async def one_client():
        return [await ask(client, model, request, streaming) for request in requests]

    return [*itertools.chain(*await asyncio.gather(*(one_client() for _ in range(NUM_CLIENTS))))]


async def open_loop(client, model, requests, streaming):
    """Sends each request at its arrival time."""
    start = time.perf_counter()

    async def at_its_time(request):
        await asyncio.sleep(start + request.arrival - time.perf_counter())
        return await ask(client, model, request, streaming)

    return await asyncio.gather(*map(at_its_time, requests))


def num_steps(record):
    """A record is a step, or in lockstep a batch, in which all requests have the same number of generation
    slots."""
    if "Generation Requests" in record:
        return 1
    return (record["Total Generation Tokens"] + record["Empty Generation Slots"]) / record["Scheduled Requests"]


def num_scheduled(record):
    """Requests in all steps of a record; in a batch, only those that have not ended."""
    return record["Scheduled Requests"] if "Generation Requests" in record else record["Total Generation Tokens"]


def num_generating(record):
    """Used generation slots: a request's first token comes from its context."""
    if "Generation Requests" in record:
        return record["Generation Requests"]
    return record["Total Generation Tokens"] - record["Scheduled Requests"]


def row_of(outcomes, records):
    """The figures of a round; `records` are its steps, or in lockstep its batches."""
    seconds = max(o.end for o in outcomes) - min(o.start for o in outcomes)
    first = [(o.first - o.start) * 1e3 for o in outcomes]
    whole = [(o.end - o.start) * 1e3 for o in outcomes]
    empty = sum(record.get("Empty Generation Slots", 0) for record in records)
    generating = sum(map(num_generating, records))
    return {
        "requests_per_s": len(outcomes) / seconds,
        "output_tokens_per_s": sum(o.num_tokens for o in outcomes) / seconds,
        "ttft_ms_p50": rows.percentile(first, 0.5),
        "ttft_ms_p99": rows.percentile(first, 0.99),
        "latency_ms_mean": statistics.mean(whole),
        "latency_ms_p50": rows.percentile(whole, 0.5),
        "latency_ms_p99": rows.percentile(whole, 0.99),
        "requests_per_step": sum(map(num_scheduled, records)) / sum(map(num_steps, records)),
        "empty_slot_share": empty / (empty + generating),
    }


def medians(rounds):
    """The median of each figure over the rounds."""
    return {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}


async def measure(server, path, load, scheme, model, requests):
    offset = path.stat().st_size if path.exists() else 0
    async with clients.grpc(server) as client:
        outcomes = await load(client, model, requests, scheme != "V1")
    # The last records are written after the last responses.
    await asyncio.sleep(0.2)
    return row_of(outcomes, rows.records_after(path, offset))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--speed-up", type=float, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        models = []
        for scheme, policy in SCHEMES:
            model = f"{scheme}-{policy}"
            stats_file = folder / f"{model}.jsonl"
            models.append((model, scheme, policy, stats_file))
            parameters = {
                "gpt_model_type": scheme,
                "batch_scheduler_policy": policy,
                "synthetic_step_us": STEP_US / options.speed_up,
                "synthetic_token_us": TOKEN_US / options.speed_up,
                "max_num_requests": MAX_NUM_REQUESTS,
                # Without newcomers, a batch starts with all of its prompts at once, or is small.
                "max_num_tokens": MAX_NUM_REQUESTS * PROMPT_TOKENS[1],
                "max_seq_len": PROMPT_TOKENS[1] + OUTPUT_TOKENS[1],
                "stats_file": stats_file,
            }
            add_synthetic(folder / "repository", model, parameters, fields=f"{IDS} max_batch_size: {NUM_CLIENTS}")
        loads = [
            ("closed", closed, None),
            ("open", open_loop, options.load * capacity(options.speed_up)),
        ]
        rounds = {}
        with Server(folder / "repository") as server:
            for number, (load, run, rate) in itertools.product(range(options.rounds), loads):
                for model, scheme, policy, path in models:
                    # Nothing of a prompt is in the model's cache.
                    requests = [*workload(f"{number} {load}", options.requests, rate)]
                    row = asyncio.run(measure(server, path, run, scheme, model, requests))
                    progress = f"{round(row['output_tokens_per_s'])} output tokens/s"
                    print(f"round {number + 1}, {load}, {scheme}, {policy}: {progress}", file=sys.stderr)
                    rounds.setdefault((load, rate, scheme, policy), []).append(row)
        for (load, rate, scheme, policy), figures in rounds.items():
            offered = rate and round(rate, 2)
            names = {"scheme": scheme, "policy": policy, "load": load, "offered_requests_per_s": offered}
            rows.show({**names, **medians(figures)}, True)


if __name__ == "__main__":
    main()
