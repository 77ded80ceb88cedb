"""What tests forgive Triton when clients cancel gRPC streams: server 2.51 can crash then, or lose a request
(docs/src/limitations.md).

Only tests that are marked `cancelling` cancel streams. While one runs, or one that is marked `leaving`, Triton logs
what becomes of requests and streams, so that its own log says which of these it has kept.
"""

import dataclasses
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
        # Streams that were left before their end without permission.
        self.num_left = 0

    def forgives(self, frames):
        """Whether a death with these frames is forgiven: the first one of the run, in a frontend, during a test that
        may cancel."""
        is_forgiven = self.may_cancel and not self.has_crashed and is_in_frontend(frames)
        self.has_crashed |= is_forgiven
        return is_forgiven

    def leaves(self):
        """A client leaves a stream before its end, which cancels the stream."""
        self.num_left += not self.may_cancel

    def end_test(self):
        """Checks that the test that ends left no stream without permission: Triton may keep its model for ever, and a
        later test fails."""
        num_left, self.num_left = self.num_left, 0
        assert num_left == 0, f"{num_left} streams were left before their end; a test that does so is marked: pytest.mark.cancelling"


# Of this run.
forgiveness = Forgiveness()


def is_in_frontend(frames):
    """Whether the innermost frame that a dying server prints, behind its signal handler and the C library, is of its
    program: its frontends are linked into that, and the core and backends are libraries."""
    names = [frame.split()[-1].rpartition("/")[2] for frame in frames if re.match(r" *\d+# ", frame)]
    inner = (name for name in names[1:] if not name.startswith(SYSTEM_LIBRARIES))
    return next(inner, None) == "tritonserver"


@dataclasses.dataclass
class Seen:
    """What a log tells of streams and requests."""

    # Requests that the backend was given, and that it has given back.
    num_given: int
    num_given_back: int
    # Streams and requests that the frontend has begun, and that it has done.
    num_begun: int
    num_done: int

    @classmethod
    def of(cls, log):
        return cls(log.count(GIVEN), len(GIVEN_BACK.findall(log)), len(BEGUN.findall(log)), log.count(DONE))

    def is_complete(self):
        """Whether everything that began has ended."""
        return self.num_given <= self.num_given_back and self.num_begun <= self.num_done


def num_lost(log):
    """How many streams and requests the frontend has begun and not done, by the log of a server without clients. 0 if
    the backend has not given back each request that it was given: it may be the backend then that holds a model."""
    seen = Seen.of(log)
    return max(0, seen.num_begun - seen.num_done) if seen.num_given == seen.num_given_back else 0
