"""Answers in one form, independent of the protocol, and the reference answers to compare them with."""

import hashlib
import json
import re
import threading

import numpy

from harness.front import Front
from harness.server import Server
from exchange import answer, close, connect, post
from models import REFERENCE, add_reference
from transport import Failed, infer

# Outputs that describe the circumstances of a request, not its result.
OF_ITS_TIME = re.compile("_time_ns$|^kv_cache_|_draft_tokens$|^acceptance_rate$|^num_|^sequence_length$")
JOINED = {"output_log_probs", "context_logits", "generation_logits"}


def flat(response, name):
    """An output as a flat list, from an array or from JSON; None if it is missing."""
    value = response.get(name)
    if value is None:
        return None
    if isinstance(value, numpy.ndarray):
        value = value.reshape(-1).tolist()
    values = value if isinstance(value, list) else [value]
    return [v.decode() if isinstance(v, bytes) else v for v in values]


def answer_of(responses, has_beams=False):
    """The combined result of responses: texts, ids and reasons of their rows, and for a single row the other
    outputs.

    Arrays and JSON give the same result, except that other outputs have fewer digits in JSON.
    """
    responses = [response for response in responses if flat(response, "text_output") is not None]
    if has_beams:
        responses = responses[-1:]
    if not responses:
        return {}
    num_rows = len(flat(responses[0], "text_output"))
    texts, ids, reasons = ([[] for _ in range(num_rows)] for _ in range(3))
    before = [0] * num_rows
    for response in responses:
        new_ids = flat(response, "output_ids") or []
        length = len(new_ids) // num_rows
        counts = flat(response, "num_output_tokens")
        for row, text in enumerate(flat(response, "text_output")):
            texts[row].append(text)
            own = new_ids[row * length : (row + 1) * length]
            if num_rows > 1:
                # Shorter rows are padded.
                own = own[: counts[row] - before[row]] if counts else []
            ids[row] += own
        before = counts or before
        for row, reason in enumerate(flat(response, "finish_reason") or []):
            reasons[row].append(reason)
    # With some options, text and ids have other lengths than the tokens, so ids are split into rows only if
    # that is unambiguous.
    answer = {"text": ["".join(parts) for parts in texts], "ids": ids}
    if num_rows > 1 and not flat(responses[-1], "num_output_tokens"):
        del answer["ids"]
    if any(reasons):
        # A single row ends once. With several rows, each response repeats the finish reasons of the ended
        # ones.
        ends = [[reason for reason in row if reason] for row in reasons]
        answer["reason"] = ends if num_rows == 1 else [row[-1:] for row in ends]
    if num_rows == 1 and isinstance(responses[-1]["text_output"], numpy.ndarray):
        answer["more"] = _more(responses)
    return answer


def _more(responses):
    found = {}
    names = {name for response in responses for name in response} - {"text_output", "output_ids", "finish_reason"}
    for name in names:
        arrays = [response[name] for response in responses if name in response]
        if OF_ITS_TIME.search(name):
            continue
        if name in {"logprobs", "prompt_logprobs"}:
            found[name] = [entry for array in arrays for entry in json.loads(array.reshape(-1)[0])]
        elif name == "output_ids_json":
            found[name] = [id for array in arrays for row in json.loads(array.reshape(-1)[0]) for id in row]
        elif name in JOINED:
            # Where there are no new logits, the output is a dummy of one zero.
            bits = b"".join(a.tobytes() for a in arrays if a.size > 1 or name == "output_log_probs")
            found[name] = hashlib.sha256(bits).hexdigest()
        else:
            found[name] = repr(arrays[-1].reshape(-1).tolist())
    return found


def difference(expected, found, *, cut_off=False, has_beams=False):
    """How an answer differs from the reference, in words; None if it does not. One that was `cut_off` may end
    earlier."""
    if "error" in expected or "error" in found:
        if cut_off and "error" not in found and expected["error"]:
            return None
        if expected.get("error") != found.get("error"):
            return f"alone {_shown(expected)}, here {_shown(found)}"
        return None
    if cut_off:
        # Cancelled beams return their current hypotheses, which need not be prefixes of the final ones.
        if has_beams:
            return None
        rows = zip(expected.get("ids", []), found.get("ids", []))
        if any(own != whole[: len(own)] for whole, own in rows):
            return f"not a prefix of {_shown(expected)}: {_shown(found)}"
        return None
    for name in expected.keys() & found.keys():
        if expected[name] != found[name]:
            return f"{name}: alone {_shown(expected[name])}, here {_shown(found[name])}"
    return None


def _shown(value):
    return repr(value)[:600]


class Oracle:
    """Reference answers: each request is sent once, one at a time, to its own server that runs nothing
    else."""

    def __init__(self, folder):
        repository = folder / "reference"
        add_reference(repository)
        self._server = Server(repository)
        self._front = Front(self._server)
        self._lock = threading.Lock()
        self._answers = {}
        self.num_asked = 0

    def alone(self, content):
        """The answer to a request alone."""
        return self._answer(content, self._ask)

    def alone_behind_front(self, body):
        """The answer to a request alone, by OpenAI's API."""
        return self._answer(body, self._ask_front)

    def forget(self):
        """Clears the cache: memory is for the contents in current use."""
        with self._lock:
            self._answers.clear()

    def stop(self):
        """Stops the server and its front."""
        self._front.stop()
        self._server.stop()

    def _answer(self, request, ask):
        with self._lock:
            if request not in self._answers:
                self._answers[request] = ask(request)
                self.num_asked += 1
            return self._answers[request]

    def _ask(self, content):
        try:
            return answer_of([infer(self._server, "ids" if content.is_ids else REFERENCE, content)], content.has_beams)
        except Failed as failed:
            return {"error": failed.text}

    def _ask_front(self, body):
        connection = connect(self._front)
        try:
            post(connection, body.path, body.of(REFERENCE))
            return answer(connection, REFERENCE)
        except Failed as failed:
            return {"error": failed.text}
        finally:
            close(connection)
