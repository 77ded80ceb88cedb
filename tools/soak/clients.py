"""Well-behaved clients: each sends random requests, reads all responses, and compares them."""

import asyncio
import collections
import http.client

from answers import answer_of, difference
from models import DECOUPLED, DECOUPLED_IDS, GUEST, WHOLE
from transport import Failed, GenerateStream, Gone, GrpcStream, NotEndedOnce, generate, grpc_unary, infer, within_limit

# Triton's errors for requests to a model that is unloaded or being loaded.
AWAY = ("is not ready", "is not found", "not available", "unloading", "has no available versions", "unknown model")


def pick(world, rng, models, ids_models=(), whole=False):
    """A random content, and a model for it."""
    while True:
        content = rng.choice(world.contents)
        if content.whole_only and not whole:
            continue
        if content.is_ids and not ids_models:
            continue
        return content, rng.choice(ids_models if content.is_ids else models)


async def judge(world, how, model, content, responses, *, cut_off=False):
    """Compares the responses with the answer that the request gets alone. `responses` is awaited: it ends, or
    raises `Failed`."""
    world.tally.count(f"{how}: requests")
    world.tally.tried(content)
    try:
        found = answer_of(await responses, content.has_beams)
        world.tally.count(f"{how}: answered")
    except Failed as failed:
        found = {"error": failed.text}
        world.tally.count(f"{how}: refused")
    except Gone as gone:
        world.lost(how, gone)
        return
    except NotEndedOnce as fault:
        if not world.lost(how, fault, is_fault=False):
            world.tally.finding("a request did not end once", f"{how}, {model}, {content}: {fault}")
        return
    if model == GUEST and any(word in found.get("error", "") for word in AWAY):
        world.tally.count("requests for a model that was away")
        return
    expected = await asyncio.to_thread(world.oracle.alone, content)
    differs = difference(expected, found, cut_off=cut_off, has_beams=content.has_beams)
    world.tally.count("answers compared")
    world.tally.count("tokens compared", sum(map(len, found.get("ids", []))))
    if differs and not world.lost(how, differs, is_fault=False):
        world.tally.finding("another answer than alone", f"{how}, {model}, {content}: {differs}")


def guarded(call, *arguments):
    """A blocking call; a broken connection becomes `Gone`."""
    try:
        return call(*arguments)
    except (Failed, Gone, NotEndedOnce):
        raise
    except (OSError, EOFError, ValueError, http.client.HTTPException) as error:
        raise Gone(f"{type(error).__name__}: {error}") from None


async def over_generate(world, rng):
    content, model = pick(world, rng, DECOUPLED + WHOLE, ["ids"], whole=True)
    call = asyncio.to_thread(lambda: [guarded(generate, world.server, model, content)])
    await judge(world, "/generate", model, content, call)


async def over_generate_stream(world, rng):
    content, model = pick(world, rng, DECOUPLED, DECOUPLED_IDS)
    more = {"stream_interval": rng.randint(1, 5)} if rng.random() < 0.4 else {}

    def exchange():
        stream = GenerateStream(world.server, model, content, **more)
        try:
            return list(stream)
        finally:
            stream.close()

    await judge(world, "/generate_stream", model, content, asyncio.to_thread(guarded, exchange))


async def over_infer(world, rng):
    content, model = pick(world, rng, WHOLE, whole=True)
    call = asyncio.to_thread(lambda: [guarded(infer, world.server, model, content)])
    await judge(world, "/infer", model, content, call)


async def over_grpc_unary(world, rng):
    content, model = pick(world, rng, WHOLE, whole=True)

    async def exchange():
        return [await grpc_unary(world.grpc, model, content)]

    await judge(world, "gRPC ModelInfer", model, content, exchange())


async def over_grpc_stream(world, rng):
    content, model = pick(world, rng, DECOUPLED, DECOUPLED_IDS)
    stream = GrpcStream(world.grpc, model, [content])

    async def exchange():
        responses = []
        async for _, response, error, _ in stream.responses():
            if error:
                raise error
            responses.append(response)
        return responses

    await judge(world, "gRPC stream", model, content, within_limit(exchange()))


async def over_shared_grpc_stream(world, rng):
    """Several concurrent requests on one stream, each of which must end once."""
    model = rng.choice([model for model in DECOUPLED if model != GUEST])
    contents = [pick(world, rng, [model])[0] for _ in range(rng.randint(2, 5))]
    first = world.next_id(len(contents))
    ids = [f"shared {first + n}" for n in range(len(contents))]
    stream = GrpcStream(world.grpc, model, contents, ids=ids)
    responses = collections.defaultdict(list)
    errors = {}
    ended = set()

    async def exchange():
        async for id, response, error, is_final in stream.responses():
            if is_final:
                ended.add(id)
            if error:
                errors[id] = error
            else:
                responses[id].append(response)

    try:
        await within_limit(exchange())
    except (Failed, Gone) as gone:
        world.lost("gRPC stream of several", gone)
        return
    except NotEndedOnce as fault:
        if not world.lost("gRPC stream of several", fault, is_fault=False):
            world.tally.finding("a request did not end once", f"gRPC stream of several, {model}, {contents}: {fault}")
        return

    async def of(id):
        if id in errors:
            raise errors[id]
        return responses[id]

    for id, content in zip(ids, contents):
        if id not in ended:
            world.tally.count("gRPC stream of several: errors that do not say whose they are")
            continue
        await judge(world, "gRPC stream of several", model, content, of(id))


POLITE = [
    over_generate,
    over_generate_stream,
    over_infer,
    over_grpc_unary,
    over_grpc_stream,
    over_shared_grpc_stream,
]
