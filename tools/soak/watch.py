"""Observes the server from outside: gauges that must be zero when it is idle; memory, threads and open files,
which must not grow; and the cause of its death."""

import collections
import os
import re
import statistics
import time

IDLE_LIMIT_S = 300
# Permitted growth of memory from the second to the last third of a run: the allocator's caches vary.
MEMORY_SLACK_KIB = 24 * 1024
COUNT_SLACK = 4
REQUESTS = "nv_trt_llm_request_metrics"
BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
PENDING = "nv_inference_pending_request_count"
FREED_AGAIN = "slots that Triton kept when a client left"


def figures(pid):
    """A process's memory in KiB, threads, and open files."""
    status = open(f"/proc/{pid}/status").read()
    anonymous = int(re.search(r"RssAnon:\s+(\d+)", status)[1])
    threads = int(re.search(r"Threads:\s+(\d+)", status)[1])
    return {"anonymous_kib": anonymous, "threads": threads, "files": len(os.listdir(f"/proc/{pid}/fd"))}


def processor_s(pid):
    """The processor time that a process has used, in seconds."""
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def connections(port):
    """How many connections a process has on a port of this machine at which it listens."""
    count = 0
    for line in open("/proc/net/tcp").readlines()[1:]:
        _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
        # Listening is 0A. What no process holds any more has no inode.
        count += int(local.split(":")[1], 16) == port and state != "0A" and inode != "0"
    return count


def not_idle(samples):
    """The gauges that show running or held requests, as text."""
    found = []
    for (family, labels), value in sorted(samples.items()):
        labels = dict(labels)
        if family == REQUESTS and labels.get("request_type") != "max" and value:
            found.append(f"{labels} {value}")
        if family == BLOCKS and labels.get("kv_cache_block_type") == "used" and value:
            found.append(f"{labels} {value}")
        if family == BLOCKS and labels.get("kv_cache_block_type") == "free":
            own = {**labels, "kv_cache_block_type": "max"}
            total = samples.get((family, tuple(sorted(own.items()))))
            if total is not None and total != value:
                found.append(f"{labels} {value} of {total}")
    return found


def pending(samples):
    """Requests that Triton counts as not started, by model."""
    return {dict(labels)["model"]: n for (family, labels), n in samples.items() if family == PENDING and n}


def wait_for_idle(look):
    """Waits until `look` finds nothing; returns what it still finds after a while."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    while True:
        found = look()
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def growth(series):
    """What grows without limit, in words. A series has the figures of every idle moment in one server's
    life."""
    found = []
    if len(series) < 6:
        return found
    thirds = len(series) // 3
    middle, last = series[thirds : 2 * thirds], series[2 * thirds :]
    for name in series[0]:
        slack = MEMORY_SLACK_KIB if name.endswith("kib") else COUNT_SLACK
        before, after = (statistics.median(figures[name] for figures in part) for part in (middle, last))
        if after > before + slack:
            found.append(f"{name} grew from {before:.0f} to {after:.0f} (medians of the second and the last third)")
    return found


def errors(log, expired, num_abandoned):
    """The error lines of a server's log: their number by known cause, and the lines without one.

    If the time of a request is over in Triton's backlog, Triton ends its sequence, which it has forgotten already, and
    logs that. `expired` has the number of such requests by model.

    If a client leaves while its request is being released, Triton keeps the slot. The backend then starts the sequence
    once more, to end it, and Triton logs a conflict. No client chooses a sequence id, so nothing else may cause one.
    `num_abandoned` is the number of requests that clients left.
    """
    known = collections.Counter()
    unknown = []
    left = collections.Counter(expired)
    for line in log.splitlines():
        unstarted = re.search(r"to model '([^']*)' must specify the START flag", line)
        if unstarted and left[unstarted[1]] > 0:
            left[unstarted[1]] -= 1
            known["requests whose time was over in Triton's backlog"] += 1
        elif "has a conflict" in line and num_abandoned > known[FREED_AGAIN]:
            known[FREED_AGAIN] += 1
        elif "CudaDriverHelper has not been initialized" in line:
            known["no CUDA driver"] += 1
        elif re.match(r"E\d{4} ", line) or any(words in line for words in ("panicked", "has a conflict")):
            unknown.append(line)
    return known, unknown


def death(log, num_cancelled_calls):
    """Whether the end of a server is Triton's own fault, and the evidence: the end of its log.

    Server 2.51 releases the state of a gRPC stream twice if a response meets a cancellation. That is only assumed
    if calls were cancelled, and none of our functions is in the trace.
    """
    trace = log[log.rfind("Signal (") :] if "Signal (" in log else "\n".join(log.splitlines()[-15:])
    is_tritons = num_cancelled_calls > 0 and "libtriton_inflight" not in trace and "panicked" not in log
    return is_tritons, trace[-3000:]
