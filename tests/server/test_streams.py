"""Many concurrent requests: each gets, bit for bit, what it gets alone."""

import asyncio
import concurrent.futures

import pytest

from harness import clients, seeds
from harness.synthetic import continuation

PROMPTS = [
    "Once upon a time",
    "Long ago, there was a kind bear named Olive.",
    "Tell me a story about a fox.",
    "There once was a little owl called Pip, and he lived in a valley full of flowers. Every evening, he liked to "
    "look at the stars.",
    "One day, Mina went to the old mill. The sky was grey. She had a golden key that she loved more than anything. "
    "But when she looked, the key was gone! She looked under the bench, behind a stone, and even in the cave, but it "
    "was nowhere.",
    "The",
]


def some_request(number):
    """A prompt and options of various lengths and kinds."""
    rng = seeds.rng("streams", number)
    prompt = rng.choice(PROMPTS)
    options = {"max_tokens": rng.choice([1, 2, 10, 33, 64, 100]), "seed": rng.randrange(1 << 32)}
    for name, values in {
        "temperature": [0.5, 1.0, 1.5],
        "top_k": [1, 5, 50],
        "top_p": [0.5, 0.95],
        "min_p": [0.1],
        "typical_p": [0.8],
        "top_p_decay": [0.95],
        "no_repeat_ngram_size": [4],
        "prompt_ignore_length": [0],
        "stop_token_ids": [20],
        "repetition_penalty": [1.1],
        "presence_penalty": [0.5],
        "frequency_penalty": [0.3],
        "ignore_eos": [True],
        "stop": ["the", "."],
        "min_tokens": [1],
    }.items():
        if rng.random() < 0.3:
            options[name] = rng.choice(values)
    return prompt, options


def over_grpc(server, model, requests, stagger_s=0.0):
    """All requests concurrently, each on its own stream."""

    async def main():
        async with clients.grpc(server) as client:

            async def one(n, prompt, options):
                await asyncio.sleep(n * stagger_s)
                return await clients.stream(client, model, prompt, **options)

            return await asyncio.gather(*(one(n, *request) for n, request in enumerate(requests)))

    return clients.run(main())


@pytest.fixture(scope="module")
def alone(server):
    """64 requests, and each one's answer when nothing else runs."""
    requests = [some_request(number) for number in range(64)]
    return [(request, over_grpc(server, "stories", [request])[0]) for request in requests]


def assert_equal(answers, expected):
    for answer, (request, lone) in zip(answers, expected, strict=True):
        assert (request, answer.text, answer.ids, answer.finish_reason) == (
            request,
            lone.text,
            lone.ids,
            lone.finish_reason,
        )


@pytest.mark.parametrize("num_streams", [2, 7, 32, 64])
@pytest.mark.parametrize("model", ["stories", "stories_tight"])
def test_each_of_many_streams_is_the_same_as_alone(server, alone, model, num_streams):
    expected = alone[-num_streams:]
    assert_equal(over_grpc(server, model, [request for request, _ in expected]), expected)


@pytest.mark.deployments("iterative")
@pytest.mark.parametrize("model", ["stories_oldest", "stories_queued"])
def test_each_of_many_streams_is_the_same_with_another_scheduler(server, alone, model):
    assert_equal(over_grpc(server, model, [request for request, _ in alone]), alone)


def test_streams_that_start_and_end_do_not_affect_each_other(server, alone):
    assert_equal(over_grpc(server, "stories", [request for request, _ in alone], stagger_s=0.02), alone)


@pytest.mark.parametrize("way", [clients.generate_stream, clients.generate], ids=lambda way: way.__name__)
def test_concurrent_http_requests_are_the_same_as_alone(server, alone, way):
    if way is clients.generate:
        ask = lambda request: way(server, "stories_full", request[0], exclude_input_in_output=True, **request[1])
    else:
        ask = lambda request: way(server, "stories", request[0], **request[1])
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert_equal(list(pool.map(ask, [request for request, _ in alone])), alone)


@pytest.mark.parametrize("model", ["synthetic", "synthetic_tight"])
def test_every_token_of_many_streams_is_correct(server, model):
    rng = seeds.rng("tokens", model)
    requests = []
    for _ in range(96):
        prompt = [rng.randrange(32000) for _ in range(rng.choice([1, 3, 17, 90]))]
        requests.append((prompt, {"max_tokens": rng.choice([1, 5, 60, 150])}))
    answers = over_grpc(server, model, requests, stagger_s=0.002)
    for (prompt, options), answer in zip(requests, answers, strict=True):
        assert answer.ids == continuation(prompt, options["max_tokens"])
        assert answer.finish_reason == "length"


def test_many_requests_on_one_grpc_stream_each_get_their_own_answer(server):
    async def main():
        async with clients.grpc(server) as client:

            async def requests():
                for n in range(16):
                    yield {
                        "model_name": "synthetic",
                        "inputs": [clients._input(clients.grpcclient, [n, n + 1])],
                        "request_id": f"r{n}",
                        "parameters": {"max_tokens": 20 + n, "stream": True},
                        "enable_empty_final_response": True,
                    }
                await finished.wait()

            finished = asyncio.Event()
            tokens = {f"r{n}": [] for n in range(16)}
            num_final = 0
            async for result, error in client.stream_infer(requests()):
                assert error is None, error
                response = result.get_response()
                if response.outputs:
                    tokens[response.id] += result.as_numpy("output_ids").reshape(-1).tolist()
                num_final += response.parameters["triton_final_response"].bool_param
                # Reads on to the end of the stream: one that is left is cancelled.
                if num_final == 16:
                    finished.set()
            return tokens

    tokens = clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))
    for n in range(16):
        assert tokens[f"r{n}"] == continuation([n, n + 1], 20 + n)
