"""Answers in one form, however they came, and what a request gets alone, to compare them with."""

import hashlib
import json
import re
import threading

import numpy

from harness.server import Server
from models import add_reference
from transport import Failed, infer

# What says when and with how much luck a request was served, not what its answer is.
OF_ITS_TIME = re.compile("_time_ns$|^kv_cache_|_draft_tokens$|^acceptance_rate$|^num_|^sequence_length$")
JOINED = {"output_log_probs", "context_logits", "generation_logits"}


def flat(response, name):
    """An output as a list without shape, whether it is an array or of JSON; None if it is not there."""
    value = response.get(name)
    if value is None:
        return None
    if isinstance(value, numpy.ndarray):
        value = value.reshape(-1).tolist()
    values = value if isinstance(value, list) else [value]
    return [v.decode() if isinstance(v, bytes) else v for v in values]


def answer_of(responses, has_beams=False):
    """What responses say together: the texts, ids and reasons of their rows, and of a single row what else there is.

    Arrays and JSON come to the same, apart from what else there is: JSON has fewer digits.
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
                # Shorter rows are filled up.
                own = own[: counts[row] - before[row]] if counts else []
            ids[row] += own
        before = counts or before
        for row, reason in enumerate(flat(response, "finish_reason") or []):
            reasons[row].append(reason)
    # With some options text and ids have other lengths than tokens, so rows of ids count only where they can be told.
    answer = {"text": ["".join(parts) for parts in texts], "ids": ids}
    if num_rows > 1 and not flat(responses[-1], "num_output_tokens"):
        del answer["ids"]
    if any(reasons):
        # A single row ends once. Of several, each response says again of those that have ended how they did.
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
        if name == "logprobs":
            found[name] = [entry for array in arrays for entry in json.loads(array.reshape(-1)[0])]
        elif name == "output_ids_json":
            found[name] = [id for array in arrays for row in json.loads(array.reshape(-1)[0]) for id in row]
        elif name in JOINED:
            # Where there is nothing new of the logits is a dummy of one zero.
            bits = b"".join(a.tobytes() for a in arrays if a.size > 1 or name == "output_log_probs")
            found[name] = hashlib.sha256(bits).hexdigest()
        else:
            found[name] = repr(arrays[-1].reshape(-1).tolist())
    return found


def difference(expected, found, *, cut_off=False, has_beams=False):
    """How an answer differs from the one alone, in words; None where it does not. One that was `cut_off` may end
    earlier."""
    if "error" in expected or "error" in found:
        if cut_off and "error" not in found and expected["error"]:
            return None
        if expected.get("error") != found.get("error"):
            return f"alone {_shown(expected)}, here {_shown(found)}"
        return None
    if cut_off:
        # Beams end as they are, which need not be how those begin that are found later.
        if has_beams:
            return None
        rows = zip(expected.get("ids", []), found.get("ids", []))
        if any(own != whole[: len(own)] for whole, own in rows):
            return f"no beginning of {_shown(expected)}: {_shown(found)}"
        return None
    for name in expected.keys() & found.keys():
        if expected[name] != found[name]:
            return f"{name}: alone {_shown(expected[name])}, here {_shown(found[name])}"
    return None


def _shown(value):
    return repr(value)[:600]


class Oracle:
    """What each request gets alone: asked once, one after the other, of a server of its own that runs nothing else."""

    def __init__(self, folder):
        repository = folder / "reference"
        add_reference(repository)
        self._server = Server(repository)
        self._lock = threading.Lock()
        self._answers = {}
        self.num_asked = 0

    def alone(self, content):
        """The answer to a request alone."""
        with self._lock:
            if content not in self._answers:
                self._answers[content] = self._ask(content)
                self.num_asked += 1
            return self._answers[content]

    def forget(self):
        """Begins anew: memory is for the contents that are asked for now."""
        with self._lock:
            self._answers.clear()

    def stop(self):
        """Ends the server; its exit status."""
        return self._server.stop()

    def _ask(self, content):
        try:
            return answer_of([infer(self._server, "ids" if content.is_ids else "full", content)], content.has_beams)
        except Failed as failed:
            return {"error": failed.text}
