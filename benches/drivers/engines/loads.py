"""What every engine is measured with."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests that start at once, each with as many tokens in and out; one token out is a prompt's measurement."""

    concurrency: int
    input: int
    output: int

    @property
    def is_prompt(self):
        return self.output == 1

    def __str__(self):
        return f"{self.concurrency}x{self.input}x{self.output}"


def argument(loads):
    """For a program: `1x512x1,8x128x128`."""
    return f"--loads={','.join(map(str, loads))}"


def rates(loads, rows):
    """Of a program's rows, which have a load's text and its rate, the rate of each load."""
    by_name = {row["load"]: row["rate"] for row in rows}
    return {load: by_name[str(load)] for load in loads}
