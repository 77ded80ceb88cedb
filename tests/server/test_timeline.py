"""The timeline of a real run: a real server's statistics file, drawn, in a real browser."""

import asyncio
import json
import os
import subprocess

import pytest

from harness import clients
from harness.browser import Browser
from harness.painted import STAGES, Painted
from harness.repository import add_synthetic
from harness.server import Server

pytestmark = pytest.mark.complete

# Three requests at a time; the cache cannot hold two of them to their ends.
MODEL = {
    "batch_scheduler_policy": "max_utilization",
    "enable_kv_cache_reuse": "false",
    "max_num_requests": 3,
    "max_seq_len": 40,
    "tokens_per_block": 4,
    "max_tokens_in_paged_kv_cache": 64,
    "synthetic_step_us": 3000,
}
NUM_REQUESTS, NUM_INPUT, NUM_OUTPUT = 6, 12, 25


@pytest.fixture(scope="module")
def stats_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timeline")
    add_synthetic(folder / "repository", "model", {**MODEL, "stats_file": folder / "steps.jsonl"})
    with Server(folder / "repository") as server:

        async def main():
            async with clients.grpc(server) as client:
                prompts = [[n] * NUM_INPUT for n in range(NUM_REQUESTS)]
                await asyncio.gather(*(clients.stream(client, "model", p, max_tokens=NUM_OUTPUT) for p in prompts))

        clients.run(main())
    return folder / "steps.jsonl"


def test_the_painted_timeline_matches_the_run(stats_file):
    records = [json.loads(line) for line in stats_file.read_text().splitlines()]
    shares = [
        (share["id"], record["Iteration Counter"], share["stage"], share["tokens"])
        for record in records
        for share in record["Requests"]
    ]
    assert {stage for _, _, stage, _ in shares} == {*STAGES}, "every stage occurs"
    least = NUM_REQUESTS * (NUM_INPUT + NUM_OUTPUT - 1)
    assert sum(tokens for *_, tokens in shares) > least, "paused requests were computed again"

    page = stats_file.with_suffix(".html")
    subprocess.run([os.environ["XTASK"], "timeline", stats_file, page], check=True)
    with Browser(os.environ["CHROMIUM"]) as browser:
        painted = Painted(browser, page, 1800)
    assert sorted((c.request, c.first, c.stage, c.tokens) for c in painted.cells) == sorted(shares)
    for cell in painted.cells:
        assert painted.color_of(cell.box) == painted.color_of(painted.swatches[cell.stage]), cell
    blocks = [f"{r['Used KV cache blocks']} of {r['Max KV cache blocks']} blocks" for r in records]
    assert all(used in target.title for used, target in zip(blocks, painted.targets, strict=True))
