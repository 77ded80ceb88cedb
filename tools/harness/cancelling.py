"""What tests forgive Triton when clients cancel gRPC streams: server 2.51 can crash then, or lose a request (docs/src/limitations.md).

Only tests that are marked `cancelling` cancel streams. While one runs, or one that is marked `leaving`, Triton logs what becomes of
requests and streams, so that its own log says which of these it has kept.
"""

import re

SYSTEM_LIBRARIES = ("libc.so", "libstdc++.so", "libpthread.so")

# What Triton logs when the backend gets a request from a queue, and when the backend gives it back.
GIVEN = "Setting state from PENDING to EXECUTING"
GIVEN_BACK = re.compile("Setting state from EXECUTING to (?:PENDING|RELEASED)")
# What the frontend logs of a stream, and of each request that it reads from one: "Done" once for each of both.
BEGUN = re.compile(
    r"New request handler for ModelStreamInferHandler|Process for ModelStreamInferHandler, rpc_ok=1, context \d+, \d+ step READ"
)
DONE = "Done for ModelStreamInferHandler"


class Forgiveness:
    """What the test that runs may do, and what is forgiven for it. Programs that are no tests may cancel, too."""

    def __init__(self):
        self.may_cancel = True
        # Whether servers log the states.
        self.is_watched = False
        self.has_crashed = False

    def forgives(self, frames):
        """Whether a death with these frames is forgiven: the first one of the run, in a frontend, during a test that may cancel."""
        is_forgiven = self.may_cancel and not self.has_crashed and is_in_frontend(frames)
        self.has_crashed |= is_forgiven
        return is_forgiven


# Of this run.
forgiveness = Forgiveness()


def is_in_frontend(frames):
    """Whether the innermost frame that a dying server prints, behind its signal handler and the C library, is of its program: its
    frontends are linked into that, and the core and backends are libraries."""
    names = [frame.split()[-1].rpartition("/")[2] for frame in frames if re.match(r" *\d+# ", frame)]
    inner = (name for name in names[1:] if not name.startswith(SYSTEM_LIBRARIES))
    return next(inner, None) == "tritonserver"


def num_lost(log):
    """How many streams and requests the frontend has begun and not done, by the log of a server without clients. 0 if the backend has not
    given back each request that it was given: it may be the backend then that holds a model."""
    if log.count(GIVEN) != len(GIVEN_BACK.findall(log)):
        return 0
    return max(0, len(BEGUN.findall(log)) - log.count(DONE))
