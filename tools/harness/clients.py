"""The real clients, reduced to what a test needs: a prompt, options, and the responses."""

import asyncio
import contextlib
import dataclasses
import http.client
import json

import numpy
import tritonclient.grpc.aio as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from harness.cancelling import forgiveness
from harness.synthetic import ENDLESS

TIMEOUT_S = 120
OUTPUTS = {
    "text_output": "text",
    "output_ids": "ids",
    "sequence_length": "sequence_length",
    "finish_reason": "finish_reason",
    "num_input_tokens": "num_input_tokens",
    "num_output_tokens": "num_output_tokens",
}
# Outputs with a value per sequence, and outputs with a value per token of each sequence.
OF_SEQUENCES = {
    "text_output",
    "sequence_length",
    "finish_reason",
    "num_output_tokens",
    "cum_log_probs",
    "cumulative_logprob",
    "logprobs",
    "stop_reason",
}
OF_TOKENS = {"output_ids", "output_log_probs", "generation_logits"}
# Fields that /generate adds to the outputs.
ENVELOPE = {"model_name", "model_version", "id", "sequence_id", "sequence_start", "sequence_end"}


class Refused(Exception):
    """The server answered with an error: its text, and the HTTP status if there is one."""

    def __init__(self, message, status=None):
        super().__init__(message)
        self.status = status


@dataclasses.dataclass
class Response:
    """One response. A missing output is None; over HTTP, an output of several sequences is a list."""

    text: str | None = None
    ids: list | None = None
    sequence_length: int | None = None
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    # The other outputs by name: arrays with their shapes, or JSON values.
    tensors: dict = dataclasses.field(default_factory=dict)
    final: bool = False
    # Over gRPC and /infer: all outputs as received.
    arrays: dict = dataclasses.field(default_factory=dict, compare=False, repr=False)


@dataclasses.dataclass
class Answer:
    """All responses of one request."""

    responses: list

    @property
    def text(self):
        return "".join(r.text or "" for r in self.responses)

    @property
    def ids(self):
        return [id for r in self.responses for id in r.ids or []]

    def sequences(self):
        """Each sequence of an answer over gRPC or /infer that does not repeat the prompt, as the answer to a
        request for a single sequence: without padding."""
        responses = [response for response in self.responses if response.arrays]
        counts = [response.arrays["num_output_tokens"][0] for response in responses]
        before = [numpy.zeros_like(counts[0]), *counts]
        return [
            Answer(
                [
                    _from_arrays(_of_sequence(response.arrays, i, count[i] - earlier[i]), response.final)
                    for response, count, earlier in zip(responses, counts, before)
                ]
            )
            for i in range(len(counts[0]))
        ]

    def tensors(self, name):
        """An output of all responses that have it."""
        return [r.tensors[name] for r in self.responses if name in r.tensors]

    @property
    def finish_reason(self):
        return [r.finish_reason for r in self.responses if r.finish_reason is not None][-1]

    @property
    def last(self):
        """The last response with outputs."""
        return [r for r in self.responses if r != Response(final=r.final)][-1]


def described(answer):
    """Everything that an answer over gRPC contains about its sequence, independent of the number of
    responses: text, ids, finish reason, and the other outputs, bit by bit."""
    found = {}
    for name in {name for response in answer.responses for name in response.tensors}:
        arrays = answer.tensors(name)
        if name == "logprobs":
            found[name] = [entry for array in arrays for entry in json.loads(array.item())]
        elif name in OF_SEQUENCES:
            found[name] = arrays[-1].item()
        elif name == "output_log_probs":
            found[name] = b"".join(array.tobytes() for array in arrays)
        else:
            # Where there are no new logits, the output is a dummy of one zero.
            found[name] = b"".join(array.tobytes() for array in arrays if array.size > 1)
    return answer.text, answer.ids, answer.finish_reason, found


# HTTP /generate and /generate_stream, as with curl.


def generate(server, model, prompt, **options):
    """POST .../generate: returns the answer."""
    status, body = server.http("POST", f"/v2/models/{model}/generate", _generate_body(prompt, options))
    answer = json.loads(body)
    if status != 200:
        raise Refused(answer["error"], status)
    return Answer([_from_json(answer)])


class GenerateStream:
    """POST .../generate_stream: iterates over responses as they arrive; closing it disconnects from the
    server."""

    def __init__(self, server, model, prompt, **options):
        self._connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=TIMEOUT_S)
        self._connection.request("POST", f"/v2/models/{model}/generate_stream", _generate_body(prompt, options))
        self._response = self._connection.getresponse()

    def __iter__(self):
        if self._response.status != 200:
            # If the first response is an error it is an event, and otherwise a plain body.
            body = self._response.read().decode().removeprefix("data: ")
            raise Refused(json.loads(body)["error"], self._response.status)
        for line in self._response:
            if line.startswith(b"data: "):
                event = json.loads(line[len("data: ") :])
                if "error" in event:
                    raise Refused(event["error"])
                yield _from_json(event)

    def close(self):
        self._connection.close()


def generate_stream(server, model, prompt, **options):
    """POST .../generate_stream, to its end."""
    stream = GenerateStream(server, model, prompt, stream=True, **options)
    try:
        return Answer(list(stream))
    finally:
        stream.close()


def _generate_body(prompt, options):
    name = "text_input" if isinstance(prompt, str) else "input_ids"
    return json.dumps({name: prompt, **options})


def _from_json(answer):
    fields = {field: answer[name] for name, field in OUTPUTS.items() if name in answer}
    if "ids" in fields and not isinstance(fields["ids"], list):
        fields["ids"] = [fields["ids"]]
    others = {name: value for name, value in answer.items() if name not in OUTPUTS and name not in ENVELOPE}
    return Response(**fields, tensors=others)


# HTTP /infer through tritonclient, for models that are not decoupled.


def infer(server, model, prompt, **options):
    """tritonclient.http: one request, one answer."""
    with httpclient.InferenceServerClient(server.http_url, network_timeout=TIMEOUT_S) as client:
        try:
            result = client.infer(model, [_input(httpclient, prompt)], parameters=options)
        except InferenceServerException as error:
            raise Refused(error.message(), error.status()) from None
        names = [output["name"] for output in result.get_response()["outputs"]]
        return Answer([_from_arrays({name: result.as_numpy(name) for name in names}, True)])


# gRPC through tritonclient.


def grpc(server):
    """A gRPC client; an async context manager."""
    return grpcclient.InferenceServerClient(server.grpc_url)


class GrpcStream:
    """One request on its own gRPC stream: iterates over responses as they arrive. `priority` is the one of Triton's
    queue, and `sequence` has Triton's fields for a sequence: `sequence_id`, `sequence_start`, `sequence_end`."""

    def __init__(
        self, client, model, prompt, *, request_id="", timeout=None, priority=0, headers=None, sequence=None, **options
    ):
        async def requests():
            yield {
                "model_name": model,
                "inputs": prompt if isinstance(prompt, list) and _is_inputs(prompt) else [_input(grpcclient, prompt)],
                "request_id": request_id,
                "timeout": timeout,
                "priority": priority,
                "parameters": options,
                "enable_empty_final_response": True,
                **(sequence or {}),
            }
            # The stream must not end before the last response, even though there are no more requests.
            await self._done.wait()

        self._done = asyncio.Event()
        self._has_ended = False
        self._cancelled = False
        self._call = client.stream_infer(requests(), headers=headers)

    async def __aiter__(self):
        try:
            async for result, error in self._call:
                if error is not None:
                    await self._end()
                    raise Refused(error.message(), error.status())
                response = result.get_response()
                final = response.parameters["triton_final_response"].bool_param
                arrays = {output.name: result.as_numpy(output.name) for output in response.outputs}
                if final:
                    await self._end()
                yield _from_arrays(arrays, final)
        except InferenceServerException as error:
            raise Refused(error.message(), error.status()) from None
        except asyncio.CancelledError:
            # A call cancelled by the client raises the same exception in gRPC as a cancelled task.
            if not self._cancelled:
                self._leave()
                raise
            raise Refused("the call was cancelled", "StatusCode.CANCELLED") from None
        except GeneratorExit:
            self._leave()
            raise
        finally:
            self._done.set()

    async def _end(self):
        """Announces that no request follows, and reads the stream to its end: if it is cut off there, server
        2.51.0 keeps the request, and with it the model, for ever."""
        self._done.set()
        async for _ in self._call:
            pass
        self._has_ended = True

    def _leave(self):
        if not self._has_ended:
            forgiveness.leaves()

    def cancel(self):
        assert forgiveness.may_cancel, "a test that cancels is marked: pytest.mark.cancelling"
        self._cancelled = True
        self._done.set()
        self._call.cancel()


@contextlib.asynccontextmanager
async def in_flight(client, model, prompt, **options):
    """A request that generates until the block ends, and is then cancelled. The model's `max_seq_len` is
    `ENDLESS_SEQ_LEN`."""
    call = GrpcStream(client, model, prompt, stream=True, max_tokens=ENDLESS, **options)
    responses = aiter(call)
    await anext(responses)
    yield responses
    call.cancel()
    with contextlib.suppress(Refused):
        async for _ in responses:
            pass


async def stream(client, model, prompt, **options):
    """A whole gRPC stream of one request."""
    options.setdefault("stream", True)

    async def collect():
        return Answer([response async for response in GrpcStream(client, model, prompt, **options)])

    return await asyncio.wait_for(collect(), TIMEOUT_S)


async def cancelled_stream(client, model, prompt, **options):
    """A gRPC stream that is cancelled at its first response."""
    call = GrpcStream(client, model, prompt, stream=True, **options)
    async for _ in call:
        break
    call.cancel()


def streams_beside_cancelled(server, model, requests, cancelled):
    """The answers to requests, as `described` says them, sent at the same time as prompts whose streams are cancelled
    at their first response."""

    async def main():
        async with grpc(server) as client:
            good = [stream(client, model, prompt, **options) for prompt, options in requests]
            others = [cancelled_stream(client, model, prompt, max_tokens=60, ignore_eos=True) for prompt in cancelled]
            answers = await asyncio.gather(*good, *others)
            return [described(answer) for answer in answers[: len(good)]]

    return run(main())


def streams(server, model, requests, *, may_fail=False):
    """The answers to requests, `(prompt, options)` each, sent at the same time over gRPC. With `may_fail`,
    exceptions are returned in place of answers."""

    async def main():
        async with grpc(server) as client:
            answers = (stream(client, model, prompt, **options) for prompt, options in requests)
            return await asyncio.gather(*answers, return_exceptions=may_fail)

    return run(main())


def run(main):
    """Runs the asynchronous body of a test."""
    return asyncio.run(main)


def tensor(name, array, datatype):
    """An input tensor for `GrpcStream`, of any shape and type."""
    tensor = grpcclient.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def _is_inputs(prompt):
    return len(prompt) > 0 and isinstance(prompt[0], grpcclient.InferInput)


def _input(module, prompt):
    if isinstance(prompt, (str, bytes)):
        text = prompt.encode() if isinstance(prompt, str) else prompt
        name, array, datatype = "text_input", numpy.array([[text]], dtype=object), "BYTES"
    else:
        name, array, datatype = "input_ids", numpy.array([prompt], dtype=numpy.int32), "INT32"
    tensor = module.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def _of_sequence(arrays, i, num_new):
    """The outputs of one of several sequences, which has `num_new` new tokens."""
    own = {}
    for name, array in arrays.items():
        if name in OF_TOKENS and array.shape[1] > i:
            assert not array[:, i, num_new:].any() or name == "output_ids", "shorter sequences are padded with zeros"
            array = array[:, i : i + 1, :num_new]
        elif name in OF_SEQUENCES:
            array = array[:, i : i + 1]
        own[name] = array
    return own


def _from_arrays(arrays, final):
    fields = {}
    others = {name: array for name, array in arrays.items() if name not in OUTPUTS}
    for name, array in arrays.items():
        values = array.reshape(-1)
        if name in others:
            continue
        if OUTPUTS[name] == "ids":
            fields["ids"] = values.tolist()
        elif array.dtype == object:
            fields[OUTPUTS[name]] = values[0].decode()
        else:
            fields[OUTPUTS[name]] = int(values[0])
    return Response(final=final, tensors=others, arrays=arrays, **fields)
