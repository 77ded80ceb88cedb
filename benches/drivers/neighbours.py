"""The effect of the most expensive requests on a neighbour: real tritonserver, the demo model, the server's own clock.

The neighbour is one stream, or eight of them, one token per step. Round by round, each hostile request is sent while
the neighbour runs, and after it ends the neighbour runs alone again. Measured from the step records: the time from
the start of a step to the start of the next one, which is a stream's time per output token, with and without the
hostile request, and the part of it outside of the model, which is what the hostile request costs beyond its share of
the model's work.

Prompts of a mebibyte need a model of long sequences: the synthetic runner with the demo model's tokenizer.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import pathlib
import statistics
import tempfile

import rows
from harness import clients
from harness.repository import STORIES, add_model
from harness.server import Server

PROMPT = "Once upon a time"
MODEL = "stories"
LONG_MODEL = "long"
KIBIBYTE = 1 << 10
MEBIBYTE = 1 << 20
# Longer than every measurement, and started again when it ends.
NEIGHBOUR_TOKENS = 900
# Time alone before and after each hostile request.
ALONE_S = 0.5


@dataclasses.dataclass(frozen=True)
class Hostile:
    """A request that costs as much as possible. `refusal` is a part of its error text, if it is rejected."""

    name: str
    options: dict
    prompt: str = PROMPT
    refusal: str | None = None
    # Cancel after this many responses.
    cancel_after: int | None = None
    # Number of such requests, sent one after another.
    times: int = 1
    model: str = MODEL
    num_neighbours: int = 1


def conversation(num_bytes):
    """A list of messages, as JSON, of `num_bytes` bytes."""
    message = {"role": "user", "content": "a fox"}
    return json.dumps([message] * (num_bytes // len(json.dumps([message]))))


def schema(num_properties):
    """A JSON schema of objects with many properties, each a choice of many words."""
    words = {"enum": [f"word {n} of many" for n in range(40)]}
    properties = {f"property {n}": {"type": "array", "items": words} for n in range(num_properties)}
    return json.dumps({"type": "object", "properties": properties, "additionalProperties": False})


def words(num_words, num_bytes):
    """Different words, as JSON."""
    return json.dumps([f"{n} fox and a hen ".ljust(num_bytes, "x")[:num_bytes] for n in range(num_words)])


def id_words(num_words, num_ids):
    """Different words of token ids, as JSON: the ids, and where each word ends."""
    ids = [7 + (n * num_ids + i) % 1500 for n in range(num_words) for i in range(num_ids)]
    ends = [num_ids * (n + 1) for n in range(num_words)]
    return json.dumps([ids, ends + [-1] * (len(ids) - len(ends))])


# Its outputs can be derived in more and more ways.
AMBIGUOUS = """root ::= s
s ::= [a-zA-Z ,.] | s s | s s s | "(" s ")" | t
t ::= s t | t s | s | [a-z]"""


def alike(num_alternatives):
    """A JSON schema of arrays in arrays, each of any of so many forms that are all the same."""
    form = {"$ref": "#/$defs/a"}
    alternative = {"type": "array", "items": form, "minItems": 1}
    return json.dumps({"$defs": {"a": {"anyOf": [alternative] * num_alternatives}}, **form})


VOCAB_SIZE = 1536
EIGHT = {"n": 8, "temperature": 1.0, "max_tokens": 200, "ignore_eos": True}
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
    Hostile("64 requests, each cancelled after two tokens", {"stream": True, "max_tokens": 600, "ignore_eos": True}, cancel_after=2, times=64),
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
    Hostile("a schema of 60 KiB, 8 sequences", {**EIGHT, "ignore_eos": False, "guided_json": schema(60)}),
    Hostile("an ambiguous grammar", {"guided_grammar": AMBIGUOUS, "temperature": 1.0, "seed": 3, "max_tokens": 200},
            refusal="can begin with itself"),
    Hostile("a schema of 400 alternatives that are alike", {"guided_json": alike(400), "temperature": 1.0, "seed": 3, "max_tokens": 20},
            refusal="too many combinations of alternatives"),
    Hostile("64 stop words and 64 bad words of 256 bytes, 8 sequences",
            {**EIGHT, "stop": words(64, 256), "bad_words": words(64, 256)}),
    Hostile("64 stop words and 64 bad words of 256 ids, 8 sequences",
            {**EIGHT, "stop_words_list": id_words(64, 256), "bad_words_list": id_words(64, 256)}),
    Hostile("a bias for every token, 8 sequences", {**EIGHT, "embedding_bias": json.dumps([0.25] * VOCAB_SIZE)}),
    Hostile("every way to choose among all tokens, 8 sequences",
            {**EIGHT, "typical_p": 0.99, "top_p": 0.99, "top_p_decay": 0.99, "min_p": 1e-6, "repetition_penalty": 1.1,
             "presence_penalty": 0.1, "frequency_penalty": 0.1, "no_repeat_ngram_size": 8}),
    Hostile("65,536 draft tokens as text", {"draft_input_ids": json.dumps([7] * 65536), "max_tokens": 50}),
    Hostile("64 KiB for a post-processor",
            {"logits_post_processor_name": "ban_tokens", "max_tokens": 100,
             "logits_post_processor_args": json.dumps({"tokens": [7 + n % 1500 for n in range(12_000)]})}),
    Hostile("8 beams with log-probabilities, in one answer",
            {"beam_width": 8, "max_tokens": 300, "ignore_eos": True, "early_stopping": "never", "logprobs": 20}),
    Hostile("logits of a long prompt and of 8 sequences",
            {**EIGHT, "return_context_logits": True, "return_generation_logits": True}, prompt="a fox. " * 200),
    # What client and server need for a request of a mebibyte that the backend refuses by its name.
    Hostile("1 MiB that is not read, beside 8 streams", {"no_such_option": "a fox. " * (MEBIBYTE // 7)}, model=LONG_MODEL,
            num_neighbours=8, refusal="no_such_option"),
    Hostile("1 MiB of prompt, beside 8 streams", {"max_tokens": 1}, prompt="a fox. " * (MEBIBYTE // 7),
            model=LONG_MODEL, num_neighbours=8),
    Hostile("a conversation of 128 KiB, beside 8 streams",
            {"messages": conversation(128 * KIBIBYTE), "max_tokens": 1}, prompt="", model=LONG_MODEL, num_neighbours=8),
]
# A step takes 5 ms, whatever is in it.
LONG_PARAMETERS = {
    "runner": "synthetic",
    "synthetic_step_us": 5000,
    "synthetic_vocab_size": 1536,
    "tokenizer_dir": STORIES,
    "max_seq_len": 1_000_000,
    "max_num_tokens": 16384,
}


def gaps(records):
    """For each step: the time to the next step's start, and the part of it outside of the model, in
    milliseconds."""
    found = []
    for before, after in zip(records, records[1:]):
        gap = after["Step Start (us)"] - before["Step Start (us)"]
        found.append((gap / 1000, (gap - before["Model Duration (us)"]) / 1000))
    return found


def row_of(name, alone, beside):
    """The row of one hostile request: rounds of gaps without and with it."""
    row = {"hostile": name}
    for what, rounds in (("without", alone), ("with", beside)):
        for i, part in enumerate(("step", "besides_model")):
            figures = [[gap[i] for gap in a_round] for a_round in rounds]
            row[f"{part}_ms_{what}"] = round(statistics.median(map(statistics.median, figures)), 3)
            row[f"{part}_ms_mean_{what}"] = round(statistics.median(map(statistics.mean, figures)), 3)
            row[f"{part}_ms_max_{what}"] = round(statistics.median(map(max, figures)), 3)
    row["added_ms"] = round(row["besides_model_ms_with"] - row["besides_model_ms_without"], 3)
    row["added_ms_max"] = round(row["besides_model_ms_max_with"] - row["besides_model_ms_max_without"], 3)
    return row | {"steps": sum(map(len, beside)), "rounds": len(beside)}


async def neighbour(client, model, started):
    """Streams requests one after the other until cancelled."""
    while True:
        stream = clients.GrpcStream(
            client, model, PROMPT, stream=True, max_tokens=NEIGHBOUR_TOKENS, ignore_eos=True, temperature=1.0
        )
        async for _ in stream:
            started.set()


async def send(client, hostile):
    """Sends the hostile request and reads its responses."""
    num_responses = 0
    try:
        stream = clients.GrpcStream(client, hostile.model, hostile.prompt, **hostile.options)
        async for _ in stream:
            num_responses += 1
            if num_responses == hostile.cancel_after:
                stream.cancel()
                return
    except clients.Refused as refusal:
        assert hostile.refusal is not None and hostile.refusal in str(refusal), refusal
    else:
        assert hostile.refusal is None, f"{hostile.name} was not rejected"


class Steps:
    """The step records of a model."""

    def __init__(self, path):
        self.path = path
        self.offset = 0

    async def since(self):
        """The records since the last call."""
        # They are written up to a tenth of a second late.
        await asyncio.sleep(0.25)
        text = self.path.read_bytes()
        end = text.rindex(b"\n") + 1
        records = [json.loads(line) for line in text[self.offset : end].splitlines()]
        self.offset = end
        return records


async def measure(server, steps, hostiles, num_rounds):
    """For each hostile request, the rounds without and with it. All have the same model and neighbours."""
    measured = [([], []) for _ in hostiles]
    async with clients.grpc(server) as client:
        started = [asyncio.Event() for _ in range(hostiles[0].num_neighbours)]
        tasks = [asyncio.create_task(neighbour(client, hostiles[0].model, event)) for event in started]
        for event in started:
            await event.wait()
        for _ in range(num_rounds):
            for hostile, (alone, beside) in zip(hostiles, measured):
                await steps.since()
                await asyncio.sleep(ALONE_S)
                alone.append(gaps(await steps.since()))
                for _ in range(hostile.times):
                    await send(client, hostile)
                # Work after the answer counts too.
                await asyncio.sleep(0.1)
                beside.append(gaps(await steps.since()))
        assert not any(task.done() for task in tasks), tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return measured


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="only run the hostile requests whose names contain this text")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    hostiles = [hostile for hostile in HOSTILE if options.only is None or options.only in hostile.name]
    if not hostiles:
        parser.error(f"no such hostile request; known: {', '.join(it.name for it in HOSTILE)}")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        models = {
            MODEL: ({"max_beam_width": 8}, STORIES),
            LONG_MODEL: (LONG_PARAMETERS, None),
        }
        steps = {}
        for name, (parameters, checkpoint) in models.items():
            path = folder / f"{name}.jsonl"
            steps[name] = Steps(path)
            add_model(folder / "repository", name, {"stats_file": path, **parameters}, checkpoint=checkpoint)
        with Server(folder / "repository") as server:
            same = lambda hostile: (hostile.model, hostile.num_neighbours)  # noqa: E731
            for (model, _), group in itertools.groupby(hostiles, same):
                group = list(group)
                measured = asyncio.run(measure(server, steps[model], group, options.rounds))
                for hostile, rounds in zip(group, measured):
                    rows.show(row_of(hostile.name, *rounds), options.json)


if __name__ == "__main__":
    main()
