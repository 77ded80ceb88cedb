"""Rates of requests that start together, from the arrival times of their tokens, in seconds from the
start."""


def rate(num_input, moments):
    """Prompt tokens per second if one output token was requested; otherwise output tokens per second while
    all requests generate: from the end of the last prompt until the first request ends."""
    start = max(request[0] for request in moments)
    end = min(request[-1] for request in moments)
    if all(len(request) == 1 for request in moments):
        return len(moments) * num_input / start
    num_tokens = sum(start < moment <= end for request in moments for moment in request)
    return num_tokens / (end - start) if num_tokens else None


def loads(text):
    """Parses `1x512x1,8x128x128`: each load's text and its numbers."""
    return {load: [int(number) for number in load.split("x")] for load in text.split(",")}


def small(load):
    """A small part of a load, enough to trigger all one-time initialisation."""
    concurrency, num_input, num_output = load
    return min(concurrency, 2), min(num_input, 512), min(num_output, 8)
