"""Answers of the server with OpenAI's API in one form, streamed or not, and their differences."""

import json

from transport import Failed, NotEndedOnce

# Fields with other values in each run.
OF_ITS_TIME = {"id", "created", "model", "system_fingerprint", "service_tier"}
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


def whole(answer):
    """An answer that was not streamed: its choices, in order, and its usage."""
    choices = [_without_ids(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
    return {"choices": choices, "usage": {name: answer["usage"][name] for name in USAGE}}


def joined(chunks, *, cut_off=False):
    """What the chunks of a stream make together. One that was cut off need not have ended."""
    choices = {}
    usage = None
    for chunk in chunks:
        if chunk.get("usage"):
            usage = {name: chunk["usage"][name] for name in USAGE}
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"], "finish_reason": None, "logprobs": None})
            if choice["finish_reason"] is not None:
                raise NotEndedOnce(f"choice {piece['index']} goes on behind its end: {piece}")
            _add(choice, piece)
    unended = [index for index, choice in choices.items() if choice["finish_reason"] is None]
    if unended and not cut_off:
        raise NotEndedOnce(f"the stream ends, but its choices {unended} do not")
    return {"choices": [_without_ids(choices[index]) for index in sorted(choices)], "usage": usage}


def _add(choice, piece):
    choice["finish_reason"] = piece["finish_reason"]
    if "text" in piece:
        choice["text"] = choice.get("text", "") + piece["text"]
    if "delta" in piece:
        _add_delta(choice.setdefault("message", {}), piece["delta"])
    if piece.get("logprobs"):
        lists = choice["logprobs"] = choice["logprobs"] or {}
        for name, values in piece["logprobs"].items():
            lists[name] = lists.get(name, []) + values if values is not None else lists.get(name)


def _add_delta(message, delta):
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault(name, [])
            for call in value:
                call = dict(call)
                index = call.pop("index")
                if index == len(calls):
                    calls.append({**call, "function": dict(call["function"])})
                else:
                    calls[index]["function"]["arguments"] += call["function"]["arguments"]
        elif isinstance(value, str) and name != "role":
            message[name] = message.get(name, "") + value
        else:
            message[name] = value


def _without_ids(choice):
    """A choice in the form in which streams and whole answers are equal."""
    choice = dict(choice)
    if "message" in choice:
        message = {name: value for name, value in choice["message"].items() if value not in (None, "", [])}
        if "tool_calls" in message:
            message["tool_calls"] = [call["function"] for call in message["tool_calls"]]
        choice["message"] = message
    if choice.get("logprobs"):
        choice["logprobs"] = {name: values for name, values in choice["logprobs"].items() if values}
    choice["logprobs"] = choice.get("logprobs") or None
    return choice


def failure(error):
    """The exception for an error object of the API."""
    told = {name: error.get(name) for name in ("message", "type", "param", "code")}
    return Failed(json.dumps(told))


def unlike(expected, found, *, cut_off=False):
    """How an answer differs from the reference, in words; None if it does not."""
    if "error" in expected or "error" in found:
        if cut_off and "error" not in found:
            return None
        if expected.get("error") != found.get("error"):
            return f"alone {_shown(expected)}, here {_shown(found)}"
        return None
    if cut_off:
        for choice in found["choices"]:
            same = [other for other in expected["choices"] if other["index"] == choice["index"]]
            if not same or not all(a.startswith(b) for a, b in zip(_texts(same[0]), _texts(choice))):
                return f"not a prefix of {_shown(same)}: {_shown(choice)}"
        return None
    if found["usage"] is not None and found["usage"] != expected["usage"]:
        return f"usage: alone {expected['usage']}, here {found['usage']}"
    if expected["choices"] != found["choices"]:
        pairs = zip(expected["choices"], found["choices"])
        differing = [f"alone {_shown(a)}, here {_shown(b)}" for a, b in pairs if a != b]
        return differing[0] if differing else f"{len(expected['choices'])} choices alone, here {len(found['choices'])}"
    return None


def _texts(choice):
    """The texts of a choice that grow as it is streamed."""
    message = choice.get("message", {})
    return choice.get("text", ""), message.get("content", ""), message.get("reasoning_content", "")


def _shown(value):
    return repr(value)[:900]
