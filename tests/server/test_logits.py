"""Logits in answers: every row once, the same however a request is served, in bounded memory."""

import asyncio
import math

import numpy
import pytest
import tritonclient.http as httpclient

from harness import clients
from harness.clients import generate, infer
from harness.libraries import MISBEHAVING, compile_c
from harness.repository import STORIES
from harness.server import num_pending, until
from harness.synthetic import Gate

pytestmark = pytest.mark.also_on_gpu
PROMPT = "Once upon a time, there was a brave fox named Finn. Every evening, he liked to look at the stars."
BOTH = {"return_context_logits": True, "return_generation_logits": True}
SAMPLED = {"max_tokens": 12, "temperature": 0.8, "seed": 7, "ignore_eos": True}


def rows(answer, name):
    """All rows of an answer, without dummies."""
    arrays = [array.reshape(-1, array.shape[-1]) for array in answer.tensors(name) if array.shape[-1] > 1]
    return numpy.concatenate(arrays)


def bits(answer):
    return [rows(answer, name).tobytes() for name in ("context_logits", "generation_logits")]


@pytest.fixture(scope="module")
def alone(server):
    return clients.streams(server, "stories", [(PROMPT, {**SAMPLED, **BOTH, "return_log_probs": True})])[0]


def test_a_stream_returns_the_prompts_logits_first_and_then_a_row_per_token(server, alone):
    num_prompt_tokens = alone.last.num_input_tokens
    context = alone.tensors("context_logits")
    vocab_size = context[0].shape[-1]
    assert [array.shape for array in context] == [(1, num_prompt_tokens, vocab_size)] + [(1, 1, 1)] * 11
    assert {array.shape for array in alone.tensors("generation_logits")} == {(1, 1, 1, vocab_size)}
    assert all(array.dtype == numpy.float32 for array in context)
    # The first token was chosen from the logits of the prompt's last token.
    numpy.testing.assert_array_equal(context[0][0, -1], rows(alone, "generation_logits")[0])


def test_log_probabilities_are_the_softmax_of_these_logits(alone):
    logits = rows(alone, "generation_logits").astype(numpy.float64)
    log_probs = numpy.concatenate([array.reshape(-1) for array in alone.tensors("output_log_probs")])
    expected = logits - numpy.log(numpy.exp(logits).sum(axis=1, keepdims=True))
    numpy.testing.assert_allclose(log_probs, expected[range(12), alone.ids], rtol=1e-5, atol=1e-5)


def test_options_do_not_change_the_returned_logits(server):
    def first_row(**options):
        answer = infer(server, "stories_full", PROMPT, max_tokens=1, return_generation_logits=True, **options)
        return rows(answer, "generation_logits").tobytes()

    assert first_row() == first_row(temperature=2.0, logit_bias='{"5": 50}', repetition_penalty=1.5, top_k=3)


@pytest.mark.parametrize("model", ["stories", "stories_tight"])
def test_logits_are_the_same_bits_in_a_batch_and_from_a_warm_cache(server, alone, model):
    """`stories_tight` has few blocks: its requests are chunked, paused and computed again."""
    assert_same_in_a_batch(server, alone, model)


@pytest.mark.deployments("iterative")
@pytest.mark.parametrize("model", ["stories_oldest", "stories_queued"])
def test_logits_are_the_same_bits_with_another_scheduler(server, alone, model):
    assert_same_in_a_batch(server, alone, model)


def assert_same_in_a_batch(server, alone, model):
    others = [(PROMPT[: 9 + 3 * n], {"max_tokens": 60, "return_generation_logits": n % 3 == 0}) for n in range(23)]
    for _ in range(2):
        asked, *_ = clients.streams(server, model, [(PROMPT, {**SAMPLED, **BOTH}), *others])
        assert asked.ids == alone.ids
        assert bits(asked) == bits(alone)


def test_a_whole_answer_has_all_logits(server, alone):
    whole = infer(server, "stories_full", PROMPT, **SAMPLED, **BOTH)
    num_prompt_tokens, vocab_size = rows(alone, "context_logits").shape
    assert whole.last.tensors["context_logits"].shape == (1, num_prompt_tokens, vocab_size)
    assert whole.last.tensors["generation_logits"].shape == (1, 1, 12, vocab_size)
    assert bits(whole) == bits(alone)
    generated = generate(server, "stories_full", PROMPT, **SAMPLED, return_generation_logits=True)
    expected = rows(alone, "generation_logits").reshape(-1)
    numpy.testing.assert_allclose(generated.last.tensors["generation_logits"], expected, rtol=1e-4, atol=1e-6)
    assert "context_logits" not in generated.last.tensors


def test_naming_the_logits_outputs_without_the_option_returns_dummies(server):
    """The same as TensorRT-LLM's backend, if logits were not gathered."""
    names = ["output_ids", "context_logits", "generation_logits", "output_log_probs"]
    prompt = httpclient.InferInput("text_input", [1, 1], "BYTES")
    prompt.set_data_from_numpy(numpy.array([[PROMPT.encode()]], dtype=object))
    with httpclient.InferenceServerClient(server.http_url) as client:

        def shapes(**options):
            outputs = [httpclient.InferRequestedOutput(name) for name in names]
            result = client.infer("stories_full", [prompt], outputs=outputs, parameters={"max_tokens": 2, **options})
            return {output["name"]: tuple(output["shape"]) for output in result.get_response()["outputs"]}

        dummies = shapes()
        assert dummies["context_logits"] == (1, 1, 1)
        assert dummies["generation_logits"] == (1, 1, 1, 1)
        assert dummies["output_log_probs"] == (1, 1, 2), "an output that is small is given when it is named"
        asked = shapes(return_generation_logits=True)
        assert asked["context_logits"] == (1, 1, 1)
        assert asked["generation_logits"][:3] == (1, 1, 2)


def test_logits_that_could_not_fit_are_rejected_before_they_run_with_a_way_out(server):
    """The model `stories_few_logits` has memory for 40 rows."""
    for options in ({"max_tokens": 41, "return_generation_logits": True}, {"max_tokens": 30, **BOTH}):
        with pytest.raises(clients.Refused, match="rows of logits.*logits_memory_bytes.*lower max_tokens"):
            generate(server, "stories_few_logits", PROMPT, **options)
    generate(server, "stories_few_logits", PROMPT, max_tokens=40, return_generation_logits=True)


# With the other driver nothing shows from outside that a request has reached the backend.
@pytest.mark.deployments("iterative")
def test_memory_for_logits_is_freed_when_requests_end(tmp_path, deployment):
    repository = tmp_path / "repository"
    library = compile_c(MISBEHAVING, tmp_path / "waits.so")
    # Memory for 40 rows.
    parameters = {"logits_memory_bytes": 40 * 1536 * 4, "logits_post_processor_library": library}
    deployment.add_model(repository, "few", parameters, checkpoint=STORIES)
    gate = Gate(tmp_path / "gate", num_steps=1)
    options = {"max_tokens": 40, "return_generation_logits": True, "ignore_eos": True}
    held = {"logits_post_processor_name": "waits", "logits_post_processor_args": str(gate.file)}

    async def main(server):
        async with clients.grpc(server) as client:
            responses = aiter(clients.GrpcStream(client, "few", PROMPT, stream=True, **options, **held))
            await anext(responses)
            # The first request's second token waits, and its step with it; these requests join in the next
            # step.
            refused = asyncio.create_task(clients.stream(client, "few", PROMPT, **options))
            unconcerned = asyncio.create_task(clients.stream(client, "few", PROMPT, max_tokens=3))
            await until(lambda: num_pending(server, "few") == 2)
            gate.allow(39)
            with pytest.raises(clients.Refused, match="requests in flight have.*try again"):
                await refused
            # Requests without logits are not affected.
            assert len((await unconcerned).ids) == 3
            gate.open()
            num_rows = 1 + len([response async for response in responses if response.tensors])
            assert num_rows == 40
            again = await clients.stream(client, "few", PROMPT, **options)
            assert rows(again, "generation_logits").shape[0] == 40

    with deployment.server(repository) as server:
        clients.run(asyncio.wait_for(main(server), clients.TIMEOUT_S))


def test_a_request_that_ends_early_returns_the_rows_of_its_tokens(server, alone):
    end_id = alone.ids[5]
    answer = infer(server, "stories_full", PROMPT, **{**SAMPLED, "ignore_eos": False}, **BOTH, end_id=end_id)
    num_tokens = alone.ids.index(end_id) + 1
    assert answer.last.num_output_tokens == num_tokens
    assert rows(answer, "generation_logits").tobytes() == rows(alone, "generation_logits")[:num_tokens].tobytes()


@pytest.mark.parametrize("name", list(BOTH))
def test_bad_values_and_runners_without_logits_are_rejected(server, name):
    with pytest.raises(clients.Refused, match=f"{name}.*true or false"):
        generate(server, "stories", PROMPT, **{name: math.pi})
    with pytest.raises(clients.Refused, match=f"'{name}': the synthetic runner has no logits"):
        generate(server, "synthetic", [1, 2], max_tokens=2, **{name: True})
