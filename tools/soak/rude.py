"""Badly behaved clients and operators: they disconnect, read slowly, send invalid requests, stop the server
for a while, and unload models."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import time

import grpc
import numpy
from tritonclient.grpc import service_pb2, service_pb2_grpc

from contents import Content
from clients import guarded, judge, pick
from models import CANCELLED_OVER_GRPC, DECOUPLED, DECOUPLED_IDS, GUEST, add_guest
from transport import LIMIT_S, Failed, GenerateStream, Gone, GrpcStream, NotEndedOnce, body_of, within_limit

# A machine with other work may take minutes for it.
UNLOAD_LIMIT_S = 600
PATIENT = [model for model in DECOUPLED if model != GUEST]
MALFORMED_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text_input"',
    b'{"text_input": }',
    b'{"text_input": "a"',
    b'{"text_input": "a"} trailing',
    b'{"max_tokens": 1}',
    b'{"text_input": 5}',
    b'{"text_input": null}',
    b'{"text_input": ["a", "b"]}',
    b'{"text_input": {"a": "b"}}',
    b'{"text_input": "\xff\xfe"}',
    b'{"text_input": "\\ud800"}',
    b'{"text_input": "a", "max_tokens": NaN}',
    b'{"text_input": "a", "temperature": 1e999}',
    b'{"text_input": "a", "max_tokens": 99999999999999999999999999}',
    b'{"text_input": "a", "max_tokens": null}',
    b'{"text_input": "a", "stop": ["a"]}',
    b'{"text_input": "a", "max_tokens": 1, "max_tokens": 2}',
    b'{"text_input": "a", "' + b"k" * 10000 + b'": 1}',
    b'{"text_input": "a", "messages": "' + b"[" * 5000 + b'"}',
    b'{"text_input": "a", "sampling_parameters": "' + b'{\\"a\\":' * 200 + b'"}',
    b'{"text_input": "a", "guided_json": "' + b'{\\"items\\":' * 200 + b"1" + b"}" * 200 + b'"}',
    # Not deeper: Triton's own parser is recursive.
    b'{"text_input": ' + b"[" * 60 + b"]" * 60 + b"}",
    b"\x00" * 300,
    b"x" * 1_000_000,
]


async def reads_slowly(world, rng):
    """A stream whose client reads slowly, with a small receive window."""
    content, model = pick(world, rng, DECOUPLED, DECOUPLED_IDS)

    def exchange():
        stream = GenerateStream(world.server, model, content, receive_buffer=1024)
        responses = []
        try:
            for response in stream:
                responses.append(response)
                if not world.closing.is_set():
                    time.sleep(rng.choice([0, 0, 0.02, 0.3]))
            return responses
        finally:
            stream.close()

    await judge(world, "/generate_stream, slow reader", model, content, asyncio.to_thread(guarded, exchange))


async def hangs_up(world, rng):
    """A stream whose client disconnects: its responses until then are a prefix of the answer."""
    content, model = pick(world, rng, DECOUPLED, DECOUPLED_IDS)
    num_responses = rng.randint(0, 12)

    def exchange():
        stream = GenerateStream(world.server, model, content)
        responses = []
        try:
            for response in stream:
                if len(responses) >= num_responses:
                    world.tally.count("HTTP streams that were left")
                    break
                responses.append(response)
            return responses
        finally:
            stream.close()

    call = asyncio.to_thread(guarded, exchange)
    await judge(world, "/generate_stream, hangs up", model, content, call, cut_off=True)
    await asyncio.sleep(rng.uniform(0, 0.2))


async def does_not_wait(world, rng):
    """Sends an HTTP request, complete or in part, and closes the connection without reading."""
    content, model = pick(world, rng, PATIENT)
    how = rng.choice(["generate", "generate_stream"])
    body = body_of(content, **({"stream": True} if how == "generate_stream" else {}))
    head = f"POST /v2/models/{model}/{how} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    message = head + body
    if rng.random() < 0.5:
        message = message[: rng.randrange(1, len(message))]

    def send():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", world.server.http_port), 10) as s:
            s.sendall(message)
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 0.1))

    await asyncio.to_thread(send)
    world.tally.count("HTTP requests that nobody waits for")
    await asyncio.sleep(rng.uniform(0.1, 0.5))


async def cancels_over_grpc(world, rng):
    """Cancels a gRPC call, rarely enough for server 2.51 to survive."""
    if time.monotonic() < world.next_cancellation:
        await asyncio.sleep(0.2)
        return
    world.next_cancellation = time.monotonic() + world.cancel_every_s
    content, model = pick(world, rng, [CANCELLED_OVER_GRPC])
    stream = GrpcStream(world.grpc, model, [content])
    num_responses = rng.randint(0, 12)

    async def exchange():
        responses = []
        async for _, response, error, _ in stream.responses():
            if error:
                raise error
            if len(responses) >= num_responses and not stream.cancelled:
                world.tally.count("gRPC calls that were cancelled")
                stream.cancel()
                continue
            responses.append(response)
        return responses

    await judge(world, "gRPC stream, cancelled", model, content, within_limit(exchange()), cut_off=True)


async def is_impatient(world, rng):
    """A request with a time limit ends with a partial answer; in Triton's backlog it ends with an error."""
    content, model = pick(world, rng, PATIENT)
    timeout_us = rng.choice([1, 1000, 20_000, 200_000])
    world.tally.options["timeout"] += 1

    def exchange_over_http():
        stream = GenerateStream(world.server, model, content, timeout=timeout_us)
        try:
            return list(stream)
        finally:
            stream.close()

    async def exchange_over_grpc():
        responses = []
        async for _, response, error, _ in GrpcStream(world.grpc, model, [content], timeout=timeout_us).responses():
            if error and "timeout of the corresponding sequence has been expired" in error.text:
                world.tally.count("requests whose time was over in Triton's backlog")
                world.expired[model] += 1
                return []
            if error:
                raise error
            responses.append(response)
        return responses

    if rng.random() < 0.5:
        call = asyncio.to_thread(guarded, exchange_over_http)
        await judge(world, "/generate_stream, time limit", model, content, call, cut_off=True)
    else:
        call = within_limit(exchange_over_grpc())
        await judge(world, "gRPC stream, time limit", model, content, call, cut_off=True)
    await asyncio.sleep(rng.uniform(0, 0.2))


async def is_stopped(world, rng):
    """A request that is stopped by another one with its id. The model has one instance, because another
    instance does not know the id."""
    content, model = pick(world, rng, ["guessing"])
    id = f"to be stopped {world.next_id()}"
    stream = GrpcStream(world.grpc, model, [content], ids=[id])
    num_responses = rng.randint(0, 8)
    stops = []

    async def exchange():
        responses = []
        async for _, response, error, _ in stream.responses():
            if error:
                raise error
            responses.append(response)
            if len(responses) > num_responses and not stops:
                stops.append(asyncio.create_task(_stop(world, model, id)))
        return responses

    await judge(world, "gRPC stream, stopped", model, content, within_limit(exchange()), cut_off=True)
    await asyncio.gather(*stops)


async def _stop(world, model, id):
    """Sends a stop request, which is answered whether or not its target is still running."""
    world.tally.count("stop requests")
    content = Content("a", ())
    try:

        async def exchange():
            async for _ in GrpcStream(world.grpc, model, [content], ids=[id], stop=True, stream=False).responses():
                pass

        await within_limit(exchange())
    except (Failed, Gone) as gone:
        world.lost("stop request", gone)
    except NotEndedOnce as fault:
        if not world.lost("stop request", fault, is_fault=False):
            world.tally.finding("a request did not end once", f"stop request, {model}: {fault}")


async def is_twins(world, rng):
    """Two concurrent requests with one id: at least one is served; the other is rejected if they overlap."""
    content, model = pick(world, rng, ["guessing"])
    id = f"twin {world.next_id()}"

    async def one():
        responses = []
        async for _, response, error, _ in GrpcStream(world.grpc, model, [content], ids=[id]).responses():
            if error and "in flight" in error.text:
                world.tally.count("request ids that were in flight")
                return None
            if error:
                raise error
            responses.append(response)
        return responses

    async def judged(responses):
        if responses is not None:

            async def known():
                if isinstance(responses, BaseException):
                    raise responses
                return responses

            await judge(world, "gRPC stream, twins", model, content, known())

    both = await asyncio.gather(within_limit(one()), within_limit(one()), return_exceptions=True)
    if both == [None, None]:
        world.tally.finding("both requests of one id were refused", f"{model}, {content}")
    for responses in both:
        await judged(responses)


async def sends_nonsense_over_http(world, rng):
    """Invalid request bodies, and bytes that are not HTTP."""
    model = rng.choice(PATIENT + ["full"])

    def exchange():
        connection = http.client.HTTPConnection("127.0.0.1", world.server.http_port, timeout=LIMIT_S)
        try:
            body = rng.choice(MALFORMED_BODIES)
            path = rng.choice(["generate", "generate_stream", "infer", "nothing", "versions/7/generate"])
            headers = {}
            if path == "infer" and rng.random() < 0.5:
                body, headers = _bad_infer(rng)
            connection.request(rng.choice(["POST", "POST", "POST", "GET", "DELETE"]), f"/v2/models/{model}/{path}", body, headers)
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()

    def garbage():
        message = rng.choice(
            [
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(100),
                b"POST /v2/models/full/generate HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                b"POST /v2/models/full/generate HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
                b"POST /v2/models/full/generate HTTP/9.9\r\n\r\n",
                b"GET " + b"/" * 5000 + b" HTTP/1.1\r\n\r\n",
                b"\r\n" * 100,
                rng.randbytes(500),
            ]
        )
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", world.server.http_port), 10) as s:
            s.settimeout(2)
            s.sendall(message)
            s.recv(1000)
        return "garbage"

    try:
        status = await asyncio.to_thread(guarded, exchange if rng.random() < 0.8 else garbage)
        world.tally.count(f"HTTP nonsense: {'garbage' if status == 'garbage' else 'taken' if status == 200 else 'refused'}")
    except Gone as gone:
        world.lost("HTTP nonsense", gone, is_fault=False)
        world.tally.count("HTTP nonsense: connection closed")
    await asyncio.sleep(rng.uniform(0.05, 0.3))


def _bad_infer(rng):
    tensor = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
    changes = [
        {"shape": [2, 1]},
        {"shape": [1, 1, 1]},
        {"shape": [-1]},
        {"shape": [2**40, 2**40]},
        {"shape": []},
        {"datatype": "INT32"},
        {"datatype": "FLOAT"},
        {"data": [[["a"]], "b"]},
        {"data": "a"},
        {"name": "prompt"},
        {"parameters": {"binary_data_size": 2**40}},
        {"parameters": {"binary_data_size": 3}},
    ]
    body = json.dumps({"inputs": [{**tensor, **rng.choice(changes)}]}).encode()
    length = rng.choice([None, None, len(body) - 1, len(body) + 100, 0])
    return body, {} if length is None else {"Inference-Header-Content-Length": str(length)}


async def sends_nonsense_over_grpc(world, rng):
    """Tensors whose bytes do not match their shapes, and other invalid requests."""
    text = numpy.uint32(1).tobytes() + b"a"
    request = service_pb2.ModelInferRequest(model_name=rng.choice(["full", "full", "no model", "direct"]))
    kind = rng.randrange(8)
    if kind:
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
        raw = text
        if kind == 1:
            raw = text[:3]
        elif kind == 2:
            raw = numpy.uint32(2**31).tobytes() + b"a"
        elif kind == 3:
            tensor.shape[:] = [1, 2**31]
        elif kind == 4:
            tensor.shape[:] = [-1, 1]
        elif kind == 5:
            tensor.datatype = "INT32"
        elif kind == 6:
            raw = numpy.uint32(2).tobytes() + b"\xff\xfe"
        else:
            request.parameters["max_tokens"].bool_param = True
        request.raw_input_contents.append(raw)
    try:
        await service_pb2_grpc.GRPCInferenceServiceStub(world.channel).ModelInfer(request, timeout=LIMIT_S)
        world.tally.count("gRPC nonsense: taken")
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            world.lost("gRPC nonsense", error, is_fault=False)
        world.tally.count("gRPC nonsense: refused")
    await asyncio.sleep(rng.uniform(0.05, 0.3))


async def takes_a_model_away(world, rng):
    """Unloads a model under load and loads it again, or loads another configuration over it."""
    await world.pause(rng.uniform(0, min(6, world.round_s / 3)))
    if world.closing.is_set():
        return

    def act():
        world.guest_version += 1
        if rng.random() < 0.5:
            world.tally.count("models loaded over themselves")
        else:
            world.server.unload(GUEST)
            deadline = time.monotonic() + UNLOAD_LIMIT_S
            while world.server.model_state(GUEST) != "UNAVAILABLE":
                if time.monotonic() > deadline:
                    world.tally.finding("a model does not unload", f"{GUEST} after {UNLOAD_LIMIT_S} s")
                    return
                time.sleep(0.05)
            world.tally.count("models unloaded and loaded")
        add_guest(world.repository, world.guest_version)
        error = world.server.load(GUEST)
        if error:
            world.tally.finding("a model does not load", f"{GUEST}: {error}")

    try:
        await asyncio.to_thread(guarded, act)
    except Gone as gone:
        world.lost("loading", gone)


async def stops_the_server(world, rng):
    """SIGSTOP, followed by SIGCONT."""
    await world.pause(rng.uniform(0, min(15, world.round_s / 3)))
    if world.closing.is_set() or world.server.process.poll() is not None:
        return
    await stop_for(world.server.process.pid, rng.choice([0.05, 0.3, 1, 2]))
    world.tally.count("SIGSTOP and SIGCONT")


async def stop_for(pid, seconds):
    """Stops a process, and lets it go on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


# The rude actions, and the number of clients for each.
RUDE = [
    (reads_slowly, 2),
    (hangs_up, 2),
    (does_not_wait, 1),
    (cancels_over_grpc, 1),
    (is_impatient, 1),
    (is_stopped, 1),
    (is_twins, 1),
    (sends_nonsense_over_http, 1),
    (sends_nonsense_over_grpc, 1),
    (takes_a_model_away, 1),
    (stops_the_server, 1),
]
