"""What a step costs besides the model: real tritonserver, synthetic runner, a 5 ms step.

The server's own clock is used: the backend writes every step's start and the model's share of it to its
statistics file. A step's overhead is the time to the next step's start, less the model: it holds Triton's
batcher, the driver, and whatever the responder and the client take from the two on a busy machine. The part
of it inside Execute is shown besides: the rest is Triton's, between two calls.
"""

import argparse
import asyncio
import pathlib
import statistics
import tempfile

import rows
from harness import clients
from harness.repository import add_synthetic
from harness.server import Server

STEP_US = 5000
NUM_TOKENS = 200
OLDEST = (
    "model_transaction_policy { decoupled: true } sequence_batching { iterative_sequence: true "
    "max_sequence_idle_microseconds: 3600000000 oldest { max_candidate_sequences: 256 } }"
)


def row_of(records, streams, seconds):
    """The steps from the first to the last that carried every stream: the steady state."""
    full = [i for i, record in enumerate(records) if record["Scheduled Requests"] == streams]
    if len(full) < 2:
        return {"full_step_share": 0.0, "steps": len(records)}
    steady = records[full[0] : full[-1] + 1]
    overheads = [
        after["Step Start (us)"] - before["Step Start (us)"] - before["Model Duration (us)"]
        for before, after in zip(steady, steady[1:])
    ]
    inside = [record["Step Duration (us)"] - record["Model Duration (us)"] for record in steady[:-1]]
    overhead = statistics.median(overheads)
    return {
        "full_step_share": round(len(full) / len(steady), 4),
        "overhead_us_per_step": round(overhead, 1),
        "overhead_us_p90": round(rows.percentile(overheads, 0.9), 1),
        "inside_execute_us": round(statistics.median(inside), 1),
        "overhead_us_per_sequence": round(overhead / streams, 2),
        "overhead_share_of_step": round(overhead / STEP_US, 4),
        "steps": len(steady),
        "seconds": round(seconds, 2),
    }


async def measure(server, path, strategy, streams, interval, as_json):
    """`interval` is a stream's; none is an answer in one piece."""
    offset = path.stat().st_size if path.exists() else 0
    prompts = [[n, n + 1, n + 2] for n in range(streams)]
    streaming = {"stream": interval is not None, "stream_interval": interval or 1}
    async with clients.grpc(server) as client:
        answers = await rows.at_once(
            client, strategy, prompts, max_tokens=NUM_TOKENS, exclude_input_in_output=True, **streaming
        )
    # The last records are written behind the last responses.
    await asyncio.sleep(0.2)
    seconds = max(m[-1] for _, m in answers) - min(m[0] for _, m in answers)
    num_responses = sum(len(moments) - 1 for _, moments in answers)
    rows.show(
        {
            "strategy": strategy,
            "streams": streams,
            "streaming": interval is not None,
            "stream_interval": interval,
            **row_of(rows.records_after(path, offset), streams, seconds),
            "responses_per_s": round(num_responses / seconds, 1),
        },
        as_json,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", default="1,8,32,128,256")
    parser.add_argument("--stream-interval", default="1")
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
        with Server(folder / "repository") as server:
            for strategy in ("direct", "oldest"):
                for interval in (None, *map(int, options.stream_interval.split(","))):
                    for streams in map(int, options.streams.split(",")):
                        path = folder / f"{strategy}.jsonl"
                        asyncio.run(measure(server, path, strategy, streams, interval, options.json))


if __name__ == "__main__":
    main()
