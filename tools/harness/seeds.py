"""The seed of random tests. `cargo xtask test` takes it from the commit, except with `--all`; without it, each run has
a fresh one."""

import os
import random
import secrets

SEED = int(os.environ.get("INFLIGHT_SEED") or secrets.randbelow(1 << 32))


def rng(*names):
    """Random numbers that differ with the run's seed and with the names of the test and of its part."""
    return random.Random(f"{SEED} {names}")


def terminal_summary(terminalreporter):
    """Prints the seed at the end of the run: `INFLIGHT_SEED` runs the random tests again with it."""
    terminalreporter.write_line(f"INFLIGHT_SEED={SEED}")
