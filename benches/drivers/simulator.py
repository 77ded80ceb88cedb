"""The accuracy of inflight-sim: compares its predictions with a real tritonserver on the synthetic runner.

First a separate load is measured for calibration: the simulator fits its cost model to that run's statistics file,
and the part of the time to the first token that the steps do not explain is the latency between client and server.
Then each case is measured with streams through tritonclient, and predicted from its config.pbtxt and its requests.
The calibration has other lengths and another rate than the cases, and its KV cache never fills up.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import pathlib
import random
import statistics
import subprocess
import tempfile
import time

import rows
import tritonclient.grpc as grpcclient
from harness import clients
from harness.repository import add_synthetic
from harness.server import Server

# Like a model of about a billion parameters. With much shorter steps the clients would be measured, which
# share the machine's cores with the server.
# share the machine's cores with the server.
STEP_US = 16000
TOKEN_US = 80
MAX_STREAMS = 64
VOCAB_SIZE = 32000
# Clients start one after the other: the client library needs a while to open a stream.
RAMP_S = 0.01
BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """A load on a model: a closed loop of clients, or random arrivals."""

    name: str
    model: str
    num_requests: int
    clients: int | None = None
    rate: float | None = None
    input: tuple = (16, 256)
    output: tuple = (16, 128)


CALIBRATION = Case("calibration", "roomy", 150, rate=8.0, input=(8, 300), output=(24, 64))
CASES = (
    Case("8 clients", "roomy", 80, clients=8),
    Case("64 clients", "roomy", 480, clients=64),
    Case("at random moments", "roomy", 200, rate=10.0),
    Case("little KV cache, max_utilization", "tight_max_utilization", 320, clients=64),
    Case("little KV cache, guaranteed_no_evict", "tight_guaranteed_no_evict", 320, clients=64),
)
# Number of requests for measuring the speed of the simulator itself.
NUM_SIMULATED = 100_000
# A third of what the clients request at once.
TIGHT_TOKENS = MAX_STREAMS * (136 + 72) // 3


@dataclasses.dataclass
class Timing:
    """A request and its times, in seconds: sent, first token, last token."""

    input: int
    output: int
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0


async def ask(client, model, timing, rng):
    """Streams one request. Only the tokens are requested, and they are not examined: the client must keep
    up."""
    prompt = grpcclient.InferInput("input_ids", [1, timing.input], "INT32")
    prompt._raw_content = b"".join(rng.randrange(VOCAB_SIZE).to_bytes(4, "little") for _ in range(timing.input))
    done = asyncio.Event()

    async def request():
        yield {
            "model_name": model,
            "inputs": [prompt],
            "outputs": [grpcclient.InferRequestedOutput("output_ids")],
            "parameters": {"max_tokens": timing.output, "stream": True},
        }
        await done.wait()

    num_tokens = 0
    timing.sent = time.perf_counter()
    async for _, error in client.stream_infer(request()):
        if error is not None:
            raise error
        timing.last = time.perf_counter()
        timing.first = timing.first or timing.last
        num_tokens += 1
        if num_tokens == timing.output:
            done.set()
    assert num_tokens == timing.output, f"got {num_tokens} of {timing.output} tokens"


async def measure(server, case, rng):
    """Sends the requests of a case; returns their timings in sending order."""
    timings = [Timing(rng.randint(*case.input), rng.randint(*case.output)) for _ in range(case.num_requests)]
    async with clients.grpc(server) as client:
        if case.clients:
            waiting = iter(timings)

            async def one_after_the_other(number):
                await asyncio.sleep(number * RAMP_S)
                for timing in waiting:
                    await ask(client, case.model, timing, rng)

            await asyncio.gather(*map(one_after_the_other, range(case.clients)))
        else:
            moments = [0.0]
            for _ in timings[1:]:
                moments.append(moments[-1] + rng.expovariate(case.rate))
            start = time.perf_counter()

            async def at(moment, timing):
                await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
                await ask(client, case.model, timing, rng)

            await asyncio.gather(*map(at, moments, timings))
    # The last records are written after the last responses.
    await asyncio.sleep(0.2)
    return sorted(timings, key=lambda timing: timing.sent)


def measure_latency(folder, timings):
    """The one-way latency between client and server in microseconds, from the calibration."""
    name = "time_to_first_token_ms"
    without, _ = predict(folder, CALIBRATION, timings, latency_us=0.0)
    return max(0.0, (figures(timings)[name] - without[name]) * 1e3 / 2)


def figures(timings):
    """The figures that are compared."""
    tokens = sum(t.output for t in timings)
    seconds = max(t.last for t in timings) - min(t.sent for t in timings)
    return {
        "output_tokens_per_s": tokens / seconds,
        "time_to_first_token_ms": statistics.fmean(t.first - t.sent for t in timings) * 1e3,
        "time_per_output_token_ms": statistics.fmean((t.last - t.first) / (t.output - 1) for t in timings) * 1e3,
    }


def predict(folder, case, timings, latency_us):
    """The same figures from the simulator, and its whole report."""
    start = timings[0].sent
    lines = [f"{t.sent - start:.6f},{t.input},{t.output}" for t in timings]
    trace = folder / "trace.csv"
    trace.write_text("\n".join(["arrival,input,output", *lines]) + "\n")
    command = [
        os.environ["INFLIGHT_SIM"],
        f"--config={folder / 'repository' / case.model / 'config.pbtxt'}",
        f"--fit={folder / 'calibration.jsonl'}",
        f"--latency-us={latency_us}",
        f"--trace={trace}",
        "--json",
        *([f"--concurrency={case.clients}"] if case.clients else []),
    ]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["report"]
    return {
        "output_tokens_per_s": report["output_tokens_per_s"],
        "time_to_first_token_ms": report["time_to_first_token_ms"]["mean"],
        "time_per_output_token_ms": report["time_per_output_token_ms"]["mean"],
    }, report


def measure_speed(folder):
    """Simulated requests per minute, on one core."""
    command = [
        os.environ["INFLIGHT_SIM"],
        f"--config={folder / 'repository' / 'roomy' / 'config.pbtxt'}",
        f"--num-requests={NUM_SIMULATED}",
        "--rate=10",
        "--input=uniform:16..256",
        "--output=uniform:16..128",
        f"--step-us={STEP_US}",
        f"--token-us={TOKEN_US}",
    ]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return NUM_SIMULATED / (time.perf_counter() - start) * 60


def add_models(folder):
    """The models: one with all the KV cache that it can use, and two with too little."""
    common = {
        "synthetic_step_us": STEP_US,
        "synthetic_token_us": TOKEN_US,
        "max_seq_len": 512,
        "tokens_per_block": BLOCK_SIZE,
    }
    fields = f"max_batch_size: {MAX_STREAMS}"
    add = lambda name, more: add_synthetic(folder / "repository", name, {**common, **more}, fields=fields)  # noqa: E731
    add("roomy", {"stats_file": folder / "stats.jsonl"})
    for policy in ("max_utilization", "guaranteed_no_evict"):
        more = {"max_tokens_in_paged_kv_cache": TIGHT_TOKENS, "batch_scheduler_policy": policy}
        add(f"tight_{policy}", {**more, "stats_file": folder / f"{policy}.jsonl"})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        add_models(folder)
        with Server(folder / "repository") as server:
            for model in ("roomy", "tight_max_utilization", "tight_guaranteed_no_evict"):
                asyncio.run(measure(server, Case("warm-up", model, 8, clients=8), rng))
            (folder / "stats.jsonl").write_text("")
            timings = asyncio.run(measure(server, CALIBRATION, rng))
            (folder / "stats.jsonl").rename(folder / "calibration.jsonl")
            latency_us = measure_latency(folder, timings)
            for case in CASES:
                timings = asyncio.run(measure(server, case, rng))
                measured = figures(timings)
                predicted, report = predict(folder, case, timings, latency_us)
                for metric, value in measured.items():
                    row = {
                        "case": case.name,
                        "metric": metric,
                        "measured": round(value, 3),
                        "predicted": round(predicted[metric], 3),
                        "ratio": round(predicted[metric] / value, 4),
                        "predicted_pauses": report["num_pauses"],
                        "latency_us": round(latency_us, 1),
                    }
                    rows.show(row, options.json)
        rows.show({"case": "speed", "simulated_requests_per_min": round(measure_speed(folder))}, options.json)


if __name__ == "__main__":
    main()
