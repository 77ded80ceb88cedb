"""Ways to send a request. Each returns the responses as dicts from output name to array or JSON value, or
raises `Failed`."""

import asyncio
import http.client
import json
import re
import socket

import numpy
import tritonclient.grpc.aio as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

# Time limit: a request that takes longer counts as not ended. A machine with other work may compute a step in seconds.
LIMIT_S = 900


class Failed(Exception):
    """A request was answered with an error."""

    def __init__(self, text):
        # Triton prefixes the backend's message with the request's id.
        self.text = re.sub(r"^\[request id: [^\]]*\] ", "", text)
        super().__init__(self.text)


class Gone(Exception):
    """The connection broke: the server is gone, or has closed it."""


class NotEndedOnce(Exception):
    """A request did not end, or ended twice."""


def options_of(content, **more):
    """The options as parameters; Triton does not pass on `priority` where it has its own field for it."""
    options = {**dict(content.options), **more}
    if "priority" in options:
        options["request_priority"] = options.pop("priority")
    return options


# HTTP.


def infer(server, model, content):
    """POST .../infer, through tritonclient."""
    with httpclient.InferenceServerClient(server.http_url, network_timeout=LIMIT_S, connection_timeout=LIMIT_S) as client:
        try:
            result = client.infer(model, [input_of(httpclient, content.prompt)], parameters=options_of(content))
        except InferenceServerException as error:
            raise Failed(error.message()) from None
        return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}


def body_of(content, **more):
    """The body of /generate and /generate_stream."""
    name = "input_ids" if content.is_ids else "text_input"
    return json.dumps({name: content.prompt, **dict(content.options), **more}).encode()


def generate(server, model, content):
    """POST .../generate."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=LIMIT_S)
    try:
        connection.request("POST", f"/v2/models/{model}/generate", body_of(content))
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise Failed(answer["error"])
        return answer
    except TimeoutError:
        raise NotEndedOnce(f"no answer from /generate after {LIMIT_S} s") from None
    finally:
        connection.close()


class GenerateStream:
    """POST .../generate_stream: iterates over responses as they arrive."""

    def __init__(self, server, model, content, *, receive_buffer=None, **more):
        self._connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=LIMIT_S)
        if receive_buffer:
            # As small as the system allows, so that a slow reader blocks the server.
            self._connection.sock = socket.socket()
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            self._connection.sock.settimeout(LIMIT_S)
            self._connection.sock.connect(("127.0.0.1", server.http_port))
        self._connection.request(
            "POST", f"/v2/models/{model}/generate_stream", body_of(content, **{"stream": True, **more})
        )
        self._response = self._connection.getresponse()

    def __iter__(self):
        if self._response.status != 200:
            raise Failed(json.loads(self._response.read().decode().removeprefix("data: "))["error"])
        try:
            for line in self._response:
                if line.startswith(b"data: "):
                    event = json.loads(line[len("data: ") :])
                    if "error" in event:
                        raise Failed(event["error"])
                    yield event
        except TimeoutError:
            raise NotEndedOnce(f"/generate_stream sent nothing for {LIMIT_S} s") from None

    def close(self):
        self._connection.close()


# gRPC.


def failed(error):
    """The exception for a gRPC client's error."""
    if error.status() in ("StatusCode.UNAVAILABLE",) and "failed to connect" in error.message().lower():
        return Gone(error.message())
    return Failed(error.message())


def input_of(module, prompt):
    """The input tensor of a prompt."""
    if isinstance(prompt, str):
        name, datatype, array = "text_input", "BYTES", numpy.array([[prompt.encode()]], dtype=object)
    else:
        name, datatype, array = "input_ids", "INT32", numpy.array([prompt], dtype=numpy.int32)
    tensor = module.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


async def within_limit(answer):
    """Awaits with the time limit."""
    try:
        return await asyncio.wait_for(answer, LIMIT_S)
    except asyncio.TimeoutError:
        raise NotEndedOnce(f"no end of a gRPC call after {LIMIT_S} s") from None


async def grpc_unary(client, model, content):
    """ModelInfer, for models that are not decoupled."""
    try:
        inputs = [input_of(grpcclient, content.prompt)]
        result = await within_limit(client.infer(model, inputs, parameters=options_of(content)))
    except InferenceServerException as error:
        raise failed(error) from None
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


class GrpcStream:
    """Concurrent requests on a gRPC stream, each with its own id; a single one needs no id."""

    def __init__(self, client, model, contents, *, ids=None, **more):
        self.ids = ids or [""]
        self._done = asyncio.Event()
        self.cancelled = False

        async def requests():
            for id, content in zip(self.ids, contents):
                options = options_of(content, **{"stream": True, **more})
                timeout = options.pop("timeout", None)
                yield {
                    "model_name": model,
                    "inputs": [input_of(grpcclient, content.prompt)],
                    "request_id": id,
                    "timeout": timeout,
                    "parameters": options,
                    "enable_empty_final_response": True,
                }
            # The stream must not end before the last response, even though there are no more requests.
            await self._done.wait()

        self._call = client.stream_infer(requests())

    async def responses(self):
        """Yields `(id, response, error, is_final)`; the server closes the stream after the last final one. If
        an error does not name its request, and there are several, the id is None."""
        ended = []
        try:
            async for result, error in self._call:
                if error is not None:
                    told = re.match(r"\[request id: ([^\]]*)\] ", error.message())
                    id = told[1] if told else self.ids[0] if len(self.ids) == 1 else None
                    response, is_final = None, True
                else:
                    message = result.get_response()
                    id = message.id
                    is_final = message.parameters["triton_final_response"].bool_param
                    response = {output.name: result.as_numpy(output.name) for output in message.outputs}
                if id is not None and id in ended:
                    raise NotEndedOnce(f"request {id} of {self.ids} had a response after its final one")
                if is_final:
                    ended.append(id)
                yield id, response, error and failed(error), is_final
                if len(ended) == len(self.ids):
                    # The stream is read to its end, so that a second final response would be noticed.
                    self._done.set()
        except InferenceServerException as error:
            if self.cancelled:
                return
            raise failed(error) from None
        except asyncio.CancelledError:
            # A call cancelled by the client raises the same exception in gRPC as a cancelled task.
            if not self.cancelled:
                raise
            return
        finally:
            self._done.set()
        if len(ended) != len(self.ids) and not self.cancelled:
            raise NotEndedOnce(f"a gRPC stream ended with {len(ended)} ends of {len(self.ids)} requests")

    def cancel(self):
        self.cancelled = True
        self._done.set()
        self._call.cancel()
