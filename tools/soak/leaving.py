"""Many clients that open a stream through the server with OpenAI's API and leave after some tokens, on a model of each
driver.

Counts crashes of tritonserver, requests of others that are lost or differ, and what is still held when nothing runs.
"""

import argparse
import asyncio
import json
import pathlib
import random
import socket
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import harness  # noqa: E402,F401  configures gRPC
import front_checks  # noqa: E402
import watch  # noqa: E402
from exchange import RESETS  # noqa: E402
from harness.front import Front  # noqa: E402
from harness.repository import QUEUED, STORIES, add_model  # noqa: E402
from harness.server import Server  # noqa: E402
from tally import Tally, show  # noqa: E402

MODEL = "stories"
# By driver.
FIELDS = {"iterative": "max_batch_size: 32", "queued": f"max_batch_size: 32 {QUEUED}"}
# One thread has short steps on a busy machine, too.
PARAMETERS = {"max_tokens_in_paged_kv_cache": 16384, "max_seq_len": 256, "num_threads": 1}
PROMPTS = ["Once upon a time", "The fox said", "Long ago, a bear", "Tell me a story about a robot.", "Mina and Oscar"]
MAX_TOKENS = 120
# The most tokens that a client reads before it leaves.
MAX_READ = 8
# One of so many clients stays and reads everything.
STAYS = 20
CONCURRENT = 24
# Clients between two checks of the idle server.
ROUND = 5000
# A token takes seconds on a machine with other work.
LIMIT_S = 900
UNLOAD_LIMIT_S = 120
LEFT, STAYED = "clients that left", "clients that stayed"


class Lost(Exception):
    """A request was not answered as it should be."""


async def stream(front, prompt, num_tokens, resets):
    """Opens a stream, and leaves after so many tokens, or reads all if that is None; returns the text."""
    host, port = front.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        texts = []
        is_over = False
        while num_tokens is None or len(texts) < num_tokens:
            line = await reader.readline()
            if not line:
                break
            if line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 200"):
                raise Lost(line.decode(errors="replace").strip())
            if line == b"data: [DONE]\n":
                is_over = True
                break
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise Lost(event["error"]["message"])
                texts.append(event["choices"][0]["text"])
        if num_tokens is None and not is_over:
            raise Lost("the stream ended without [DONE]")
        return "".join(texts)
    finally:
        if resets:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
        writer.close()


class Run:
    """The clients of one driver."""

    def __init__(self, driver, options, folder):
        self.driver, self.options = driver, options
        self.repository = folder / driver
        self.steps = folder / f"{driver}.jsonl"
        self.front_log = folder / f"{driver}.front.log"
        add_model(self.repository, MODEL, {**PARAMETERS, "stats_file": self.steps}, fields=FIELDS[driver], checkpoint=STORIES)
        self.rng = random.Random(f"{options.seed} {driver}")
        self.tally = Tally()
        self.expected = {}
        self.step_ms = []

    def run(self):
        """All clients; returns the report."""
        start = time.monotonic()
        servers = 0
        while self._num_left() > 0:
            self.server = Server(self.repository)
            with open(self.front_log, "a") as log:
                self.front = Front(self.server, *front_checks.arguments(self.server), log=log)
            servers += 1
            self._until_it_dies()
        front_checks.look_at_log(self.front_log, self.tally)
        return {
            "driver": self.driver,
            "minutes": round((time.monotonic() - start) / 60, 1),
            "servers": servers,
            "step_ms_median": round(statistics.median(self.step_ms), 3),
            "counts": dict(self.tally.counts),
            "findings": self.tally.findings,
        }

    def _num_left(self):
        """How many clients have not left yet."""
        return self.options.leaving_clients - self.tally.counts[LEFT]

    def _until_it_dies(self):
        """Rounds with one server: all of them, unless it crashes."""
        while self._num_left() > 0:
            asyncio.run(self._round())
            if self._has_died():
                return
            self._look_at_idle()
            told = f"{self.tally.counts[LEFT]} clients left, {len(self.tally.findings)} findings"
            print(f"{self.driver}: {told}", file=sys.stderr, flush=True)
        self._stop()

    async def _round(self):
        for prompt in PROMPTS:
            if prompt not in self.expected:
                self.expected[prompt] = await stream(self.front, prompt, None, False)
        places = asyncio.Semaphore(CONCURRENT)
        tasks = set()
        start = time.monotonic()
        for n in range(min(ROUND, self._num_left())):
            await places.acquire()
            if self.server.process.poll() is not None:
                break
            # Not faster than the rate.
            await asyncio.sleep(max(0, start + n / self.options.rate - time.monotonic()))
            task = asyncio.create_task(self._client(n))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(lambda _: places.release())
        await asyncio.gather(*tasks)

    async def _client(self, n):
        prompt = self.rng.choice(PROMPTS)
        stays = n % STAYS == STAYS - 1
        num_tokens = None if stays else self.rng.randint(0, MAX_READ)
        try:
            text = await asyncio.wait_for(stream(self.front, prompt, num_tokens, self.rng.random() < 0.5), LIMIT_S)
        except (OSError, ValueError, TimeoutError, Lost) as error:
            if not await self._is_taken_along():
                self.tally.finding("a request was lost", f"{type(error).__name__}: {error}")
            return
        self.tally.count(STAYED if stays else LEFT)
        if stays and text != self.expected[prompt]:
            self.tally.finding("another text than alone", f"{text!r}, not {self.expected[prompt]!r}")

    async def _is_taken_along(self):
        """Whether a request failed because the server died, which is found once."""
        await asyncio.sleep(1)
        return self.server.process.poll() is not None

    def _has_died(self):
        """Whether the server or its front has ended."""
        status, of_front = self.server.process.poll(), self.front.process.poll()
        if status is None and of_front is None:
            return False
        if of_front is not None:
            self.tally.finding("the front died", f"exit status {of_front}")
        if status is not None:
            self.tally.finding("the server died", f"exit status {status}\n{self.server.log()[-3000:]}")
        for process in (self.front.process, self.server.process):
            process.kill()
            process.wait()
        return True

    def _look_at_idle(self):
        """Everything must be free."""
        for gauge in watch.wait_for_idle(lambda: watch.not_idle(self.server.metrics())):
            self.tally.finding("a gauge is not zero when nothing runs", gauge)
        for count in watch.pending(self.server.metrics()).values():
            self.tally.finding("Triton counts requests as pending", count)
        front_checks.look_at_idle(self.front, self.tally, MODEL)
        self.step_ms += [json.loads(line)["Step Duration (us)"] / 1000 for line in self.steps.read_bytes().splitlines()]
        self.steps.write_bytes(b"")

    def _stop(self):
        """The model unloads, and front and server end well."""
        if (status := self.front.stop()) != 0:
            self.tally.finding("the front's exit status", status)
        self.server.unload(MODEL)
        deadline = time.monotonic() + UNLOAD_LIMIT_S
        while (state := self.server.model_state(MODEL)) != "UNAVAILABLE" and time.monotonic() < deadline:
            time.sleep(0.1)
        if state != "UNAVAILABLE":
            self.tally.finding("a model does not unload", f"it is {state}, {UNLOAD_LIMIT_S} s after its last request")
        if (status := self.server.stop()) != 0:
            self.tally.finding("the server's exit status", f"{status}\n{self.server.log_tail()[-2000:]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaving-clients", type=int, default=10_000)
    parser.add_argument("--driver", choices=FIELDS, action="append", help="both, unless one is given")
    parser.add_argument("--rate", type=float, default=200, help="the most clients in a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        if options.keep:
            options.keep.mkdir(parents=True)
            folder = options.keep.resolve()
        reports = [Run(driver, options, folder).run() for driver in options.driver or FIELDS]
    for found in reports:
        show(found, options.json)
    if any(found["findings"] for found in reports):
        sys.exit(1)


if __name__ == "__main__":
    main()
