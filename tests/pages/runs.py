"""Statistics files with every stage. The stages come in any order that a request can have; whether the
requests of a step fit together is not checked, because a page draws whatever the file contains."""

import json
import random


def make_run(num_requests, num_steps, seed=1):
    """The records of a run in which request `n` arrives before request `n + 1`."""
    rng = random.Random(seed)
    shares = [[] for _ in range(num_steps)]
    for request in range(num_requests):
        step = request * num_steps // (num_requests + 1)
        longest = max(1, num_steps // 8)
        stages = ["waiting"] * rng.randint(0, longest)
        for _ in range(rng.choice([1, 1, 2])):
            stages += ["context"] * rng.randint(1, 2) + ["generation"] * rng.randint(1, 2 * longest)
            stages += ["paused"] * rng.randint(1, longest)
        while stages[-1] == "paused":
            stages.pop()
        for stage in stages[: num_steps - step]:
            tokens = {"context": rng.randint(2, 500), "generation": 1}.get(stage, 0)
            shares[step].append({"id": request, "stage": stage, "tokens": tokens})
            step += 1
    return [record(number, shares) for number, shares in enumerate(shares, 1)]


def record(step, shares):
    """A line of the file, with the fields that a page needs."""
    return {
        "Timestamp": "11-21-2026 03:15:07",
        "Iteration Counter": step,
        "Max KV cache blocks": 64,
        "Used KV cache blocks": min(64, sum(7 for share in shares if share["tokens"])),
        "Step Start (us)": step * 1000.0,
        "Step Duration (us)": 900.0,
        "Model Duration (us)": 800.0,
        "Requests": shares,
    }


def write(path, records):
    """Writes a statistics file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
