"""A model as a part of an ensemble, and called by a Python model (business logic scripting), decoupled and not."""

import asyncio
import os
import pathlib
import shutil
import sys
import sysconfig

import numpy
import pytest

from harness import clients
from harness.clients import GrpcStream, Refused, generate, tensor
from harness.repository import FULL_ANSWER, STORIES, add_model
from harness.server import Server

pytestmark = pytest.mark.complete

PROMPT = "Once upon a time"
# What the models around it add to the prompt.
OPENING = ", there was a fox"
TEXT = "TYPE_STRING dims: [ 1 ]"
LENGTH = 'name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ]'
INPUTS = f'input [{{ name: "text_input" data_type: {TEXT} }}, {{ {LENGTH} }}]'
OUTPUTS = f'output [{{ name: "text_output" data_type: {TEXT} }}]'

# Before the model, and behind it.
PREPARE = f"""
import numpy
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb.get_input_tensor_by_name(request, "text_input").as_numpy()
        text = numpy.array([[row[0] + {OPENING.encode()!r}] for row in text], dtype=object)
        return pb.InferenceResponse([pb.Tensor("prompt", text)])
"""
FINISH = """
import numpy
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb.get_input_tensor_by_name(request, "answer").as_numpy()
        text = numpy.array([[row[0].decode().upper().encode()] for row in text], dtype=object)
        return pb.InferenceResponse([pb.Tensor("text_output", text)])
"""
# Business logic scripting: the model calls another one.
CALLS = f"""
import json
import numpy
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.model = config["parameters"]["model"]["string_value"]
        self.streams = config["parameters"]["streams"]["string_value"] == "yes"

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb.get_input_tensor_by_name(request, "text_input").as_numpy()[0, 0] + {OPENING.encode()!r}
        num_tokens = int(pb.get_input_tensor_by_name(request, "max_tokens").as_numpy()[0, 0])
        call = pb.InferenceRequest(
            model_name=self.model,
            requested_output_names=["text_output"],
            inputs=[pb.Tensor("text_input", numpy.array([[text]], dtype=object))],
            parameters={{"max_tokens": num_tokens, "stream": self.streams, "exclude_input_in_output": True}},
        )
        responses = call.exec(decoupled=True) if self.streams else [call.exec()]
        pieces = []
        for response in responses:
            if response.has_error():
                return pb.InferenceResponse(error=pb.TritonError(response.error().message()))
            if response.output_tensors():
                pieces.append(pb.get_output_tensor_by_name(response, "text_output").as_numpy().reshape(-1)[0])
        if self.streams and num_tokens > 1:
            assert len(pieces) > 1, "a stream has a response for each step"
        text = numpy.array([[b"".join(pieces).decode().upper().encode()]], dtype=object)
        return pb.InferenceResponse([pb.Tensor("text_output", text)])
"""
# Likewise, but it streams what the other one streams.
PASSES_ON = f"""
import threading
import numpy
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        self.threads = []

    def execute(self, requests):
        # The thread of this call must return before responses are sent.
        for request in requests:
            text = pb.get_input_tensor_by_name(request, "text_input").as_numpy()[0, 0] + {OPENING.encode()!r}
            num_tokens = int(pb.get_input_tensor_by_name(request, "max_tokens").as_numpy()[0, 0])
            thread = threading.Thread(target=self.answer, args=(request.get_response_sender(), text, num_tokens))
            thread.start()
            self.threads.append(thread)

    def answer(self, sender, text, num_tokens):
        call = pb.InferenceRequest(
            model_name="stories",
            requested_output_names=["text_output"],
            inputs=[pb.Tensor("text_input", numpy.array([[text]], dtype=object))],
            parameters={{"max_tokens": num_tokens, "stream": True}},
        )
        last = None
        for response in call.exec(decoupled=True):
            if last and (response.has_error() or response.output_tensors()):
                sender.send(last)
            if response.has_error():
                last = pb.InferenceResponse(error=pb.TritonError(response.error().message()))
            elif response.output_tensors():
                piece = pb.get_output_tensor_by_name(response, "text_output").as_numpy().reshape(-1)[0].decode().upper()
                last = pb.InferenceResponse([pb.Tensor("text_output", numpy.array([[piece.encode()]], dtype=object))])
        # The Python backend of server 2.51 loses a final response that has nothing but the flag.
        sender.send(last, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        for thread in self.threads:
            thread.join()
"""


def backends(folder):
    """Our backend, and Triton's for Python, with the stub for this interpreter."""
    triton = pathlib.Path(os.environ["TRITONSERVER"]).parents[1]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
    packages = pathlib.Path(os.environ.get("PYTHON_BACKEND_PACKAGES", ""))
    if not stub.exists() or not (packages / "numpy").is_dir():
        pytest.skip(f"there is no stub of the server's Python backend, or no numpy 1 for it, for Python {version}")
    python = folder / "python"
    shutil.copytree(triton / "backends" / "python", python)
    # The stub finds its libraries relative to itself.
    (python / stub.name).symlink_to(stub)
    (folder / "inflight").symlink_to(pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight")
    return folder


def add_python(repository, name, code, fields):
    version = repository / name / "1"
    version.mkdir(parents=True)
    # The stub ignores PYTHONPATH, and the stub of server 2.51 crashes with numpy 2.
    packages = os.environ["PYTHON_BACKEND_PACKAGES"]
    (version / "model.py").write_text(f"import sys\nsys.path.insert(0, {packages!r})\n{code}")
    (version.parent / "config.pbtxt").write_text(f'backend: "python"\nmax_batch_size: 4\n{fields}\n')


def add_ensemble(repository, name, model):
    """The three models in a row."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(
        f"""
platform: "ensemble" max_batch_size: 4 {INPUTS} {OUTPUTS}
ensemble_scheduling {{ step [
  {{ model_name: "prepare" model_version: -1
    input_map {{ key: "text_input" value: "text_input" }} output_map {{ key: "prompt" value: "prompt" }} }},
  {{ model_name: "{model}" model_version: -1
    input_map {{ key: "text_input" value: "prompt" }} input_map {{ key: "max_tokens" value: "max_tokens" }}
    output_map {{ key: "text_output" value: "answer" }} }},
  {{ model_name: "finish" model_version: -1
    input_map {{ key: "answer" value: "answer" }} output_map {{ key: "text_output" value: "text_output" }} }}
] }}
"""
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    folder = tmp_path_factory.mktemp("pipelines")
    repository = folder / "repository"
    for name, policy in [("stories", ""), ("stories_full", FULL_ANSWER)]:
        deployment.add_model(repository, name, fields=f"max_batch_size: 4 {policy}", checkpoint=STORIES)
        with_tensor = f"max_batch_size: 4 {policy} {INPUTS}"
        deployment.add_model(repository, f"{name}_of_tensors", fields=with_tensor, checkpoint=STORIES)
        add_ensemble(repository, f"ensemble_of_{name}", f"{name}_of_tensors")
        called = {"model": name, "streams": "no" if policy else "yes"}
        called = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in called.items()]
        add_python(repository, f"caller_of_{name}", CALLS, " ".join([INPUTS, OUTPUTS, *called]))
    decoupled = f"{INPUTS} {OUTPUTS} model_transaction_policy {{ decoupled: true }}"
    add_python(repository, "passes_on_stories", PASSES_ON, decoupled)
    prompt = f'output [{{ name: "prompt" data_type: {TEXT} }}]'
    add_python(repository, "prepare", PREPARE, f'input [{{ name: "text_input" data_type: {TEXT} }}] {prompt}')
    add_python(repository, "finish", FINISH, f'input [{{ name: "answer" data_type: {TEXT} }}] {OUTPUTS}')
    (folder / "backends").mkdir()
    environment = {"LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR")}
    with Server(repository, backends=backends(folder / "backends"), environment=environment) as server:
        yield server


def inputs(prompt, num_tokens):
    text = tensor("text_input", numpy.array([[prompt.encode()]], dtype=object), "BYTES")
    return [text, tensor("max_tokens", numpy.array([[num_tokens]], dtype=numpy.int32), "INT32")]


async def texts(client, model, prompt, num_tokens, **options):
    """The texts of the responses of a gRPC stream."""
    stream = GrpcStream(client, model, inputs(prompt, num_tokens), **options)
    found = [response.arrays["text_output"].reshape(-1)[0].decode() async for response in stream if response.arrays]
    return found


def direct(server, num_tokens):
    """What the model itself answers to the whole prompt."""
    options = {"max_tokens": num_tokens, "exclude_input_in_output": True}
    return generate(server, "stories_full", PROMPT + OPENING, **options).text.upper()


OPTIONS = {"ensemble_of_stories": {"stream": True}, "ensemble_of_stories_full": {"exclude_input_in_output": True}}


@pytest.mark.parametrize("model", ["ensemble_of_stories_full", "caller_of_stories_full", "caller_of_stories"])
def test_a_whole_answer_comes_through_other_models(server, model):
    """The caller of the decoupled model collects its stream."""

    async def main():
        async with clients.grpc(server) as client:
            return await texts(client, model, PROMPT, 20, **OPTIONS.get(model, {}))

    assert clients.run(main()) == [direct(server, 20)]


@pytest.mark.parametrize("model", ["ensemble_of_stories", "passes_on_stories"])
def test_a_stream_comes_through_another_model_response_by_response(server, model):
    async def main():
        async with clients.grpc(server) as client:
            return await texts(client, model, PROMPT, 20, **OPTIONS.get(model, {}))

    pieces = clients.run(main())
    assert len(pieces) > 10 and "".join(pieces) == direct(server, 20)


@pytest.mark.parametrize("model", ["ensemble_of_stories", "caller_of_stories", "passes_on_stories"])
def test_many_at_once_get_what_each_gets_alone(server, model):
    async def main():
        async with clients.grpc(server) as client:
            asked = [texts(client, model, PROMPT, 4 + n, **OPTIONS.get(model, {})) for n in range(8)]
            return await asyncio.gather(*asked)

    for n, pieces in enumerate(clients.run(main())):
        assert "".join(pieces) == direct(server, 4 + n)


@pytest.mark.parametrize(
    "model",
    ["ensemble_of_stories", "caller_of_stories", "passes_on_stories", "ensemble_of_stories_full", "caller_of_stories_full"],
)
def test_an_error_of_the_model_reaches_the_client(server, model):
    async def main():
        async with clients.grpc(server) as client:
            await texts(client, model, PROMPT, -1, **OPTIONS.get(model, {}))

    with pytest.raises(Refused, match="max_tokens"):
        clients.run(main())
    assert direct(server, 3)
