"""Clients of the server with OpenAI's API: good ones, which compare what they get, and bad ones."""

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import time

import watch
from bodies import CHAT, COMPLETIONS, Body
from clients import AWAY, guarded
from exchange import Stream, answer, close, connect, post, refusal
from models import BEHIND_FRONT, GUEST, WHOLE
from rude import stop_for
from transport import LIMIT_S, Failed, Gone, NotEndedOnce
from whole import joined, unlike

# The longest time to the next token of a client without a guide, and the processor time that the server may use in it,
# as other work of the machine makes tokens late, too. A guide once computed for half a minute while others waited.
STALL_S = 20
NEIGHBOUR = Body(COMPLETIONS, json.dumps({"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True}))
MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"model"',
    b'{"model": "direct"}',
    b'{"model": "direct", "prompt": }',
    b'{"model": "direct", "prompt": "a"} trailing',
    b'{"model": 5, "prompt": "a"}',
    b'{"model": "", "prompt": "a"}',
    b'{"model": "direct", "prompt": {"a": "b"}}',
    b'{"model": "direct", "prompt": ["a", 5]}',
    b'{"model": "direct", "prompt": "\xff\xfe"}',
    b'{"model": "direct", "prompt": "\\ud800"}',
    b'{"model": "direct", "prompt": "a", "max_tokens": NaN}',
    b'{"model": "direct", "prompt": "a", "temperature": 1e999}',
    b'{"model": "direct", "prompt": "a", "max_tokens": 99999999999999999999999999}',
    b'{"model": "direct", "prompt": "a", "stream": "yes"}',
    b'{"model": "direct", "prompt": "a", "n": -1}',
    b'{"model": "direct", "messages": "a"}',
    b'{"model": "direct", "messages": [5]}',
    b'{"model": "direct", "messages": [{"role": "user"}]}',
    b'{"model": "direct", "messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}}',
    b'{"model": "direct", "messages": [{"role": "user", "content": "a"}], "tools": {}}',
    b'{"model": "direct", "prompt": "a", "' + b"k" * 10000 + b'": 1}',
    b'{"model": "direct", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"model": "direct", "messages": ' + b"[" * 100_000,
    b"\x00" * 300,
    b"x" * 1_000_000,
]
GARBAGE = [
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
    b"POST /v1/completions HTTP/9.9\r\n\r\n",
    b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\r\n" * 100,
]
HEADERS = [{}, {"Content-Encoding": "gzip"}, {"Content-Encoding": "br"}, {"Content-Type": "text/plain"}, {"Content-Length": "3"}]


def pick(world, rng, models):
    """A random body, and a model for it."""
    return rng.choice(world.bodies), rng.choice(models)


async def judge(world, how, model, body, exchange, *, cut_off=False):
    """Compares what an exchange returns with the answer that the request gets alone."""
    how = f"front, {how}"
    world.tally.count(f"{how}: requests")
    try:
        found = await asyncio.to_thread(guarded, exchange)
        world.tally.count(f"{how}: answered")
    except Failed as failed:
        found = {"error": failed.text}
        world.tally.count(f"{how}: refused")
        if body.guide is not None and failed.code == "rate_limit_exceeded":
            world.tally.count("costly guides that were refused as busy")
            return
    except Gone as gone:
        world.lost(how, gone)
        return
    except NotEndedOnce as fault:
        if not world.lost(how, fault, is_fault=False):
            world.tally.finding("a request did not end once", f"{how}, {model}, {body}: {fault}")
        return
    if model == GUEST and any(word in found.get("error", "") for word in (*AWAY, "there is no model")):
        world.tally.count("requests for a model that was away")
        return
    expected = await asyncio.to_thread(world.oracle.alone_behind_front, body)
    differs = unlike(expected, found, cut_off=cut_off)
    world.tally.count("answers compared")
    if body.guide is not None:
        error = found.get("error")
        outcome = "answered" if error is None else "told to be too ambiguous" if "ambiguous" in error else "refused"
        world.tally.count(f"guide of {body.guide}: {outcome}")
    if differs and not world.lost(how, differs, is_fault=False):
        world.tally.finding("another answer than alone", f"{how}, {model}, {body}: {differs}")


def _whole(world, rng, model, body):
    """An exchange whose answer is not streamed."""

    def exchange():
        connection = connect(world.front)
        try:
            post(connection, body.path, body.of(model), compressed=rng.random() < 0.2)
            return answer(connection, model)
        finally:
            close(connection)

    return exchange


def _streams(model, body, **more):
    """The fields of a body whose answer is streamed."""
    return body.of(model, stream=True, stream_options={"include_usage": True}, **more)


async def asks(world, rng):
    """Waits for whole answers."""
    body, model = pick(world, rng, BEHIND_FRONT + WHOLE)
    await judge(world, "whole", model, body, _whole(world, rng, model, body))


async def streams(world, rng):
    """Reads streams."""
    body, model = pick(world, rng, BEHIND_FRONT)
    if body.whole_only:
        return
    more = {"stream_interval": rng.randint(2, 5)} if rng.random() < 0.3 else {}

    def exchange():
        connection = connect(world.front)
        try:
            post(connection, body.path, _streams(model, body, **more))
            return joined(Stream(connection, model))
        finally:
            close(connection)

    await judge(world, "stream", model, body, exchange)


async def keeps_its_connection(world, rng):
    """Sends one request after the other on one connection."""
    try:
        connection = await asyncio.to_thread(guarded, connect, world.front)
    except Gone as gone:
        world.lost("front, one connection", gone)
        return
    try:
        for _ in range(rng.randint(2, 6)):
            body, model = pick(world, rng, [model for model in BEHIND_FRONT if model != GUEST])
            is_stream = not body.whole_only and rng.random() < 0.5

            def exchange():
                if is_stream:
                    post(connection, body.path, _streams(model, body))
                    return joined(Stream(connection, model))
                post(connection, body.path, body.of(model))
                return answer(connection, model)

            await judge(world, "one connection", model, body, exchange)
            if connection.sock is None or world.closing.is_set():
                # The front has closed it.
                break
    finally:
        close(connection)


async def is_a_neighbour(world, rng):
    """Streams what costs little, beside whatever others send, and looks at the time to each token."""
    model = rng.choice(["direct", "guessing", "queued"])
    pid = world.server.process.pid

    def exchange():
        connection = connect(world.front)
        chunks = []
        try:
            before, computed_before = time.monotonic(), watch.processor_s(pid)
            post(connection, NEIGHBOUR.path, _streams(model, NEIGHBOUR))
            for chunk in Stream(connection, model):
                chunks.append(chunk)
                now, computed = time.monotonic(), watch.processor_s(pid)
                _look_at_pause(world, model, now - before, computed - computed_before)
                before, computed_before = now, computed
            return joined(chunks)
        finally:
            close(connection)

    await judge(world, "neighbour", model, NEIGHBOUR, exchange)


def _look_at_pause(world, model, pause_s, computed_s):
    """Checks the time until a token, and the processor time that the server used in it."""
    world.slowest_token_s = max(world.slowest_token_s, pause_s)
    if min(pause_s, computed_s) > STALL_S:
        told = f"{pause_s:.1f} s for a token of {model}, in which the server computed for {computed_s:.1f} s"
        world.tally.finding("a neighbour waited", told)


async def has_a_costly_guide(world, rng):
    """Sends guides that need much work. Others must not notice."""
    body, model = rng.choice(world.costly), rng.choice([model for model in BEHIND_FRONT if model != GUEST])

    def exchange():
        connection = connect(world.front)
        try:
            post(connection, body.path, _streams(model, body))
            return joined(Stream(connection, model))
        finally:
            close(connection)

    await judge(world, "costly guide", model, body, exchange if rng.random() < 0.5 else _whole(world, rng, model, body))
    await world.pause(rng.uniform(0, 3))


async def reads_slowly(world, rng):
    """A stream whose client reads slowly, with a small receive window."""
    body, model = pick(world, rng, BEHIND_FRONT)
    if body.whole_only:
        return

    def exchange():
        connection = connect(world.front, receive_buffer=1024)
        chunks = []
        try:
            post(connection, body.path, _streams(model, body))
            for chunk in Stream(connection, model):
                chunks.append(chunk)
                if not world.closing.is_set():
                    time.sleep(rng.choice([0, 0, 0.02, 0.3]))
            return joined(chunks)
        finally:
            close(connection)

    await judge(world, "slow reader", model, body, exchange)


async def leaves(world, rng):
    """A stream whose client leaves in the middle: what it got is the beginning of the answer."""
    body, model = pick(world, rng, BEHIND_FRONT)
    num_chunks = rng.randint(0, 12)
    if body.whole_only:
        return

    def exchange():
        connection = connect(world.front)
        chunks = []
        resets = rng.random() < 0.5
        try:
            post(connection, body.path, _streams(model, body))
            for chunk in Stream(connection, model):
                if len(chunks) >= num_chunks:
                    world.tally.count("front: streams that were left")
                    break
                chunks.append(chunk)
            return joined(chunks, cut_off=True)
        finally:
            close(connection, resets=resets)

    await judge(world, "leaves", model, body, exchange, cut_off=True)
    await asyncio.sleep(rng.uniform(0, 0.2))


async def leaves_unread(world, rng):
    """Sends a request, complete or in part, reads nothing, and leaves at once or seconds later."""
    body, model = pick(world, rng, BEHIND_FRONT + WHOLE)
    fields = body.of(model) if body.whole_only or rng.random() < 0.5 else _streams(model, body)
    content = json.dumps(fields).encode()
    head = f"POST {body.path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    message = head.encode() + content
    if rng.random() < 0.3:
        message = message[: rng.randrange(1, len(message))]

    def send():
        with contextlib.suppress(OSError):
            connection = connect(world.front, receive_buffer=1024)
            connection.sock.sendall(message)
            deadline = time.monotonic() + rng.choice([0, 0, 0.05, 0.3, 5])
            while time.monotonic() < deadline and not world.closing.is_set():
                time.sleep(0.01)
            close(connection, resets=rng.random() < 0.5)

    await asyncio.to_thread(send)
    world.tally.count("front: requests that nobody waits for")
    await asyncio.sleep(rng.uniform(0.1, 0.5))


async def sends_nonsense(world, rng):
    """Bodies that are refused with an error of the API, and bytes that are no HTTP."""
    if rng.random() < 0.2:
        await asyncio.to_thread(_send_garbage, world, rng)
        return
    path = rng.choice([COMPLETIONS, CHAT, "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/nothing"])
    method = rng.choice(["POST", "POST", "POST", "POST", "GET", "PUT"])
    content, headers = rng.choice(MALFORMED), rng.choice(HEADERS)
    if len(content) < 3 and "Content-Length" in headers:
        headers = {}

    def exchange():
        connection = http.client.HTTPConnection(world.front.address, timeout=LIMIT_S)
        try:
            connection.request(method, path, content, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            answered = response.read()
            if response.status >= 400:
                raise refusal(response, answered, "direct")
        finally:
            connection.close()

    told = f"{method} {path}, {headers}, {content[:100]}"
    try:
        await asyncio.to_thread(guarded, exchange)
        world.tally.count("front, nonsense: taken")
    except Failed as failed:
        world.tally.count("front, nonsense: refused")
        if failed.status >= 500:
            world.tally.finding("nonsense is an error of the server", f"{told}: {failed.status} {failed.text}")
    except Gone as gone:
        world.lost("front, nonsense", gone, is_fault=False)
        world.tally.count("front, nonsense: connection closed")
    except NotEndedOnce as fault:
        if not world.lost("front, nonsense", fault, is_fault=False):
            world.tally.finding("nonsense is not refused as an error", f"{told}: {fault}")
    await asyncio.sleep(rng.uniform(0.05, 0.3))


def _send_garbage(world, rng):
    message = rng.choice([*GARBAGE, rng.randbytes(500), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(100)])
    host, port = world.front.address.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 10) as s:
        s.settimeout(2)
        s.sendall(message)
        s.recv(1000)
    world.tally.count("front, nonsense: garbage")


async def stops_the_front(world, rng):
    """SIGSTOP and SIGCONT, or SIGHUP, which has it read its files again."""
    await world.pause(rng.uniform(0, min(15, world.round_s / 3)))
    front = world.front.process
    if world.closing.is_set() or front.poll() is not None:
        return
    if rng.random() < 0.3:
        front.send_signal(signal.SIGHUP)
        world.tally.count("front: SIGHUP")
        return
    await stop_for(front.pid, rng.choice([0.05, 0.3, 1, 2]))
    world.tally.count("front: SIGSTOP and SIGCONT")


POLITE = [asks, streams, keeps_its_connection]
# The other actions, and the number of clients for each.
RUDE = [
    (is_a_neighbour, 1),
    (has_a_costly_guide, 1),
    (reads_slowly, 2),
    (leaves, 2),
    (leaves_unread, 1),
    (sends_nonsense, 1),
    (stops_the_front, 1),
]
