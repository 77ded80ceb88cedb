"""A model on several GPUs, which are stand-ins, as is NCCL: a process and a GPU each."""

import asyncio
import os
import signal

import numpy
import pytest
from test_ranks import PROMPTS, answer, assert_failed_and_loads_again, bits, failures_after, processes

from harness import clients, costs, deployments
from harness.adapters import page_bytes, write_adapter
from harness.clients import Refused
from harness.repository import ROOT, STORIES, TIGHT, add_model
from harness.server import Server, assert_blocks_come_back

pytestmark = pytest.mark.complete

ON_ONE_GPU = {
    "deterministic": "true",
    "cuda_graph_cache_size": 2,
    "num_threads": 1,
    "max_tokens_in_paged_kv_cache": 4096,
}
ON_GPUS = {**ON_ONE_GPU, "tensor_parallel_size": 2, "gpu_device_ids": "1,0", "rank_timeout_seconds": 30}
STAGES = {**ON_GPUS, "tensor_parallel_size": 1, "pipeline_parallel_size": 2, "enable_trt_overlap": "true"}
NUM_ADAPTERS = 3
# Of a log-probability: half of what rounding to bf16 costs a logit.
MAX_ERROR = 0.5 * max(costs.OF_STORIES.values())
FOR_ANOTHER_MODEL = ROOT / "tests" / "fixtures" / "adapters" / "all-modules"


def environment(folder):
    return {**deployments.stand_in(folder / "stand_in"), "CUDA_STAND_IN_DEVICES": "2"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A model on one GPU, on two that share each layer, and on two that have some layers each; all with adapters."""
    folder = tmp_path_factory.mktemp("gpu_ranks")
    for index in range(NUM_ADAPTERS):
        write_adapter(folder / "adapters" / str(index), index)
    (folder / "adapters" / "for-another-model").symlink_to(FOR_ANOTHER_MODEL)
    # One adapter fewer than there are has room, so that they leave the memory for one another.
    adapters = {"lora_dir": folder / "adapters", "lora_cache_host_memory_bytes": (NUM_ADAPTERS - 1) * page_bytes() + 1}
    repository = folder / "repository"
    for name, how in [("one", {**ON_ONE_GPU, "gpu_device_ids": 0}), ("two", ON_GPUS), ("stages", {**STAGES, **TIGHT})]:
        add_model(repository, name, {**how, **adapters}, checkpoint=STORIES)
    with Server(repository, environment=environment(folder)) as server:
        assert len(processes(server)) == 1 + 1
        yield server


def requests():
    """Requests of several kinds, of which most have an adapter."""
    kinds = [{}, {"temperature": 1.2, "seed": 3, "top_k": 20}, {"repetition_penalty": 1.3}]
    for index in range(12):
        options = {"max_tokens": 6 + index, "ignore_eos": True, "return_log_probs": True, **kinds[index % len(kinds)]}
        if index % (NUM_ADAPTERS + 1) < NUM_ADAPTERS:
            options["lora_name"] = str(index % (NUM_ADAPTERS + 1))
        yield PROMPTS[index % len(PROMPTS)], options


def served(server, model, asked, others=0):
    """What requests get that are asked for at once, some more of which are cancelled in flight, and two are refused."""

    async def refused(client, reason, **options):
        with pytest.raises(Refused, match=reason):
            await clients.stream(client, model, "The fox", max_tokens=5, **options)

    async def main():
        async with clients.grpc(server) as client:
            good = [clients.stream(client, model, prompt, **options) for prompt, options in asked]
            long = {"max_tokens": 200, "ignore_eos": True, "lora_name": "0"}
            prompts = (PROMPTS[index % len(PROMPTS)] for index in range(others))
            bad = [clients.cancelled_stream(client, model, prompt, **long) for prompt in prompts]
            if others:
                bad.append(refused(client, "for-another-model", lora_name="for-another-model"))
                bad.append(refused(client, "top_p", top_p=2.0))
            answers = await asyncio.gather(*good, *bad)
            return bits(answers[: len(good)])

    return clients.run(main())


@pytest.mark.cancelling
def test_stages_on_gpus_have_the_bits_of_one_gpu(server):
    asked = list(requests())
    expected = served(server, "one", asked)
    assert served(server, "stages", asked, others=4) == expected
    assert_blocks_come_back(server, "stages")


@pytest.mark.cancelling
def test_a_request_on_two_gpus_has_the_bits_that_it_has_alone(server):
    asked = list(requests())
    together = served(server, "two", asked, others=4)
    assert_blocks_come_back(server, "two")
    # One without an adapter, and each adapter.
    for index in (3, 4, 5, 6):
        assert served(server, "two", [asked[index]]) == [together[index]], index
    assert_near(together, served(server, "one", asked))


def assert_near(answers, of_one):
    """One GPU rounds elsewhere, which may decide where two words are equally likely. Up to there, log-probabilities are
    near."""
    num_same = 0
    for (_, ids, _, found), (_, expected_ids, _, expected) in zip(answers, of_one, strict=True):
        pairs = zip(ids, expected_ids, strict=True)
        num_near = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), len(ids))
        ours, theirs = (numpy.frombuffer(it["output_log_probs"], numpy.float32)[:num_near] for it in (found, expected))
        # Written so that NaN is far.
        assert (abs(ours - theirs) <= MAX_ERROR).all(), (ours, theirs)
        num_same += num_near
    assert 4 * num_same >= 3 * sum(len(ids) for _, ids, *_ in answers), num_same


def test_noise_and_what_is_no_number_are_not_near():
    ids = list(range(8))
    answer = lambda log_probs: [("", ids, "length", {"output_log_probs": numpy.float32(log_probs).tobytes()})]  # noqa: E731
    good = answer([-1.0] * 8)
    assert_near(good, good)
    for log_probs in ([-1.0] * 7 + [-0.5], [numpy.nan] + [-1.0] * 7):
        with pytest.raises(AssertionError):
            assert_near(answer(log_probs), good)
    with pytest.raises(AssertionError):
        assert_near([("", [0, *ids[:7]], "length", good[0][3])], good)


# Faults. Each test has a server of its own.


@pytest.fixture
def faulty(request, repository, tmp_path):
    add_model(repository, "two", request.param, checkpoint=STORIES)
    add_model(repository, "one", {"num_threads": 1}, checkpoint=STORIES)
    add_model(repository, "wrong", {**request.param, "gpu_device_ids": "0,2"}, checkpoint=STORIES)
    arguments = ["--model-control-mode=explicit", "--load-model=one", "--load-model=two"]
    with Server(repository, *arguments, environment=environment(tmp_path)) as server:
        yield server


@pytest.mark.parametrize("faulty", [ON_GPUS, STAGES], ids=["ranks", "stages"], indirect=True)
def test_a_process_with_a_gpu_that_is_killed_is_an_error_and_no_orphan(faulty):
    expected = answer(faulty)
    [pid] = processes(faulty)
    errors = failures_after(faulty, lambda: os.kill(pid, signal.SIGKILL))
    for error in errors:
        assert error is not None and "rank 1" in error and "SIGKILL" in error, errors
    assert_failed_and_loads_again(faulty, [pid], expected)
    assert "there is no GPU 2: the driver shows 2" in faulty.load("wrong")
