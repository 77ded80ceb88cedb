"""The tokens of the synthetic runner, computed as its documentation defines them (crates/runner/src/synthetic.rs)."""

import os
import pathlib

MASK = (1 << 64) - 1
# With steps of 1 ms, an output of `ENDLESS` tokens takes longer than any test waits (`clients.TIMEOUT_S`):
# the test ends the request. The model's `max_seq_len` must be `ENDLESS_SEQ_LEN`.
ENDLESS = 250_000
ENDLESS_SEQ_LEN = 1 << 18


class Gate:
    """The total number of steps that a model may run since it was loaded: the file that `synthetic_gate` or
    the arguments of a post-processor name. A test holds requests with it until something else has
    happened."""

    def __init__(self, file, num_steps=0):
        self.file = pathlib.Path(file)
        self.allow(num_steps)

    def allow(self, num_steps):
        new = self.file.with_suffix(".new")
        new.write_text(str(num_steps))
        os.replace(new, self.file)

    def open(self):
        """Allows all steps."""
        self.file.unlink()


def _mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def continuation(prompt, num_tokens, vocab_size=32000):
    """The tokens that follow a prompt."""
    entry = 0
    tokens = []
    for token in prompt:
        entry = _mix((entry + 0x9E3779B97F4A7C15 * (token + 1)) & MASK)
    for _ in range(num_tokens):
        tokens.append(entry % vocab_size)
        entry = _mix((entry + 0x9E3779B97F4A7C15 * (tokens[-1] + 1)) & MASK)
    return tokens
