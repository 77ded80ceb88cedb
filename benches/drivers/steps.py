"""The overhead of a step besides the model: real tritonserver, synthetic runner, a 5 ms step.

The server's own clock is used: the backend writes every step's start and the duration of its model call to the
statistics file. A step's overhead is the time to the next step's start minus the model call. It contains Triton's
batcher, the driver, and the CPU time that the responder and the client take from them on a busy machine. The part
inside Execute is printed separately; the rest is Triton's, between two calls.

The lower bound is measured in the same run: `bare` is a backend that only sleeps and reschedules (bare_backend.c).
Its rounds alternate with those of the strategies, and `ratio_to_bare` is the median over the rounds.
"""

import argparse
import asyncio
import os
import pathlib
import statistics
import subprocess
import tempfile

import rows
from harness import clients
from harness.repository import ALLOW_OLDEST, add_synthetic
from harness.server import Server

STEP_US = 5000
NUM_TOKENS = 200
OLDEST = (
    f"{ALLOW_OLDEST} model_transaction_policy {{ decoupled: true }} sequence_batching {{ iterative_sequence: true "
    "max_sequence_idle_microseconds: 3600000000 oldest { max_candidate_sequences: 256 } }"
)


BARE = """
backend: "bare" max_batch_size: 256
model_transaction_policy { decoupled: true }
sequence_batching { iterative_sequence: true max_sequence_idle_microseconds: 3600000000 direct {} }
input [{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }]
output [{ name: "output_ids" data_type: TYPE_INT32 dims: [ -1 ] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""


def steady(records, streams):
    """The steps from the first to the last that carried every stream, and the share of them that did."""
    full = [i for i, record in enumerate(records) if record["Scheduled Requests"] == streams]
    if len(full) < 2:
        return [], 0.0
    steps = records[full[0] : full[-1] + 1]
    return steps, len(full) / len(steps)


def overheads_of(steps):
    """Each step's overhead besides the model, until the next step's start."""
    return [
        after["Step Start (us)"] - before["Step Start (us)"] - before["Model Duration (us)"]
        for before, after in zip(steps, steps[1:])
    ]


def inside_execute(steps):
    return [record["Step Duration (us)"] - record["Model Duration (us)"] for record in steps[:-1]]


async def measure(server, path, model, streams, interval):
    """One round: the records of its steps, its seconds and its responses. `interval` is the stream interval;
    None for an answer in one response."""
    offset = path.stat().st_size if path.exists() else 0
    prompts = [[n, n + 1, n + 2] for n in range(streams)]
    streaming = {"stream": interval is not None, "stream_interval": interval or 1}
    async with clients.grpc(server) as client:
        answers = await rows.at_once(
            client, model, prompts, max_tokens=NUM_TOKENS, exclude_input_in_output=True, **streaming
        )
    # The last records are written after the last responses.
    await asyncio.sleep(0.2)
    seconds = max(m[-1] for _, m in answers) - min(m[0] for _, m in answers)
    num_responses = sum(len(moments) - 1 for _, moments in answers)
    return rows.records_after(path, offset), seconds, num_responses


def row_of(strategy, streams, interval, rounds, bare):
    """The row of one strategy; each of its `rounds` has a round of the bare backend beside it."""
    steps = [steady(records, streams) for records, _, _ in rounds]
    overheads = [overheads_of(of_round) for of_round, _ in steps]
    bare = [statistics.median(overheads_of(steady(records, streams)[0])) for records, _, _ in bare]
    overhead = statistics.median(map(statistics.median, overheads))
    return {
        "strategy": strategy,
        "streams": streams,
        "streaming": interval is not None,
        "stream_interval": interval,
        "full_step_share": round(statistics.mean(share for _, share in steps), 4),
        "overhead_us_per_step": round(overhead, 1),
        "overhead_us_p90": round(statistics.median(rows.percentile(it, 0.9) for it in overheads), 1),
        "inside_execute_us": round(statistics.median(statistics.median(inside_execute(it)) for it, _ in steps), 1),
        "overhead_us_per_sequence": round(overhead / streams, 2),
        "overhead_share_of_step": round(overhead / STEP_US, 4),
        "bare_us_per_step": round(statistics.median(bare), 1),
        "ratio_to_bare": round(
            statistics.median(statistics.median(it) / limit for it, limit in zip(overheads, bare)), 2
        ),
        "steps": sum(len(of_round) for of_round, _ in steps),
        "seconds": round(sum(seconds for _, seconds, _ in rounds), 2),
        "responses_per_s": round(statistics.median(count / seconds for _, seconds, count in rounds), 1),
    }


def add_bare(folder):
    """Builds the bare backend beside the real one, and its model; returns the folder of backends."""
    backends = folder / "backends"
    (backends / "bare").mkdir(parents=True)
    (backends / "inflight").symlink_to(pathlib.Path(os.environ["TRITON_BACKENDS"]).resolve() / "inflight")
    source = pathlib.Path(__file__).with_name("bare_backend.c")
    library = backends / "bare" / "libtriton_bare.so"
    subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True)
    (folder / "repository" / "bare" / "1").mkdir(parents=True)
    (folder / "repository" / "bare" / "config.pbtxt").write_text(BARE)
    os.environ |= {
        "BARE_STEP_US": str(STEP_US),
        "BARE_STEPS": str(NUM_TOKENS),
        "BARE_RECORDS": str(folder / "bare.jsonl"),
    }
    return backends


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", default="1,8,32,128,256")
    parser.add_argument("--stream-interval", default="1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for strategy, fields in (("direct", ""), ("oldest", OLDEST)):
            parameters = {
                "synthetic_step_us": STEP_US,
                "stats_file": folder / f"{strategy}.jsonl",
            }
            fields += " max_batch_size: 256"
            add_synthetic(folder / "repository", strategy, parameters, fields=fields)
        backends = add_bare(folder)
        with Server(folder / "repository", backends=backends) as server:
            intervals = (None, *map(int, options.stream_interval.split(",")))
            kinds = [("bare", None)] + [(it, interval) for interval in intervals for it in ("direct", "oldest")]
            for streams in map(int, options.streams.split(",")):
                measured = {kind: [] for kind in kinds}
                for _ in range(options.rounds):
                    for model, interval in kinds:
                        path = folder / f"{model}.jsonl"
                        measured[model, interval].append(
                            asyncio.run(measure(server, path, model, streams, interval))
                        )
                for strategy, interval in kinds[1:]:
                    rounds = measured[strategy, interval]
                    row = row_of(strategy, streams, interval, rounds, measured["bare", None])
                    rows.show(row, options.json)


if __name__ == "__main__":
    main()

