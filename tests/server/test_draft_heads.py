"""EAGLE-3 heads, and heads for multi-token prediction: the same answers in fewer steps, whatever the head guesses."""

import asyncio

import pytest

from harness import clients
from harness.clients import GrpcStream, generate_stream
from harness.repository import ROOT, TIGHT
from harness.server import assert_blocks_come_back

HEADS = ROOT / "tests" / "fixtures" / "draft-heads"
FIGURES = ["acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"]
HEAD = {"speculation": "eagle3", "max_draft_tokens": 6}
# As many drafts as there may be, so that their number does not depend on what steps of this machine cost.
ALL = {**HEAD, "enable_adaptive_drafts": "false"}
OVERLAP = {"enable_trt_overlap": "true"}
# A head that is always right, and two with random weights, each with the model that it is for.
RIGHT = {"draft_model_path": HEADS / "right" / "head"}
RANDOM = {"draft_model_path": HEADS / "random" / "head"}
SPECULATORS = {"draft_model_path": HEADS / "random" / "speculators"}
PROMPT = [3, 9, 9, 30]
# A head for multi-token prediction that is always right, in the checkpoint of its model.
MTP = ROOT / "tests" / "fixtures" / "mtp" / "right"


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    repository = tmp_path_factory.mktemp("draft_heads") / "repository"

    def add(name, model, parameters):
        deployment.add_model(repository, name, parameters, checkpoint=HEADS / model / "model")

    add("plain_cycle", "right", {})
    add("cycle", "right", {**ALL, **RIGHT})
    add("cycle_overlap", "right", {**ALL, **RIGHT, **OVERLAP})
    deployment.add_model(repository, "plain_mtp", {}, checkpoint=MTP)
    deployment.add_model(repository, "mtp", {**ALL, "speculation": "mtp"}, checkpoint=MTP)
    add("plain", "random", {})
    add("head", "random", {**ALL, **RANDOM})
    add("speculators", "random", {**ALL, **SPECULATORS})
    add("adaptive", "random", {**HEAD, **RANDOM})
    add("overlap", "random", {**ALL, **RANDOM, **OVERLAP})
    add("tight", "random", {**ALL, **RANDOM, **TIGHT})
    with deployment.server(repository, "--metrics-interval-ms=100") as server:
        yield server


@pytest.mark.parametrize("model", ["cycle", "cycle_overlap", "mtp"])
def test_a_text_is_the_same_in_fewer_steps(server, model):
    without = "plain_mtp" if model == "mtp" else "plain_cycle"
    options = {"max_tokens": 43, "ignore_eos": True, "return_cumulative_logprob": True}
    plain = generate_stream(server, without, PROMPT, **options)
    answer = generate_stream(server, model, PROMPT, return_perf_metrics=True, **options)
    assert (answer.ids, answer.finish_reason) == (plain.ids, plain.finish_reason)
    assert answer.last.tensors["cumulative_logprob"] == plain.last.tensors["cumulative_logprob"]
    # The first token comes with the prompt, followed by seven per step.
    assert [answer.last.tensors[name] for name in FIGURES] == [1.0, 36, 36]
    assert len([response for response in answer.responses if response.ids]) == 7


def requests():
    for index in range(20):
        options = {"max_tokens": 50 + index, "ignore_eos": True}
        if index % 2:
            options |= {"temperature": 0.8, "seed": index, "repetition_penalty": 1.1}
        yield [3 + (7 * n + 11 * n * n + index % 4) % 128 for n in range(9 + 3 * index)], options


def test_a_full_batch_with_pauses_gets_what_each_request_gets_alone(server):
    alone = [generate_stream(server, "plain", prompt, **options).ids for prompt, options in requests()]
    for model in ("tight", "head", "speculators", "overlap", "adaptive"):
        answers = clients.streams(server, model, list(requests()))
        assert [answer.ids for answer in answers] == alone, model


@pytest.mark.parametrize("model", ["tight", "overlap"])
@pytest.mark.cancelling
def test_cancelled_requests_leave_those_beside_them_the_same(server, model):
    async def main():
        async with clients.grpc(server) as client:

            async def leave(prompt, options):
                stream = GrpcStream(client, model, prompt, stream=True, **options)
                num_tokens = 0
                async for response in stream:
                    num_tokens += len(response.ids or [])
                    if num_tokens > 3:
                        stream.cancel()
                        return None

            async def stay(prompt, options):
                return await clients.stream(client, model, prompt, **options)

            asked = enumerate(requests())
            return await asyncio.gather(*(leave(*it) if n % 3 == 0 else stay(*it) for n, it in asked))

    answers = clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))
    plain = clients.streams(server, "plain", list(requests()))
    for n, (answer, expected) in enumerate(zip(answers, plain, strict=True)):
        assert answer.ids == expected.ids if n % 3 else answer is None, n
    assert_blocks_come_back(server, model)
