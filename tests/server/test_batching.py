"""Batching invariance: under every scheme, policy and chunk size, with shared blocks and with pauses, each
request gets, bit for bit, what it gets alone."""

import asyncio
import itertools

import pytest

from harness import clients, seeds
from harness.clients import described
from harness.repository import STORIES

SHARED = (
    "One day, Mina went to the old mill. The sky was grey. She had a golden key that she loved more than anything. "
    "But when she looked, the key was gone! "
)
PROMPTS = [
    "Once upon a time",
    SHARED + "She looked under the bench.",
    SHARED + "She looked behind a stone, and even in the cave, but it was nowhere.",
    SHARED,
    "Tell me a story about a fox.",
    "The",
]
# Room for a few sequences, in small blocks: always full.
TIGHT = {
    "max_seq_len": 192,
    "max_num_requests": 6,
    "max_beam_width": 4,
    "tokens_per_block": 4,
    "max_tokens_in_paged_kv_cache": 384,
}
WINDOW = {"max_attention_window_size": "40,24", "sink_token_length": 4}

SCHEMES = ["V1", "inflight_batching", "inflight_fused_batching"]
POLICIES = ["max_utilization", "guaranteed_no_evict", "static_batch"]


def combinations():
    """Every meaningful combination, by a descriptive name."""
    for scheme, policy, chunked, reuse, windowed, overlap in itertools.product(
        SCHEMES, POLICIES, [True, False], [True, False], [True, False], [True, False]
    ):
        if scheme == "V1" and (policy == "max_utilization" or overlap or chunked):
            continue
        parameters = {
            **TIGHT,
            "gpt_model_type": scheme,
            "batch_scheduler_policy": policy,
            "enable_chunked_context": str(chunked).lower(),
            "enable_kv_cache_reuse": str(reuse).lower(),
            "enable_trt_overlap": str(overlap).lower(),
            **({"max_num_tokens": 32} if chunked else {}),
            **({"context_chunking_policy": "equal_progress"} if chunked and reuse else {}),
            **(WINDOW if windowed else {}),
        }
        words = [scheme, policy, "chunked" * chunked, "reuse" * reuse, "window" * windowed, "overlap" * overlap]
        yield "-".join(filter(None, words)), parameters, windowed


def requests(scheme):
    """A dozen requests of every kind, two for several sequences, and two with beams; V1 does not stream."""
    for number in range(16):
        rng = seeds.rng("batching", number)
        seed = rng.randrange(1 << 32)
        options = {"max_tokens": rng.choice([1, 7, 20, 40]), "seed": seed, "stream": scheme != "V1" and number % 3 > 0}
        if number % 2:
            options.update(temperature=1.0, top_k=20)
        if number % 4 == 0:
            options["stop"] = "the"
        if number % 5 == 0:
            options["priority"] = 1
        if number % 3 == 0:
            options["logprobs"] = number % 7
        if number % 4 == 1:
            options.update(return_log_probs=True, return_context_logits=True, return_generation_logits=True)
        if number >= 12:
            options.update(n=number - 9, temperature=1.0)
        if number >= 14:
            beams = {"beam_width": number - 11, "length_penalty": 15.0 - number, "return_log_probs": True}
            options = {"max_tokens": [20, 40][number % 2], "seed": seed, "stream": False, **beams}
        yield rng.choice(PROMPTS), options


def of_one_sequence(options):
    """The single-sequence requests whose answers a request for several sequences gets."""
    options = dict(options)
    return [{**options, "seed": options["seed"] + i} for i in range(options.pop("n", 1))]


def serve_alone(server, model, asked):
    """The answer that each request gets alone, with each of its sequences requested separately."""
    return [
        [sequence for own in of_one_sequence(options) for sequence in serve(server, model, [(prompt, own)])[0]]
        for prompt, options in asked
    ]


def serve(server, model, asked):
    """All requests concurrently, each on its own stream: text and reason of each sequence, and the requested
    outputs bit by bit."""

    async def main():
        async with clients.grpc(server) as client:
            options = {"exclude_input_in_output": True}
            names = {"priority": "request_priority"}

            async def one(prompt, own):
                own = {names.get(name, name): value for name, value in own.items()}
                return await clients.stream(client, model, prompt, **options, **own)

            answers = await asyncio.gather(*(one(*request) for request in asked))
            return [[described(sequence) for sequence in answer.sequences()] for answer in answers]

    return clients.run(main())


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    add_model = deployment.add_model
    repository = tmp_path_factory.mktemp("batching") / "repository"
    # On the stand-in for a GPU the model has one layer, and so one window.
    window = {**WINDOW, **({"max_attention_window_size": 24} if deployment.on_gpu else {})}
    for name, parameters, windowed in combinations():
        add_model(repository, name, {**parameters, **(window if windowed else {})}, checkpoint=STORIES)
    add_model(repository, "alone", {"max_seq_len": 192, "max_beam_width": 4}, checkpoint=STORIES)
    add_model(repository, "alone-window", {"max_seq_len": 192, "max_beam_width": 4, **window}, checkpoint=STORIES)
    contiguous = {"max_seq_len": 192, "max_num_requests": 6, "max_beam_width": 4, "kv_cache_type": "contiguous"}
    add_model(repository, "contiguous", contiguous, checkpoint=STORIES)
    pair = "instance_group [{ count: 2 kind: KIND_CPU }]"
    add_model(repository, "pair", {"max_seq_len": 192, "max_beam_width": 4}, fields=pair, checkpoint=STORIES)
    add_model(repository, "neighbour", {"max_seq_len": 192, "max_beam_width": 4}, checkpoint=STORIES)
    add_model(repository, "int8", {**TIGHT, "kv_cache_dtype": "int8"}, checkpoint=STORIES)
    add_model(repository, "int8-alone", {"max_seq_len": 192, "max_beam_width": 4, "kv_cache_dtype": "int8"}, checkpoint=STORIES)
    with deployment.server(repository, "--model-control-mode=explicit") as server:
        yield server


@pytest.fixture(scope="module")
def alone(server):
    """The answer that each request gets alone, without and with the window."""
    answers = {}
    for windowed, model in enumerate(["alone", "alone-window"]):
        assert server.load(model) is None
        answers[bool(windowed)] = serve_alone(server, model, requests(""))
        server.unload(model)
    assert answers[False] != answers[True], "the window makes a difference"
    return answers


@pytest.mark.deployments("iterative")
@pytest.mark.parametrize(("name", "parameters", "windowed"), list(combinations()), ids=lambda it: str(it)[:60])
def test_a_combination_gives_each_request_what_it_gets_alone(server, alone, name, parameters, windowed):
    assert_same_as_alone(server, alone, name, parameters, windowed)


# Each value of each parameter occurs.
@pytest.mark.deployments("queued", "gpu")
@pytest.mark.parametrize(("name", "parameters", "windowed"), list(combinations())[::17], ids=lambda it: str(it)[:60])
def test_some_combinations_do_so_with_other_deployments(server, alone, name, parameters, windowed):
    assert_same_as_alone(server, alone, name, parameters, windowed)


def assert_same_as_alone(server, alone, name, parameters, windowed):
    assert server.load(name) is None
    try:
        for _ in range(2):
            assert serve(server, name, list(requests(parameters["gpt_model_type"]))) == alone[windowed]
    finally:
        server.unload(name)


@pytest.mark.also_on_gpu
def test_a_contiguous_cache_gives_each_request_what_it_gets_alone(server, alone):
    server.load("contiguous")
    assert serve(server, "contiguous", list(requests(""))) == alone[False]


@pytest.mark.also_on_gpu
def test_an_int8_cache_gives_each_request_what_it_gets_alone(server):
    for model in ["int8", "int8-alone"]:
        server.load(model)
    asked = list(requests(""))
    assert serve(server, "int8", asked) == serve_alone(server, "int8-alone", asked)


def test_instances_and_models_that_share_the_cores_give_each_request_what_it_gets_alone(server):
    for model in ["pair", "neighbour", "alone"]:
        server.load(model)
    asked = list(requests(""))
    expected = serve_alone(server, "alone", asked)

    async def main():
        models = ["pair", "neighbour", "pair", "alone"]
        return await asyncio.gather(*(asyncio.to_thread(serve, server, model, asked) for model in models))

    for answers in asyncio.run(main()):
        assert answers == expected
