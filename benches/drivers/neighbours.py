"""What the worst requests that there are cost a neighbour: real tritonserver, the demo model, the server's own clock.

The neighbour is one stream of the demo model, a token a step. Beside it a hostile request is sent, alone and to its end;
then the neighbour goes on without it, and so in turn, round by round. From the records of the steps: how long it was from
one step's start to the next one's, while the neighbour was alone and while the hostile request was there, and how much of
it was not the model's: what the hostile request costs beyond its share of the model's work.
"""

import argparse
import asyncio
import dataclasses
import json
import pathlib
import statistics
import tempfile
import time

import rows
from harness import clients
from harness.repository import STORIES, add_model
from harness.server import Server

PROMPT = "Once upon a time"
MODEL = "stories"
MEBIBYTE = 1 << 20
# Longer than all that is measured beside it, and started again when it ends.
NEIGHBOUR_TOKENS = 900
# So long it is alone before and after each hostile request.
ALONE_S = 0.5


@dataclasses.dataclass(frozen=True)
class Hostile:
    """A request that costs as much as it can. `refusal` is what its error says, if it is refused."""

    name: str
    options: dict
    prompt: str = PROMPT
    refusal: str | None = None
    # Gives it up after this many responses.
    cancel_after: int | None = None


def conversation(num_bytes):
    """A list of messages, as JSON, of so many bytes."""
    message = {"role": "user", "content": "a fox"}
    return json.dumps([message] * (num_bytes // len(json.dumps([message]))))


LOG_PROBS = {"n": 8, "temperature": 1.0, "max_tokens": 600, "logprobs": 20, "ignore_eos": True}
HOSTILE = [
    Hostile("log-probabilities of 8 sequences, in one answer", LOG_PROBS),
    Hostile("the same, streamed in two responses", {**LOG_PROBS, "stream": True, "stream_interval": 600}),
    Hostile("the same, a response a token", {**LOG_PROBS, "stream": True}),
    Hostile(
        "generation logits, given up",
        {"n": 8, "temperature": 1.0, "max_tokens": 600, "return_generation_logits": True, "ignore_eos": True,
         "stream": True, "stream_interval": 600},
        cancel_after=1,
    ),
    Hostile(
        "8 beams streamed",
        {"beam_width": 8, "max_tokens": 300, "stream": True, "ignore_eos": True, "early_stopping": "never"},
    ),
    Hostile("24 MiB of messages", {"messages": conversation(24 * MEBIBYTE)}, prompt="", refusal="at most"),
    Hostile("1 MiB of messages, refused by the template's limits", {"messages": conversation(MEBIBYTE - 64)}, prompt="",
            refusal=""),
    Hostile("24 MiB of prompt", {}, prompt="once " * (24 * MEBIBYTE // 5), refusal="max_seq_len"),
    Hostile("the longest text that may be a prompt", {}, prompt="a fox. " * (13 * 1023 // 7), refusal="max_seq_len"),
    Hostile("65,536 allowed token ids as text", {"allowed_token_ids": json.dumps([7] * 65536), "max_tokens": 50}),
]


def gaps(records):
    """From each step's start to the next one's, and how much of it was not the model's, in milliseconds."""
    found = []
    for before, after in zip(records, records[1:]):
        gap = after["Step Start (us)"] - before["Step Start (us)"]
        found.append((gap / 1000, (gap - before["Model Duration (us)"]) / 1000))
    return found


def row_of(name, alone, beside):
    """The row of one hostile request: rounds of gaps without it and with it."""
    row = {"hostile": name}
    for what, rounds in (("without", alone), ("with", beside)):
        for i, part in enumerate(("step", "besides_model")):
            figures = [[gap[i] for gap in a_round] for a_round in rounds]
            row[f"{part}_ms_{what}"] = round(statistics.median(map(statistics.median, figures)), 3)
            row[f"{part}_ms_max_{what}"] = round(statistics.median(map(max, figures)), 3)
    row["added_ms"] = round(row["besides_model_ms_with"] - row["besides_model_ms_without"], 3)
    row["added_ms_max"] = round(row["besides_model_ms_max_with"] - row["besides_model_ms_max_without"], 3)
    return row | {"steps": sum(map(len, beside)), "rounds": len(beside)}


async def neighbour(client, started):
    """Streams one after the other, until it is cancelled."""
    while True:
        stream = clients.GrpcStream(
            client, MODEL, PROMPT, stream=True, max_tokens=NEIGHBOUR_TOKENS, ignore_eos=True, temperature=1.0
        )
        async for _ in stream:
            started.set()


async def send(client, hostile):
    """The hostile request to its end, or as far as it goes."""
    num_responses = 0
    try:
        stream = clients.GrpcStream(client, MODEL, hostile.prompt, **hostile.options)
        async for _ in stream:
            num_responses += 1
            if num_responses == hostile.cancel_after:
                stream.cancel()
                return
    except clients.Refused as refusal:
        assert hostile.refusal is not None and hostile.refusal in str(refusal), refusal
    else:
        assert hostile.refusal is None, f"{hostile.name} was not refused"


class Steps:
    """The records that a model writes of its steps."""

    def __init__(self, path):
        self.path = path
        self.offset = 0

    async def since(self):
        """Those since the last time."""
        # They are written a tenth of a second late.
        await asyncio.sleep(0.25)
        text = self.path.read_bytes()
        end = text.rindex(b"\n") + 1
        records = [json.loads(line) for line in text[self.offset : end].splitlines()]
        self.offset = end
        return records


async def measure(server, path, hostiles, num_rounds):
    """For each hostile request the rounds without it and with it."""
    steps = Steps(path)
    measured = {hostile: ([], []) for hostile in range(len(hostiles))}
    async with clients.grpc(server) as client:
        started = asyncio.Event()
        task = asyncio.create_task(neighbour(client, started))
        await started.wait()
        for _ in range(num_rounds):
            for i, hostile in enumerate(hostiles):
                await steps.since()
                await asyncio.sleep(ALONE_S)
                measured[i][0].append(gaps(await steps.since()))
                await send(client, hostile)
                # What is done behind its answer counts too.
                await asyncio.sleep(0.1)
                measured[i][1].append(gaps(await steps.since()))
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return measured


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="hostile requests whose names contain this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    hostiles = [hostile for hostile in HOSTILE if options.only is None or options.only in hostile.name]
    if not hostiles:
        parser.error(f"no hostile request is called so; there are: {', '.join(it.name for it in HOSTILE)}")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        path = folder / "steps.jsonl"
        add_model(folder / "repository", MODEL, {"stats_file": path, "max_beam_width": 8}, checkpoint=STORIES)
        with Server(folder / "repository") as server:
            measured = asyncio.run(measure(server, path, hostiles, options.rounds))
        for i, hostile in enumerate(hostiles):
            rows.show(row_of(hostile.name, *measured[i]), options.json)


if __name__ == "__main__":
    main()
