"""Cancellation and unload with a step in flight on the stand-in GPU: memory is freed, and other requests are
unaffected."""

import asyncio

import pytest

from harness import clients, deployments
from harness.clients import GrpcStream, generate
from harness.repository import STORIES, add_model
from harness.server import Server, assert_blocks_come_back

ON_GPU = {
    "gpu_device_ids": 0,
    "deterministic": "true",
    "max_tokens_in_paged_kv_cache": 16384,
    "cuda_graph_mode": "false",
}
PROMPTS = ["Once upon a time", "The fox", "A little girl named", "One day, the dog"]
OPTIONS = {"max_tokens": 24, "exclude_input_in_output": True}


@pytest.fixture
def explicit(repository, tmp_path):
    """A server whose GPU has little memory: the KV cache gets a share of what a load leaves of it."""
    add_model(repository, "alone", ON_GPU, checkpoint=STORIES)
    add_model(repository, "overlap", {**ON_GPU, "enable_trt_overlap": "true"}, checkpoint=STORIES)
    environment = {**deployments.stand_in(tmp_path / "stand_in"), "CUDA_STAND_IN_MEMORY_BYTES": str(1 << 30)}
    with Server(repository, "--model-control-mode=explicit", environment=environment) as server:
        yield server


def reload(server, model):
    """The model in place of all others."""
    for other in ["alone", "overlap"]:
        if server.model_state(other) == "READY":
            unload(server, other)
    assert server.load(model) is None


def unload(server, model):
    server.unload(model)
    server.wait_for_state(model, "UNAVAILABLE")


def num_blocks(server, model):
    """The blocks of its KV cache."""
    wanted = {("model", model), ("kv_cache_block_type", "max")}
    (value,) = [value for (_, labels), value in server.metrics().items() if wanted <= {*labels}]
    return value


async def texts_with(client, model, after_first):
    """The texts for all prompts; `after_first` gets the streams when each has received a token."""
    streams = [GrpcStream(client, model, prompt, stream=True, **OPTIONS) for prompt in PROMPTS]
    responses = [aiter(stream) for stream in streams]
    texts = [(await anext(one)).text or "" for one in responses]
    await after_first(streams)

    async def rest(index):
        async for response in responses[index]:
            texts[index] += response.text or ""

    ended = await asyncio.gather(*map(rest, range(len(PROMPTS))), return_exceptions=True)
    return [str(end) if isinstance(end, clients.Refused) else text for text, end in zip(texts, ended, strict=True)]


def expected_texts(server):
    """The text of each prompt alone, without overlap."""
    reload(server, "alone")
    return [generate(server, "alone", prompt, **OPTIONS).text for prompt in PROMPTS]


def test_an_unloaded_model_gives_all_gpu_memory_back(explicit):
    sizes = []
    for _ in range(3):
        reload(explicit, "overlap")
        generate(explicit, "overlap", PROMPTS[0], max_tokens=3)
        sizes.append(num_blocks(explicit, "overlap"))
    assert sizes[0] > 0 and len({*sizes}) == 1, sizes


def test_an_unload_lets_the_requests_on_a_gpu_finish(explicit):
    expected = expected_texts(explicit)
    reload(explicit, "overlap")

    async def main():
        async with clients.grpc(explicit) as client:

            async def unload_it(_):
                await asyncio.to_thread(explicit.unload, "overlap")

            return await texts_with(client, "overlap", unload_it)

    assert clients.run(main()) == expected
    explicit.wait_for_state("overlap", "UNAVAILABLE")
    assert explicit.load("overlap") is None
    assert generate(explicit, "overlap", PROMPTS[0], **OPTIONS).text == expected[0]


@pytest.mark.cancelling
def test_requests_that_are_cancelled_between_steps_change_no_other_answer(explicit):
    """With overlap a step of theirs is already under way."""
    expected = expected_texts(explicit)
    reload(explicit, "overlap")

    async def main():
        async with clients.grpc(explicit) as client:

            async def cancel_half(streams):
                for stream in streams[::2]:
                    stream.cancel()

            return await texts_with(client, "overlap", cancel_half)

    ended = clients.run(main())
    assert ended[1::2] == expected[1::2]
    assert all("cancelled" in end for end in ended[::2]), ended
    assert_blocks_come_back(explicit, "overlap")
