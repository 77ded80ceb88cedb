"""Shared by the benchmarks: rows on standard output, percentiles, timed streams."""

import asyncio
import json
import math
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from harness.clients import GrpcStream  # noqa: E402  the harness of the tests


def show(row, as_json):
    """Prints one row: a JSON object, or its values under their names."""
    if as_json:
        print(json.dumps(row), flush=True)
    else:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def percentile(values, share):
    """The smallest value that is not below this share of all values."""
    ordered = sorted(values)
    # A product that should be an integer may be slightly above it.
    rank = math.ceil(share * len(ordered) - 1e-9)
    return ordered[max(1, rank) - 1]


def records_after(path, offset):
    """The records appended to a statistics file since it was `offset` bytes long."""
    with open(path) as file:
        file.seek(offset)
        return [json.loads(line) for line in file]


async def timed(client, model, prompt, **options):
    """Runs a stream to its end; returns its number of tokens, its start time and the times of its
    responses."""
    moments = [time.perf_counter()]
    num_tokens = 0
    async for response in GrpcStream(client, model, prompt, **options):
        if response.ids:
            moments.append(time.perf_counter())
            num_tokens += len(response.ids)
    return num_tokens, moments


async def at_once(client, model, prompts, **options):
    """Runs streams of all prompts concurrently."""
    return await asyncio.gather(*(timed(client, model, prompt, **options) for prompt in prompts))
