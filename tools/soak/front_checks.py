"""The server with OpenAI's API while nothing runs: what it holds, and what it has written."""

import json

import watch
from bodies import COMPLETIONS
from exchange import close, connect, post
from transport import LIMIT_S

# As many prompts as a request may have: one with all of them has room if nobody else holds any.
MAX_REQUESTS = 128


def arguments(server):
    """The front's arguments."""
    # No client of the soak is late but by the machine's other work.
    limits = [f"--max-requests={MAX_REQUESTS}", "--request-timeout=600"]
    return [f"--triton-metrics=127.0.0.1:{server.metrics_port}", *limits]


def look_at_idle(front, tally, model):
    """Checks after a round that the front is healthy and holds nothing, by requests to a model; returns its figures."""
    port = int(front.address.split(":")[1])
    if watch.wait_for_idle(lambda: watch.connections(port)):
        tally.finding("connections of clients that are gone", f"{watch.connections(port)} are open")
    if problem := watch.wait_for_idle(lambda: _unhealthy(front)):
        tally.finding("the front is not healthy when nothing runs", problem)
    if problem := watch.wait_for_idle(lambda: _has_no_room(front, model)):
        tally.finding("the front holds requests when nothing runs", problem)
    return {f"front_{name}": value for name, value in watch.figures(front.process.pid).items()}


def _unhealthy(front):
    answer = front.call("GET", "/health")
    return None if answer.status == 200 else f"status {answer.status}: {answer.json}"


def _has_no_room(front, model):
    """Asks for as many prompts as may be in flight; the problem, or None."""
    connection = connect(front)
    try:
        post(connection, COMPLETIONS, {"model": model, "prompt": ["a"] * MAX_REQUESTS, "max_tokens": 1})
        response = connection.getresponse()
        content = response.read()
    except TimeoutError:
        return f"no answer after {LIMIT_S} s to {MAX_REQUESTS} prompts"
    finally:
        close(connection)
    return None if response.status == 200 else f"status {response.status}: {content[:300]}"


def look_at_log(path, tally):
    """Lines of the front's log that are none of the access log."""
    for line in path.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            if "have been read again" not in line:
                tally.finding("a line of the front's log", line[:500])
        else:
            tally.count(f"front: answers with status {entry['status']}")
