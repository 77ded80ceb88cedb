"""The loads that every engine is measured with."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests that start together, with equal numbers of input and output tokens; one output token measures
    the prompt."""

    concurrency: int
    input: int
    output: int

    @property
    def is_prompt(self):
        return self.output == 1

    def __str__(self):
        return f"{self.concurrency}x{self.input}x{self.output}"


def argument(loads):
    """As a program's argument: `1x512x1,8x128x128`."""
    return f"--loads={','.join(map(str, loads))}"


def rates(loads, rows):
    """The rate of each load, from a program's rows, which have a load as text and its rate."""
    by_name = {row["load"]: row["rate"] for row in rows}
    return {load: by_name[str(load)] for load in loads}
