"""A model on a GPU, which is the stand-in for one: the same answers as on the CPU, and clear errors without one."""

import asyncio
import os
import pathlib

import pytest

from harness import clients
from harness.repository import STORIES, TIGHT, add_model
from harness.server import Server

ON_GPU = {"gpu_device_ids": 0, "deterministic": "true"}
PROMPTS = ["Once upon a time", "The fox", "A little girl named", "One day, the dog"]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """The environment of a server whose backend finds the stand-in.

    Triton's own CUDA runtime looks for `libcuda.so.1` and needs more of it than the stand-in has, so that Triton would
    refuse every model. The backend looks for `libcuda.so` too.
    """
    libraries = pathlib.Path(os.environ["CUDA_STAND_IN"])
    folder = tmp_path_factory.mktemp("stand_in")
    (folder / "libcuda.so").symlink_to(libraries / "libcuda.so.1")
    (folder / "libcublasLt.so.12").symlink_to(libraries / "libcublasLt.so.12")
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="module")
def server(tmp_path_factory, stand_in):
    repository = tmp_path_factory.mktemp("gpu") / "repository"
    add_model(repository, "cpu", checkpoint=STORIES)
    add_model(repository, "gpu", ON_GPU, checkpoint=STORIES)
    add_model(repository, "gpu_tight", {**TIGHT, **ON_GPU}, checkpoint=STORIES)
    int4 = {"weight_only_precision": "int4"}
    add_model(repository, "cpu_int4", int4, checkpoint=STORIES)
    add_model(repository, "gpu_int4", {**int4, **ON_GPU}, checkpoint=STORIES)
    add_model(repository, "gpu_int4_tight", {**int4, **TIGHT, **ON_GPU}, checkpoint=STORIES)
    with Server(repository, environment=stand_in) as server:
        yield server


def texts(server, model, **options):
    """The texts for all prompts, asked for at once."""

    async def main():
        async with clients.grpc(server) as client:
            answers = [clients.stream(client, model, prompt, max_tokens=24, **options) for prompt in PROMPTS]
            return [answer.text for answer in await asyncio.gather(*answers)]

    return clients.run(main())


@pytest.mark.parametrize("precision", ["", "_int4"])
def test_a_model_on_a_gpu_answers_as_on_the_cpu(server, precision):
    pairs = list(zip(texts(server, f"gpu{precision}"), texts(server, f"cpu{precision}"), strict=True))
    # Rounding differs, and may decide where two words are equally likely; tests/models compares the logits.
    assert sum(ours == theirs for ours, theirs in pairs) >= len(pairs) // 2, pairs
    assert all(ours.split()[:3] == theirs.split()[:3] for ours, theirs in pairs), pairs


def test_a_request_alone_has_the_same_answer_on_a_gpu(server):
    async def alone(prompt):
        async with clients.grpc(server) as client:
            return (await clients.stream(client, "gpu", prompt, max_tokens=24)).text

    assert texts(server, "gpu") == [clients.run(alone(prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize("precision", ["", "_int4"])
def test_paused_requests_have_the_same_answers_on_a_gpu(server, precision):
    assert texts(server, f"gpu{precision}_tight") == texts(server, f"gpu{precision}")


def test_several_sequences_of_a_request_are_the_same_on_a_gpu(server):
    assert texts(server, "gpu", n=3, temperature=1.0, seed=5) == texts(server, "gpu_tight", n=3, temperature=1.0, seed=5)


def test_seeded_samples_are_the_same_on_a_gpu(server):
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
    assert texts(server, "gpu", **options) == texts(server, "gpu_tight", **options)


def refusal(repository, environment, gpu=0):
    """The error when a model asks for a GPU in vain; another model is served all the same."""
    add_model(repository, "cpu", checkpoint=STORIES)
    add_model(repository, "gpu", {**ON_GPU, "gpu_device_ids": gpu}, checkpoint=STORIES)
    with Server(repository, "--model-control-mode=explicit", environment=environment) as server:
        error = server.load("gpu")
        assert server.load("cpu") is None
        assert texts(server, "cpu")
        return error


def test_without_a_driver_a_model_for_a_gpu_is_refused(repository):
    assert "there is no CUDA driver (libcuda.so.1)" in refusal(repository, {})


def test_without_a_gpu_a_model_for_one_is_refused(repository, stand_in):
    error = refusal(repository, {**stand_in, "CUDA_STAND_IN_DEVICES": "0"})
    assert "CUDA_ERROR_NO_DEVICE" in error


def test_a_gpu_beyond_those_of_the_machine_is_refused(repository, stand_in):
    error = refusal(repository, stand_in, gpu=1)
    assert "there is no GPU 1: the driver shows 1" in error


def attempts(server, model, **options):
    """What becomes of a request for each prompt, asked for at once: its text, or the error."""

    async def main():
        async with clients.grpc(server) as client:
            answers = [clients.stream(client, model, prompt, max_tokens=24, **options) for prompt in PROMPTS]
            ended = await asyncio.gather(*answers, return_exceptions=True)
            return [str(end) if isinstance(end, clients.Refused) else end.text for end in ended]

    return clients.run(main())


@pytest.fixture
def failing(repository, stand_in):
    """Starts a server whose GPU has a fault: a model on the CPU, and two on the GPU, the first not loaded yet."""
    add_model(repository, "cpu", checkpoint=STORIES)
    add_model(repository, "gpu", ON_GPU, checkpoint=STORIES)
    add_model(repository, "gpu_tight", {**TIGHT, **ON_GPU}, checkpoint=STORIES)

    def start(fault, at):
        others = ("--load-model=cpu", "--load-model=gpu_tight")
        environment = {**stand_in, f"CUDA_STAND_IN_{fault}": str(at)}
        return Server(repository, "--model-control-mode=explicit", *others, environment=environment)

    return start


def until_it_fails(server, model):
    """Asks a model until the fault strikes: what became of the requests that were in flight."""
    for _ in range(50):
        ended = attempts(server, model)
        if any("GPU 0" in end for end in ended):
            return ended
    raise AssertionError("the fault never struck")


def load_again(server, model):
    """Triton does not load a model again that is loaded and unchanged."""
    if server.model_state(model) == "READY":
        server.unload(model)
        server.wait_for_state(model, "UNAVAILABLE")
    return server.load(model)


def test_a_model_without_gpu_memory_is_refused_and_loads_later(failing):
    # Some allocation of some load.
    with failing("FAIL_ALLOCATION", at=150) as server:
        refused = next(filter(None, (load_again(server, "gpu") for _ in range(20))))
        assert "bytes of GPU memory" in refused
        assert server.load("gpu") is None
        assert attempts(server, "gpu") == attempts(server, "gpu_tight")
        assert texts(server, "cpu")


def test_a_failing_launch_ends_the_requests_of_its_model_alone(failing):
    with failing("FAIL_LAUNCH", at=400) as server:
        assert server.load("gpu") is None
        ended = until_it_fails(server, "gpu")
        assert all("GPU 0: " in end and "LAUNCH_OUT_OF_RESOURCES" in end for end in ended), ended
        # The instance takes no more, and says what to do.
        refused = attempts(server, "gpu")
        assert all("the model instance has failed, load the model again: " in end and "GPU 0: " in end for end in refused), refused
        assert server.is_ready()
        assert texts(server, "cpu")
        expected = texts(server, "gpu_tight")
        assert load_again(server, "gpu") is None
        assert texts(server, "gpu") == expected


def test_a_lost_gpu_takes_its_models_with_it_and_nothing_else(failing):
    with failing("LOSE_DEVICE", at=3000) as server:
        assert server.load("gpu") is None
        ended = until_it_fails(server, "gpu")
        assert all("GPU 0: " in end and "ILLEGAL_ADDRESS" in end for end in ended), ended
        assert all("GPU 0: " in end for end in attempts(server, "gpu_tight"))
        assert server.is_ready() and texts(server, "cpu")
        # Both instances are gone, and with them the driver's context, so that the GPU works again.
        assert load_again(server, "gpu") is None and load_again(server, "gpu_tight") is None
        assert texts(server, "gpu") == texts(server, "gpu_tight")
