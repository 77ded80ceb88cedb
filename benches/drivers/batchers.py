"""Triton's two batchers under the same load: real tritonserver, synthetic runner, a 5 ms step.

`sequence` is a model with iterative sequences, `dynamic` one with `dynamic_batching`. Two measurements, in which the
models take turns in each round:

- Clients that send one request after the other: requests per second, time to first token, and the overhead of a step
  besides the model (steps.py).
- Requests that fill every place of the batch, alone and while more clients wait: the time from the start of a step to
  the start of the next.
"""

import argparse
import asyncio
import itertools
import pathlib
import statistics
import tempfile

import rows
from harness import clients
from harness.repository import QUEUED, add_synthetic
from harness.server import Server, num_pending
from harness.synthetic import ENDLESS, ENDLESS_SEQ_LEN
from steps import STEP_US, overheads_of

MODELS = {"sequence": "", "dynamic": QUEUED}
# Places in the batch: 32 clients have one each, and of 256 clients most wait.
NUM_PLACES = 64
NUM_REQUESTS = 8
OUTPUT = 32
# For the running requests beside waiting ones.
NUM_RUNNING = 8
SECONDS = 3.0


def size_of(path):
    return path.stat().st_size if path.exists() else 0


async def one_after_the_other(client, model, number):
    """The moments of each response of a client's requests."""
    options = {"max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
    prompts = [[number + 1, n + 1] for n in range(NUM_REQUESTS)]
    return [(await rows.timed(client, model, prompt, **options))[1] for prompt in prompts]


async def under_load(server, path, model, num_clients):
    """One round: requests per second, times to first token in ms, and overheads of steps in us."""
    offset = size_of(path)
    async with clients.grpc(server) as client:
        each = (one_after_the_other(client, model, number) for number in range(num_clients))
        requests = [moments for of_client in await asyncio.gather(*each) for moments in of_client]
    # The last records are written after the last responses.
    await asyncio.sleep(0.2)
    seconds = max(moments[-1] for moments in requests) - min(moments[0] for moments in requests)
    full = min(num_clients, NUM_PLACES)
    records = rows.records_after(path, offset)
    runs = itertools.groupby(records, key=lambda record: record["Scheduled Requests"] == full)
    overheads = [time for is_full, run in runs if is_full for time in overheads_of(list(run))]
    return {
        "requests_per_s": len(requests) / seconds,
        "first_token_ms": [1e3 * (moments[1] - moments[0]) for moments in requests],
        "overhead_us": statistics.median(overheads),
    }


def row_of_load(model, num_clients, rounds, others):
    """The row of one model; each of its `rounds` has a round of the other model beside it."""
    ratio = lambda name: statistics.median(it[name] / other[name] for it, other in zip(rounds, others))
    first = [rows.percentile(it["first_token_ms"], share) for share in (0.5, 0.99) for it in rounds]
    return {
        "batcher": model,
        "clients": num_clients,
        "requests_per_s": round(statistics.median(it["requests_per_s"] for it in rounds), 1),
        "first_token_ms_p50": round(statistics.median(first[: len(rounds)]), 2),
        "first_token_ms_p99": round(statistics.median(first[len(rounds) :]), 2),
        "overhead_us_per_step": round(statistics.median(it["overhead_us"] for it in rounds), 1),
        "requests_ratio": round(ratio("requests_per_s"), 3),
        "overhead_ratio": round(ratio("overhead_us"), 2),
    }


async def pending(server, model, is_reached):
    """Waits until as many requests wait in Triton."""
    async with asyncio.timeout(clients.TIMEOUT_S):
        while not is_reached(await asyncio.to_thread(num_pending, server, model)):
            await asyncio.sleep(0.2)


async def beside_waiting(server, path, model, num_waiting):
    """One round: the median times of a step in us, without the waiting clients and with them."""

    async def step_us():
        offset = size_of(path)
        await asyncio.sleep(SECONDS)
        starts = [record["Step Start (us)"] for record in rows.records_after(path, offset)]
        return statistics.median(after - before for before, after in itertools.pairwise(starts))

    options = {"ignore_eos": True, "stream": True, "stream_interval": 1000}
    async with clients.grpc(server) as running, clients.grpc(server) as waiting:
        tasks = [
            asyncio.create_task(rows.timed(running, model, [n + 1], max_tokens=ENDLESS, **options))
            for n in range(NUM_RUNNING)
        ]
        await asyncio.sleep(1.0)
        alone = await step_us()
        tasks += [
            asyncio.create_task(rows.timed(waiting, model, [n + 100], max_tokens=OUTPUT, **options))
            for n in range(num_waiting)
        ]
        # A few may have been passed on to the backend already.
        await pending(server, model, lambda count: count >= 0.95 * num_waiting)
        beside = await step_us()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pending(server, model, lambda count: count == 0)
    return alone, beside


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", default="32,256")
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for model, fields in MODELS.items():
            for name, num_places in ((model, NUM_PLACES), (f"{model}_full", NUM_RUNNING)):
                parameters = {
                    "synthetic_step_us": STEP_US,
                    "stats_file": folder / f"{name}.jsonl",
                    "max_seq_len": ENDLESS_SEQ_LEN,
                }
                size = f"{fields} max_batch_size: {num_places}"
                add_synthetic(folder / "repository", name, parameters, fields=size)
        with Server(folder / "repository") as server:
            for num_clients in map(int, options.clients.split(",")):
                measured = {model: [] for model in MODELS}
                for _ in range(options.rounds):
                    for model in MODELS:
                        path = folder / f"{model}.jsonl"
                        measured[model].append(asyncio.run(under_load(server, path, model, num_clients)))
                for model in MODELS:
                    others = measured["sequence"]
                    rows.show(row_of_load(model, num_clients, measured[model], others), options.json)
            for model in MODELS:
                name = f"{model}_full"
                path = folder / f"{name}.jsonl"
                rounds = [
                    asyncio.run(beside_waiting(server, path, name, options.waiting)) for _ in range(options.rounds)
                ]
                row = {
                    "batcher": model,
                    "running": NUM_RUNNING,
                    "waiting": options.waiting,
                    "step_us_alone": round(statistics.median(alone for alone, _ in rounds), 1),
                    "step_us_beside_waiting": round(statistics.median(beside for _, beside in rounds), 1),
                    "ratio": round(statistics.median(beside / alone for alone, beside in rounds), 4),
                }
                rows.show(row, options.json)


if __name__ == "__main__":
    main()
