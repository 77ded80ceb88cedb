"""Rates of requests that started at once, from the moments at which their tokens came, in seconds from the start."""


def rate(num_input, moments):
    """Prompt tokens a second where a token is all that was asked for; else output tokens a second while all generate,
    which is from when the last prompt is through until the first request ends."""
    start = max(request[0] for request in moments)
    end = min(request[-1] for request in moments)
    if all(len(request) == 1 for request in moments):
        return len(moments) * num_input / start
    num_tokens = sum(start < moment <= end for request in moments for moment in request)
    return num_tokens / (end - start) if num_tokens else None


def loads(text):
    """`1x512x1,8x128x128` as numbers, and each as text."""
    return {load: [int(number) for number in load.split("x")] for load in text.split(",")}


def small(load):
    """As much of a load as touches what is set up once."""
    concurrency, num_input, num_output = load
    return min(concurrency, 2), min(num_input, 512), min(num_output, 8)
