"""Clients that disconnect: their requests stop, and their slots and blocks are reused."""

import asyncio
import subprocess
import time

import pytest

from harness import clients
from harness.clients import GenerateStream, GrpcStream, generate_stream
from harness.repository import ALLOW_OLDEST, add_synthetic
from harness.server import Server, assert_blocks_come_back, num_pending, until
from harness.synthetic import ENDLESS, ENDLESS_SEQ_LEN, continuation


def num_failed(server, model, reason):
    key = ("nv_inference_request_failure", (("model", model), ("reason", reason), ("version", "1")))
    return server.metrics().get(key, 0)


def wait_for_failed(server, model, reason, count):
    """Triton sends its own request to end a sequence, and counts it some time after the sequence's slot is
    free."""
    deadline = time.monotonic() + 10
    while num_failed(server, model, reason) != count:
        assert time.monotonic() < deadline, f"{num_failed(server, model, reason)} failed, not {count}"
        time.sleep(0.02)


@pytest.mark.cancelling
def test_a_cancelled_streams_slot_is_reused_at_once(server, deployment):
    # With sequences, one is the cancelled request, and the other is Triton's own request that ends the sequence.
    # Otherwise Triton counts a failure that the backend reports.
    reason, num_counted = ("BACKEND", 1) if deployment.queued else ("CANCELED", 2)
    before = num_failed(server, "one_slot", reason)

    async def main():
        async with clients.grpc(server) as client:
            first = GrpcStream(client, "one_slot", [1, 2], max_tokens=ENDLESS, stream=True)
            seen = []
            async for response in first:
                seen += response.ids or []
                if len(seen) == 5:
                    break
            waiting = asyncio.create_task(clients.stream(client, "one_slot", [3, 4], max_tokens=20))
            await until(lambda: num_pending(server, "one_slot") == 1)
            first.cancel()
            # Without the release, an idle limit of hours would hold the slot.
            return seen, await asyncio.wait_for(waiting, clients.TIMEOUT_S)

    seen, answer = clients.run(main())
    assert seen == continuation([1, 2], len(seen))
    assert answer.ids == continuation([3, 4], 20)
    wait_for_failed(server, "one_slot", reason, before + num_counted)
    assert_blocks_come_back(server, "one_slot")


@pytest.mark.cancelling
def test_a_cancelled_client_gets_the_status_cancelled(server):
    async def main():
        async with clients.grpc(server) as client:
            stream = GrpcStream(client, "endless", [1], max_tokens=ENDLESS, stream=True)
            with pytest.raises(clients.Refused) as refused:
                async for _ in stream:
                    stream.cancel()
            return refused.value

    error = clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))
    assert "CANCELLED" in f"{error.status} {error}".upper()


def test_an_http_client_that_disconnects_frees_its_slot(server):
    stream = GenerateStream(server, "one_slot", [1], max_tokens=ENDLESS, stream=True)
    for n, _ in enumerate(stream):
        if n == 5:
            break
    stream.close()
    # Waits while the slot is taken, up to the clients' time limit, which is long before the end of the first
    # request.
    assert generate_stream(server, "one_slot", [9], max_tokens=10).ids == continuation([9], 10)


@pytest.mark.cancelling
def test_cancelling_half_of_the_streams_does_not_affect_the_others(server):
    async def main():
        async with clients.grpc(server) as client:

            async def leave(n):
                stream = GrpcStream(client, "endless", [n], max_tokens=ENDLESS, stream=True)
                num_tokens = 0
                async for response in stream:
                    num_tokens += len(response.ids or [])
                    if num_tokens > 3 * n:
                        stream.cancel()
                        return None

            async def stay(n):
                return await clients.stream(client, "endless", [n], max_tokens=200)

            return await asyncio.gather(*(leave(n) if n % 2 else stay(n) for n in range(48)))

    answers = clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))
    for n in range(0, 48, 2):
        assert answers[n].ids == continuation([n], 200)
    assert_blocks_come_back(server, "endless")


@pytest.mark.cancelling
def test_a_cancelled_single_stream_frees_its_blocks_although_no_request_follows(server):
    """At 5 ms per step, Triton ends most of them between two steps, without notifying the backend."""

    async def main():
        async with clients.grpc(server) as client:
            stream = GrpcStream(client, "one_slot", [1, 2, 3], max_tokens=ENDLESS, stream=True)
            num_seen = 0
            async for response in stream:
                num_seen += len(response.ids or [])
                if num_seen > 3:
                    stream.cancel()
                    break

    for _ in range(20):
        clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))
        assert_blocks_come_back(server, "one_slot")


@pytest.mark.cancelling
def test_a_request_cancelled_in_the_backlog_never_starts(server):
    async def main():
        async with clients.grpc(server) as client:
            async with clients.in_flight(client, "one_slot", [1]):
                waiting = GrpcStream(client, "one_slot", [2], max_tokens=ENDLESS, stream=True)
                waits = asyncio.create_task(anext(aiter(waiting)))
                await until(lambda: num_pending(server, "one_slot") == 1)
                waiting.cancel()
                with pytest.raises(clients.Refused, match="cancelled"):
                    await waits
            # If it were in the slot, it would stay there longer than this waits.
            return await clients.stream(client, "one_slot", [3], max_tokens=10)

    assert clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S)).ids == continuation([3], 10)


# Cancels every request of a client at the moment of its release: after the backend has checked for
# cancellation, and before Triton does (AFTER is 0), or after Triton has ended its sequence (AFTER is 1).
CANCEL_IN_RELEASE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

void *TRITONBACKEND_RequestCorrelationId(void *request, uint64_t *id);
void *TRITONBACKEND_RequestId(void *request, const char **id);
void *TRITONSERVER_InferenceRequestCancel(void *request);

/* Whether the thread has just released the request of a client. */
static _Thread_local bool has_released;

void *TRITONBACKEND_RequestRelease(void *request, uint32_t flags) {
  enum { RELEASE_ALL = 1 };
  void *(*release)(void *, uint32_t) = dlsym(RTLD_NEXT, "TRITONBACKEND_RequestRelease");
  uint64_t sequence = 0;
  const char *id = "";
  TRITONBACKEND_RequestCorrelationId(request, &sequence);
  TRITONBACKEND_RequestId(request, &id);
  if (flags == RELEASE_ALL && sequence != 0 && strncmp(id, "inflight:", 9) != 0) {
    if (AFTER)
      has_released = true;
    else
      TRITONSERVER_InferenceRequestCancel(request);
  }
  return release(request, flags);
}

void *TRITONBACKEND_ResponseFactoryIsCancelled(void *factory, bool *is_cancelled) {
  void *(*ask)(void *, bool *) = dlsym(RTLD_NEXT, "TRITONBACKEND_ResponseFactoryIsCancelled");
  void *error = ask(factory, is_cancelled);
  if (has_released)
    *is_cancelled = true;
  has_released = false;
  return error;
}
"""

OLDEST = f"""
{ALLOW_OLDEST}
sequence_batching {{
  iterative_sequence: true max_sequence_idle_microseconds: 86400000000 oldest {{ max_candidate_sequences: 2 }}
}}
"""


@pytest.mark.deployments("iterative")
@pytest.mark.parametrize("after", [0, 1], ids=["before", "after"])
@pytest.mark.parametrize("strategy", ["", OLDEST], ids=["direct", "oldest"])
@pytest.mark.cancelling
def test_a_cancellation_at_the_moment_of_release_does_not_leak_the_slot(
    repository, tmp_path, monkeypatch, strategy, after
):
    source, library = tmp_path / "cancel_in_release.c", tmp_path / "cancel_in_release.so"
    source.write_text(CANCEL_IN_RELEASE)
    subprocess.run(["cc", "-shared", "-fPIC", f"-DAFTER={after}", "-o", library, source, "-ldl"], check=True)
    add_synthetic(repository, "two_slots", {"max_seq_len": ENDLESS_SEQ_LEN}, fields=f"max_batch_size: 2 {strategy}")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with Server(repository) as server:
        monkeypatch.delenv("LD_PRELOAD")
        start = time.monotonic()
        for n in range(10):
            assert generate_stream(server, "two_slots", [n], max_tokens=5).ids == continuation([n], 5)
            # Refused once its options are prepared, and while it is read.
            with pytest.raises(clients.Refused, match="top_p"):
                generate_stream(server, "two_slots", [n], max_tokens=5, top_p=7)
            with pytest.raises(clients.Refused, match="unknown option"):
                generate_stream(server, "two_slots", [n], max_tokens=5, unknown=1)
        # A slot that is not freed stays taken for a day.
        assert time.monotonic() - start < 60

        async def both():
            """Two requests at the same time need both slots."""
            async with clients.grpc(server) as client:
                async with clients.in_flight(client, "two_slots", [1]), clients.in_flight(client, "two_slots", [2]):
                    pass

        clients.run(asyncio.wait_for(both(), clients.TIMEOUT_S))
        # Triton says so if a sequence that it does not know is ended, and if one starts again in the slot that it kept.
        assert "must specify the START flag" not in server.log()
        assert ("has a conflict" in server.log()) == (not after)


@pytest.mark.deployments("iterative")
@pytest.mark.parametrize("strategy", ["", OLDEST], ids=["direct", "oldest"])
@pytest.mark.cancelling
def test_a_cancelled_streams_slot_is_reused_beside_another_that_goes_on(repository, strategy):
    """Triton gets a cancelled request back at the end of a later step of the other."""
    parameters = {"max_seq_len": ENDLESS_SEQ_LEN, "synthetic_step_us": 2000}
    add_synthetic(repository, "two_slots", parameters, fields=f"max_batch_size: 2 {strategy}")

    async def main():
        async with clients.grpc(server) as client, clients.in_flight(client, "two_slots", [1]):
            for n in range(40):
                async with clients.in_flight(client, "two_slots", [n]):
                    pass
                answer = await clients.stream(client, "two_slots", [n], max_tokens=5)
                assert answer.ids == continuation([n], 5)

    with Server(repository) as server:
        clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))
        assert_blocks_come_back(server, "two_slots")


# A step waits until both slots are taken, for a tenth of a second.
PATIENT = """
sequence_batching {
  iterative_sequence: true
  max_sequence_idle_microseconds: 86400000000
  direct { max_queue_delay_microseconds: 100000 minimum_slot_utilization: 1.0 }
}
"""

MAX_PAIRS = 30


@pytest.mark.deployments("iterative")
@pytest.mark.cancelling
def test_a_cancelled_request_that_no_step_follows_frees_its_slot(repository):
    """Its step rescheduled the other one, which Triton ends before it comes back: it is cancelled, too.

    Triton has to see the second cancellation while the next step waits for a second request. Where both are seen in one
    step, or in steps of their own, the slots are freed in another way, and a next pair is cancelled.
    """
    parameters = {"max_seq_len": ENDLESS_SEQ_LEN, "synthetic_step_us": 2000}
    add_synthetic(repository, "two_slots", parameters, fields=f"max_batch_size: 2 {PATIENT}")
    between_steps = "a cancelled request is ended between two steps"

    async def main():
        async with clients.grpc(server) as client:
            for n in range(MAX_PAIRS):
                streams = [GrpcStream(client, "two_slots", [i], max_tokens=ENDLESS, stream=True) for i in range(2)]
                await asyncio.gather(*(anext(aiter(stream)) for stream in streams))
                streams[0].cancel()
                await asyncio.sleep(0.02 * (1 + n % 5))
                streams[1].cancel()
                # Two requests at the same time need both slots.
                async with clients.in_flight(client, "two_slots", [1]), clients.in_flight(client, "two_slots", [2]):
                    pass
                if between_steps in server.log():
                    return
            pytest.fail(f"none of {MAX_PAIRS} pairs: {between_steps}")

    with Server(repository, "--log-verbose=1") as server:
        clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))
        assert_blocks_come_back(server, "two_slots")


@pytest.fixture(autouse=True)
def silent(server):
    """Triton logs a backend's errors with sequences; a cancellation is none. A sequence that "has a conflict" is none
    either: the backend starts one again to end it if its client left while it was being released."""
    before = len(server.log())
    yield
    for word in ("must specify the START flag", "panicked"):
        assert word not in server.log()[before:]
