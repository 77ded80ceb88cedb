"""A long load from many clients, good and bad, together with operator actions, and checks of the server's invariants.

Every request ends once. Its answer is the same as when it runs alone on a second server. When all requests have
ended, gauges are zero and all blocks are free. Memory, threads and open files do not grow. A round is a period of load
followed by an idle period, when the server is checked.
"""

import argparse
import asyncio
import collections
import concurrent.futures
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import grpc  # noqa: E402  the harness configures gRPC
import harness  # noqa: E402,F401
import tritonclient.grpc.aio as grpcclient  # noqa: E402
import clients  # noqa: E402
import front_checks  # noqa: E402
import front_clients  # noqa: E402
import rude  # noqa: E402
import watch  # noqa: E402
from answers import Oracle  # noqa: E402
from bodies import bodies, costly_bodies  # noqa: E402
from contents import BY_CLIENTS, documented_options, pool  # noqa: E402
from harness.front import Front  # noqa: E402
from harness.server import Server  # noqa: E402
from models import CANCELLED_OVER_GRPC, GUEST, add_models, steps_of  # noqa: E402
from steps import Steps  # noqa: E402
from tally import Tally, show  # noqa: E402

ROUND_S = 40
# Contents per epoch, and bodies for the front: few enough to recur in other batches, while a run has many epochs and so
# many contents.
CONTENTS = 400
BODIES = 300
ROUNDS_OF_AN_EPOCH = 10
UNLOAD_LIMIT_S = 120
# The longest time from what clients see of a server's death to its end.
DEATH_LIMIT_S = 1
# Counts of requests whose clients left before the end.
ABANDONED = [
    "HTTP streams that were left",
    "HTTP requests that nobody waits for",
    "gRPC calls that were cancelled",
    "front: streams that were left",
    "front: requests that nobody waits for",
]
# More than there are clients, each of which may wait in a thread.
MAX_THREADS = 128
SERVER = ["--model-control-mode=explicit", "--load-model=*", "--metrics-interval-ms=100"]


class World:
    """State shared by all clients."""

    def __init__(self, folder, seed, round_s, cancel_every_s):
        self.repository = folder / "repository"
        self.seed = seed
        self.round_s = round_s
        self.cancel_every_s = cancel_every_s
        self.tally = Tally()
        self.contents = []
        self.bodies = []
        self.costly = []
        self.guest_version = 0
        self.next_cancellation = 0.0
        # By model: requests whose time was over in Triton's backlog, since the server started.
        self.expired = collections.Counter()
        # Set when no new requests may be sent.
        self.closing = threading.Event()
        self.server = self.front = self.grpc = self.channel = None
        # The longest time that a client without a guide waited for a token.
        self.slowest_token_s = 0.0
        self._ids = 0
        add_models(self.repository)
        self.steps = Steps(steps_of(self.repository))
        self.front_log = folder / "front.log"
        self.oracle = Oracle(folder)

    def start(self):
        """Starts the server, and OpenAI's API in front of it."""
        self.server = Server(self.repository, *SERVER)
        self.expired.clear()
        with open(self.front_log, "a") as log:
            self.front = Front(self.server, "--access-log", *front_checks.arguments(self.server), log=log)

    def draw(self, seed):
        """Draws new requests."""
        self.oracle.forget()
        self.contents = pool(seed, CONTENTS)
        self.bodies = bodies(seed, BODIES)
        self.costly = costly_bodies(seed)

    def next_id(self, count=1):
        """Unique numbers."""
        self._ids += count
        return self._ids - count

    def lost(self, how, why, *, is_fault=True):
        """Whether the cause of a failure is that the server or its front died, which is investigated once, later."""
        deadline = time.monotonic() + DEATH_LIMIT_S
        while not self.has_died():
            if time.monotonic() > deadline:
                if is_fault:
                    self.tally.finding("a connection broke", f"{how}: {why}")
                return False
            time.sleep(0.05)
        self.closing.set()
        self.tally.count("requests that a server's death took along")
        return True

    def has_died(self):
        """Whether the server or its front has ended."""
        return self.server.process.poll() is not None or self.front.process.poll() is not None

    async def pause(self, seconds):
        """Waits, but not beyond the end of the round."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.closing.is_set():
            await asyncio.sleep(0.1)


async def one_round(world, number, seconds, num_clients, is_over):
    """Load for `seconds` seconds, until each client has received its last answer."""
    world.closing.clear()
    actors = [act for act, count in rude.RUDE + front_clients.RUDE for _ in range(count)]
    polite = clients.POLITE + front_clients.POLITE
    actors += [polite[n % len(polite)] for n in range(num_clients)]

    async def client(n, act):
        rng = random.Random(f"{world.seed} {number} {n}")
        while not world.closing.is_set():
            await act(world, rng)
            await asyncio.sleep(rng.choice([0, 0, 0.05]))

    async with grpcclient.InferenceServerClient(world.server.grpc_url) as world.grpc:
        async with grpc.aio.insecure_channel(world.server.grpc_url) as world.channel:
            tasks = [asyncio.create_task(client(n, act)) for n, act in enumerate(actors)]
            deadline = time.monotonic() + seconds
            busy = False
            while time.monotonic() < deadline and not is_over.is_set() and not world.closing.is_set():
                await asyncio.sleep(0.5)
                busy = busy or await asyncio.to_thread(is_busy, world)
            world.closing.set()
            world.tally.count("rounds in which the gauges showed work", busy)
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    world.tally.finding("a client of the soak failed", repr(outcome))


def is_busy(world):
    """Whether the gauges show active requests; False while the server is stopped or gone."""
    try:
        return bool(watch.not_idle(world.server.metrics()))
    except OSError:
        return False


def look_at(world, series):
    """Checks after a round that the servers are alive and idle, or records what happened to them."""
    if world.has_died():
        look_at_death(world)
        return False
    for gauge in watch.wait_for_idle(lambda: watch.not_idle(world.server.metrics())):
        world.tally.finding("a gauge is not zero when nothing runs", gauge)
    for model, count in watch.pending(world.server.metrics()).items():
        # Counts requests in Triton, some of which cancelled calls leave behind.
        known = model == CANCELLED_OVER_GRPC and world.tally.counts["gRPC calls that were cancelled"]
        note = world.tally.tritons if known else world.tally.finding
        note("Triton counts requests as pending", f"{model}: {count}")
    of_front = front_checks.look_at_idle(world.front, world.tally, "direct")
    for text in world.steps.look():
        world.tally.finding("a step was held", text)
    series.append({**watch.figures(world.server.process.pid), **of_front})
    return True


def look_at_death(world):
    """Records why the server or its front has ended, and ends the other one."""
    front = world.front.process
    if world.server.process.poll() is None:
        world.tally.finding("the front died", f"exit status {front.returncode}\n{tail(world.front_log)}")
        world.server.process.kill()
        world.server.process.wait()
    else:
        num_cancelled = world.tally.counts["gRPC calls that were cancelled"]
        is_tritons, evidence = watch.death(world.server.log(), num_cancelled)
        note = world.tally.tritons if is_tritons else world.tally.finding
        note("the server died", f"exit status {world.server.process.returncode}\n{evidence}")
        look_at_log(world)
        front.kill()
        front.wait()


def tail(path):
    """The last lines of a file."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:])


def end_of(world):
    """Stops the front, unloads all models, and stops the server."""
    status = world.front.stop()
    if status != 0:
        world.tally.finding("the front's exit status", f"{status}\n{tail(world.front_log)}")
    models = [path.name for path in world.repository.iterdir()]
    cancelled = world.tally.counts["gRPC calls that were cancelled"]
    for model in models:
        world.server.unload(model)
    deadline = time.monotonic() + UNLOAD_LIMIT_S
    left = set(models)
    while left and time.monotonic() < deadline:
        left = {model for model in left if world.server.model_state(model) != "UNAVAILABLE"}
        time.sleep(0.1)
    for model in left:
        is_known = model == CANCELLED_OVER_GRPC and cancelled
        note = world.tally.tritons if is_known else world.tally.finding
        note("a model does not unload", f"{model}, {UNLOAD_LIMIT_S} s after its last request, {cancelled} cancelled calls")
    status = world.server.stop()
    if status != 0:
        note = world.tally.tritons if left == {CANCELLED_OVER_GRPC} else world.tally.finding
        note("the server's exit status", f"{status}\n{world.server.log_tail()[-2000:]}")
    look_at_log(world, tritons_own=status != 0 and left == {CANCELLED_OVER_GRPC})


def look_at_log(world, *, tritons_own=False):
    """Error lines of the log: each has a known cause, or is a finding. If it is Triton's own fault that the server
    could not stop, its line is counted so."""
    num_abandoned = sum(world.tally.counts[name] for name in ABANDONED)
    known, unknown = watch.errors(world.server.log(), world.expired, num_abandoned)
    for cause, num_lines in known.items():
        world.tally.count(f"lines of the log: {cause}", num_lines)
    for line in unknown:
        note = world.tally.tritons if tritons_own and "failed to stop server" in line else world.tally.finding
        note("a line of the log", line[:500])


def run(options, folder):
    """A complete run; returns the report."""
    world = World(folder, options.seed, options.round, options.cancel_every)
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    start = time.monotonic()
    lives = []
    rounds = 0

    # One for the whole run: tritonclient's HTTP client leaks open files in each thread that uses it.
    loop = asyncio.new_event_loop()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(MAX_THREADS))

    while time.monotonic() - start < options.minutes * 60 and not is_over.is_set():
        if world.server is None:
            world.start()
            lives.append([])
        if rounds % ROUNDS_OF_AN_EPOCH == 0:
            world.draw(f"{options.seed} {rounds}")
        left = options.minutes * 60 - (time.monotonic() - start)
        seconds = min(options.round, max(1, left))
        loop.run_until_complete(one_round(world, rounds, seconds, options.clients, is_over))
        rounds += 1
        if not look_at(world, lives[-1]):
            world.server = None
        figures = lives[-1][-1] if lives[-1] else {}
        told = f"{world.tally.counts['answers compared']} answers compared, {len(world.tally.findings)} findings"
        print(f"round {rounds}, minute {(time.monotonic() - start) / 60:.1f}: {told}, {figures}", file=sys.stderr, flush=True)
    if world.server is not None:
        end_of(world)
    world.oracle.stop()
    front_checks.look_at_log(world.front_log, world.tally)
    for series in lives:
        for text in watch.growth(series):
            world.tally.finding("something grows", text)
    return report(options, world, (time.monotonic() - start) / 60, rounds, lives)


def report(options, world, minutes, rounds, lives):
    """The report: what was tried and what was found."""
    tally = world.tally
    names = {name for row in documented_options() for name in row}
    tried = {name for name in names if tally.options[name] or name in BY_CLIENTS}
    return {
        "seed": options.seed,
        "minutes": round(minutes, 1),
        "rounds": rounds,
        "servers": len(lives),
        "requests": sum(n for name, n in tally.counts.items() if name.endswith(": requests")),
        "options_tried": len(tried),
        "options_not_tried": sorted(names - tried),
        "answers_alone": world.oracle.num_asked,
        "counts": dict(sorted(tally.counts.items())),
        "slowest_token_s": round(world.slowest_token_s, 3),
        "steps": world.steps.figures(),
        "figures_of_servers": [{"first": life[0], "last": life[-1]} for life in lives if life],
        "of_triton": tally.of_triton,
        "findings": tally.findings,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=18)
    parser.add_argument("--round", type=float, default=ROUND_S)
    parser.add_argument("--cancel-every", type=float, default=20)
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir(parents=True)
        found = run(options, options.keep.resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = run(options, pathlib.Path(folder))
    show(found, options.json)
    if found["findings"]:
        print(f"{len(found['findings'])} findings with --seed {options.seed}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
