"""The server with OpenAI's API, in front of a real tritonserver."""

import concurrent.futures
import contextlib
import gzip
import http.server
import json
import os
import re
import socket
import subprocess
import threading
import time
import zlib

import pytest

from harness.clients import generate
from harness.front import Front, counts, events_of
from harness.repository import QUEUED, ROOT, STORIES, add_model
from harness.server import Server, assert_blocks_come_back

PROMPT = "Once upon a time, there was a brave fox named Finn."


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai") / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    add_model(repository, "queued", {"max_seq_len": 200}, fields=QUEUED, checkpoint=STORIES)
    # One request at a time, and one that waits.
    narrow = "max_batch_size: 1 dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    add_model(repository, "narrow", fields=narrow, checkpoint=STORIES)
    with Server(repository) as server:
        yield server


def test_the_numbers_of_fields_are_tritons():
    """The messages that the front writes by hand have the fields of the descriptors of Triton's own client."""
    from tritonclient.grpc import model_config_pb2, service_pb2

    source = (ROOT / "crates/openai/src/protocol.rs").read_text()
    theirs = {
        "ModelConfig": model_config_pb2.ModelConfig,
        "ModelParameter": model_config_pb2.ModelParameter,
        "Tensor": service_pb2.ModelInferRequest.InferInputTensor,
        "RequestedOutput": service_pb2.ModelInferRequest.InferRequestedOutputTensor,
        "ModelIndex": service_pb2.RepositoryIndexResponse.ModelIndex,
        # Messages for unloading have equal fields.
        "RepositoryModelRequest": service_pb2.RepositoryModelLoadRequest,
        "RepositoryModelResponse": service_pb2.RepositoryModelLoadResponse,
        "OutputTensor": service_pb2.ModelInferResponse.InferOutputTensor,
        "ResponseParameter": service_pb2.ModelInferResponse.ParametersEntry,
    }
    structs = re.findall(r"pub struct (\w+) \{(.*?)\}", source, re.S)
    num_fields = 0
    for name, body in structs:
        descriptor = theirs.get(name, getattr(service_pb2, name, None)).DESCRIPTOR
        for kind, tag, field in re.findall(r'#\[prost\((\w+)[^)]*tag = "(\d+)"\)\]\s+pub (\w+):', body):
            field = descriptor.fields_by_name[field]
            assert field.number == int(tag), (name, field)
            types = {"bool": 8, "string": 9, "message": 11, "map": 11, "bytes": 12, "int64": 3}
            assert field.type == types[kind], (name, field)
            num_fields += 1
    assert num_fields == 29
    parameter = service_pb2.InferParameter.DESCRIPTOR
    assert [parameter.fields_by_name[name].number for name in ("bool_param", "string_param")] == [1, 3]


def test_the_front_is_as_healthy_as_the_server_behind_it(front):
    assert front.call("GET", "/health").status == 200


def test_the_front_is_not_healthy_where_an_instance_has_failed(server):
    """A stand-in for the metrics of a server with a failed model, which server 2.51 calls ready."""
    value = 1

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f'nv_inflight_failed_instances{{model="stories",version="1"}} {value}\n'.encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metrics) as metrics:
        threading.Thread(target=metrics.serve_forever, daemon=True).start()
        with Front(server, f"--triton-metrics=127.0.0.1:{metrics.server_port}") as front:
            answer = front.call("GET", "/health")
            assert (answer.status, answer.json["failed_models"]) == (503, ["stories"])
            value = 0
            assert front.call("GET", "/health").status == 200
        metrics.shutdown()
    with Front(server, "--triton-metrics=127.0.0.1:1") as front:
        assert front.call("GET", "/health").status == 503, "nothing is known"


def test_models_are_those_of_the_repository(front):
    models = front.call("GET", "/v1/models").json
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["narrow", "queued", "stories"]
    assert [model.get("max_model_len") for model in models["data"]] == [None, 200, None]
    assert front.call("GET", "/v1/models/stories").json == models["data"][2]
    assert front.call("GET", "/v1/models/tales").status == 404


@pytest.mark.parametrize("model", ["stories", "queued"])
def test_a_completion_is_the_text_that_the_model_gives(server, front, model):
    expected = generate(server, model, PROMPT, max_tokens=40, exclude_input_in_output=True)
    answer = front.post("/v1/completions", model=model, prompt=PROMPT, max_tokens=40)
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length"}]
    num_prompt_tokens = expected.responses[0].num_input_tokens
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 40, "total_tokens": num_prompt_tokens + 40}
    assert counts(answer) == usage


def test_a_stream_has_the_same_text_and_usage(front):
    fields = {"model": "stories", "prompt": PROMPT, "max_tokens": 40, "stop": ["zzz"]}
    whole = front.post("/v1/completions", **fields)
    *chunks, last = front.stream("/v1/completions", **fields, stream_options={"include_usage": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert len(chunks) > 20
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert (last["choices"], counts(last)) == ([], counts(whole))
    assert all("usage" not in chunk for chunk in front.stream("/v1/completions", **fields))


@pytest.mark.parametrize("path, prompt", [
    ("/v1/completions", {"prompt": PROMPT}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
])
def test_a_choice_that_ends_before_the_others_ends_once(front, path, prompt):
    fields = {"model": "stories", "max_tokens": 40, "n": 4, "seed": 7, "stop": ["."], **prompt}
    ends = {}
    for number, chunk in enumerate(front.stream(path, **fields)):
        for choice in chunk["choices"]:
            assert choice["index"] not in ends, "a chunk behind the end"
            if choice["finish_reason"]:
                ends[choice["index"]] = number
    assert ends.keys() == {0, 1, 2, 3} and max(ends.values()) - min(ends.values()) > 4, ends


@pytest.mark.parametrize("path, prompt", [
    ("/v1/completions", {"prompt": PROMPT}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
])
def test_every_chunk_may_have_the_usage_so_far(front, path, prompt):
    fields = {"model": "stories", "max_tokens": 12, "n": 2, "seed": 5, **prompt}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = front.stream(path, **fields, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and len({*counts}) > 12 and counts[-1] == 24
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 24)
    alone = front.stream(path, **fields, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in alone)
    answer = front.call("POST", path, {**fields, "stream": True, "stream_options": {"continuous_usage_stats": 1}})
    assert (answer.status, answer.json["error"]["param"]) == (400, "stream_options.continuous_usage_stats")


def test_the_version_is_that_of_the_program(front):
    program = subprocess.run([os.environ["INFLIGHT_OPENAI"], "--version"], capture_output=True, text=True, check=True)
    assert front.call("GET", "/version").json == {"version": program.stdout.split()[1]}


def test_pages_of_allowed_origins_may_use_the_server(server, front, tmp_path):
    (tmp_path / "keys").write_text("sk-fox\n")
    origin = {"Origin": "https://chat.example"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
    with Front(server, "--allow-origin=https://chat.example", f"--api-key-file={tmp_path / 'keys'}") as front_with_origin:
        # The question of a browser has no key.
        with front_with_origin.request("OPTIONS", "/v1/chat/completions", headers=origin | asks) as response:
            assert response.status == 200
            assert response.headers["Access-Control-Allow-Origin"] == "https://chat.example"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            assert response.headers["Access-Control-Allow-Headers"] == asks["Access-Control-Request-Headers"]
        # A page can read errors, too.
        for headers, status in ((origin, 401), (origin | {"Authorization": "Bearer sk-fox"}, 200)):
            answer = front_with_origin.call("GET", "/v1/models", headers=headers)
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, "https://chat.example")
        with front_with_origin.request("OPTIONS", "/v1/models", headers=asks | {"Origin": "https://evil.example"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers
    answer = front.call("GET", "/v1/models", headers=origin)
    assert "access-control-allow-origin" not in answer.headers


def test_each_prompt_has_its_choices(front):
    prompts = [PROMPT, "The old bear"]
    fields = {"model": "stories", "max_tokens": 12, "temperature": 0.9, "seed": 5}
    answer = front.post("/v1/completions", **fields, prompt=prompts, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for index, prompt in enumerate(prompts):
        alone = front.post("/v1/completions", **fields, prompt=prompt, echo=True)
        assert alone["choices"][0]["text"] == prompt + answer["choices"][2 * index]["text"]
    assert answer["usage"]["completion_tokens"] == 48
    chunks = front.stream("/v1/completions", **fields, prompt=prompts, n=2, echo=True)
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [prompts[choice["index"] // 2] + choice["text"] for choice in answer["choices"]]


def test_without_a_seed_choices_differ_each_time(front):
    fields = {"model": "stories", "prompt": PROMPT, "temperature": 1.5, "max_tokens": 30}
    texts = {front.post("/v1/completions", **fields)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3
    texts = {front.post("/v1/completions", **fields, seed=1)["choices"][0]["text"] for _ in range(2)}
    assert len(texts) == 1


def test_log_probabilities_are_those_of_each_token(front):
    fields = {"model": "stories", "prompt": PROMPT, "max_tokens": 8, "logprobs": 3}
    choice = front.post("/v1/completions", **fields)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [8] * 4
    for token, own, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
        assert len(top) == 3 and max(top.values()) == top[token] == own
    chunks = front.stream("/v1/completions", **fields)
    for name in logprobs:
        assert sum((chunk["choices"][0]["logprobs"][name] for chunk in chunks), []) == logprobs[name]


@pytest.mark.parametrize("model", ["stories", "queued"])
def test_an_echo_has_the_log_probabilities_of_the_prompt(server, front, model):
    ids = front.post("/tokenize", model=model, prompt=PROMPT)["tokens"]
    fields = {"model": model, "max_tokens": 4, "logprobs": 2, "echo": True}
    choice = front.post("/v1/completions", **fields, prompt=PROMPT)["choices"][0]
    found = choice["logprobs"]
    assert {len(found[name]) for name in found} == {len(ids) + 4}
    direct = generate(server, model, PROMPT, max_tokens=1, prompt_logprobs=2).last.tensors["prompt_logprobs"]
    direct = [next(iter(entry.values())) for entry in json.loads(direct)]
    assert found["tokens"][: len(ids)] == [entry["decoded_token"] for entry in direct]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None and direct[0]["logprob"] is None
    assert found["token_logprobs"][1 : len(ids)] == [pytest.approx(entry["logprob"]) for entry in direct[1:]]
    assert choice["text"].startswith(PROMPT)
    for token, offset in zip(found["tokens"][1:], found["text_offset"][1:], strict=True):
        assert choice["text"][offset:].startswith(token.lstrip() if offset == 0 else token)
    for token, own, top in list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]))[1:]:
        assert len(top) == 2 and own <= max(top.values()) and top.get(token, own) == own
    # The same from tokens, in a batch, and in a stream.
    both = front.post("/v1/completions", **fields, prompt=[ids, ids[:5]])["choices"]
    # Its text begins with the text of the token that begins a text.
    assert both[0]["text"] == "<s>" + choice["text"]
    offsets = [0, *(offset + 3 for offset in found["text_offset"][1:])]
    assert both[0]["logprobs"] == {**found, "text_offset": offsets}
    assert both[1]["logprobs"]["token_logprobs"][:5] == found["token_logprobs"][:5]
    chunks = front.stream("/v1/completions", **fields, prompt=PROMPT)
    for name in found:
        assert sum((chunk["choices"][0]["logprobs"][name] for chunk in chunks if chunk["choices"][0]["logprobs"]), []) == found[name]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    # Of the prompt alone.
    alone = front.post("/v1/completions", **{**fields, "max_tokens": 0}, prompt=PROMPT)
    assert alone["choices"][0]["text"] == PROMPT and alone["usage"]["completion_tokens"] == 0
    assert alone["choices"][0]["logprobs"] == {name: found[name][: len(ids)] for name in found}


@pytest.mark.parametrize(
    "body, status, param, words",
    [
        ("{", 400, None, "not JSON"),
        ("[]", 400, None, "not an object"),
        ({"prompt": "a"}, 400, "model", "'model'"),
        ({"model": "stories"}, 400, "prompt", "'prompt'"),
        ({"model": "stories", "prompt": [1, "a"]}, 400, "prompt", "token ids"),
        ({"model": "stories", "prompt": [1536]}, 400, "prompt", "0 to 1535"),
        ({"model": "stories", "prompt": "a", "suffix": "b"}, 400, "suffix", "leave it out"),
        ({"model": "tales", "prompt": "a"}, 404, "model", "'tales'"),
        ({"model": "stories", "prompt": "a", "temperature": 101}, 400, "temperature", "'temperature': 101"),
        ({"model": "stories", "prompt": "a", "temprature": 1}, 400, "temprature", "unknown field 'temprature'"),
        ({"model": "stories", "prompt": "a", "seed": 1.5}, 400, "seed", "'seed'"),
        ({"model": "stories", "prompt": "a", "stop": [1]}, 400, "stop", "list of texts"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_an_error_in_openais_form(front, body, status, param, words, stream):
    if isinstance(body, dict):
        body = {**body, "stream": stream}
    answer = front.call("POST", "/v1/completions", body)
    error = answer.json["error"]
    assert (answer.status, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert words in error["message"] and "option '" not in error["message"]
    assert answer.headers["content-type"] == "application/json"


def test_a_prompt_that_is_too_long_has_a_code_for_it(front):
    long = "The fox jumps. " * 2000
    for path, field, fields in [
        ("/v1/completions", "prompt", {"prompt": long}),
        ("/v1/completions", "prompt", {"prompt": [5] * 3000}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/responses", "input", {"input": long}),
    ]:
        answer = front.call("POST", path, {"model": "stories", **fields})
        error = answer.json["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", field), error


def test_a_key_has_its_own_limits_models_and_options(server, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(
        "sk-few requests=3\nsk-short tokens=10\nsk-other models=tales\nsk-plain options=min_p\nsk-all\n"
        "sk-adapter models=stories:poet\n"
    )
    completion = {"model": "stories", "prompt": "Once", "max_tokens": 8}

    def ask(key, path="/v1/completions", method="POST", **fields):
        headers = {"Authorization": f"Bearer sk-{key}"}
        body = {**completion, **fields} if method == "POST" else None
        return front.call(method, path, body, headers)

    with Front(server, f"--api-key-file={keys}") as front:
        assert [ask("few").status for _ in range(4)] == [200, 200, 200, 429]
        refused = ask("few")
        assert 1 <= int(refused.headers["retry-after"]) <= 21 and "3 requests" in refused.json["error"]["message"]
        assert ask("few", "/v1/models", "GET").status == 200, "only work is limited"
        # The tokens of a request are known when it is done.
        assert ask("short", max_tokens=30).status == 200
        refused = ask("short")
        assert refused.status == 429 and "10 tokens" in refused.json["error"]["message"], refused
        assert int(refused.headers["retry-after"]) > 60
        refused = ask("other")
        assert (refused.status, refused.json["error"]["param"]) == (403, "model")
        assert ask("other", "/v1/models", "GET").json["data"] == []
        assert ask("other", "/v1/models/stories", "GET").status == 404
        assert ask("other", "/tokenize", model=None, prompt="a").status == 400, "it names no model of its own"
        assert ask("adapter").status == 403 and ask("adapter", lora_task_id=1).status == 403
        assert ask("adapter", lora_name="poet").json["error"]["message"].count("may not use") == 0
        assert ask("plain", min_p=0.1).status == 200 and ask("plain", top_k=3).status == 400
        assert ask("all", top_k=3).status == 200


def test_models_are_loaded_and_unloaded_if_the_operator_allows_it(repository):
    add_model(repository, "stories", checkpoint=STORIES)
    completion = {"model": "stories", "prompt": "Once", "max_tokens": 4}
    with Server(repository) as server, Front(server, "--allow-model-control") as front:
        before = front.post("/v1/completions", **completion)["choices"]
        answer = front.call("POST", "/v1/models/stories/unload")
        assert (answer.status, answer.json) == (200, {"id": "stories", "object": "model", "is_loaded": False})
        assert front.call("POST", "/v1/completions", completion).status == 404
        for _ in range(2):
            assert front.call("POST", "/v1/models/stories/load").json["is_loaded"] is True
        assert front.post("/v1/completions", **completion)["choices"] == before
        for verb in ("load", "unload"):
            unknown = front.call("POST", f"/v1/models/tales/{verb}")
            assert unknown.status == 404 and "'tales'" in unknown.json["error"]["message"], unknown
        assert front.call("POST", "/v1/models/stories").status == 405
        with Front(server) as other:
            refused = other.call("POST", "/v1/models/stories/unload")
            assert refused.status == 403 and "--allow-model-control" in refused.json["error"]["message"]


def test_a_path_that_there_is_not_is_named(front):
    answer = front.call("GET", "/v1/fine-tunes")
    assert answer.status == 404 and "GET /v1/fine-tunes" in answer.json["error"]["message"]
    assert "allow" not in answer.headers


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        *(("GET", path, "POST") for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")),
        *(("PUT", path, "POST") for path in ("/tokenize", "/detokenize")),
        *(("POST", path, "GET,HEAD") for path in ("/v1/models", "/v1/models/stories", "/live", "/health", "/version")),
        ("PUT", "/", "POST,GET,HEAD"),
        ("OPTIONS", "/v1/completions", "POST"),
    ],
)
def test_a_wrong_method_is_told_the_methods_that_there_are(front, method, path, allowed):
    answer = front.call(method, path)
    error = answer.json["error"]
    assert (answer.status, answer.headers["allow"]) == (405, allowed)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "method_not_supported")
    assert f"{method} {path};" in error["message"]


def test_large_bodies_are_refused(server):
    with Front(server, "--max-request-bytes=1000") as front:
        fields = {"model": "stories", "max_tokens": 1}
        assert front.call("POST", "/v1/completions", {**fields, "prompt": "a" * 2000}).status == 413
        assert front.call("POST", "/v1/completions", {**fields, "prompt": "a" * 500}).status == 200


def zstd_frame(body):
    """One raw block: RFC 8878, 3.1.1."""
    size = len(body)
    return b"\x28\xb5\x2f\xfd\x20" + bytes([size]) + (size << 3 | 1).to_bytes(3, "little") + body


COMPRESSED = {
    "gzip": gzip.compress,
    "X-GZIP": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd_frame,
}


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_a_compressed_body_is_read(front, encoding):
    fields = {"model": "stories", "prompt": PROMPT, "max_tokens": 5}
    body = COMPRESSED[encoding](json.dumps(fields).encode())
    answer = front.call("POST", "/v1/completions", body, {"Content-Encoding": encoding})
    assert answer.status == 200, answer
    assert answer.json["choices"] == front.post("/v1/completions", **fields)["choices"]
    torn = front.call("POST", "/v1/completions", body[: len(body) // 2], {"Content-Encoding": encoding})
    assert torn.status == 400, torn


def test_other_encodings_are_refused_with_those_that_are_read(front):
    for encoding in ("br", "gzip, gzip", "compress"):
        answer = front.call("POST", "/v1/completions", b"{}", {"Content-Encoding": encoding})
        assert (answer.status, answer.headers["accept-encoding"]) == (415, "gzip, deflate, zstd"), encoding
        assert encoding in answer.json["error"]["message"]


def test_the_limit_on_bodies_is_one_on_what_they_contain(server):
    fields = {"model": "stories", "prompt": "a" * 100_000_000, "max_tokens": 1}
    body = gzip.compress(json.dumps(fields).encode())
    with Front(server, "--max-request-bytes=200000") as front:
        assert len(body) < 200_000
        assert front.call("POST", "/v1/completions", body, {"Content-Encoding": "gzip"}).status == 413


def test_more_prompts_than_are_ever_in_flight_are_no_reason_to_wait(server):
    with Front(server, "--max-requests=2") as front:
        fields = {"model": "stories", "prompt": ["a", "b", "c"], "max_tokens": 1}
        answer = front.call("POST", "/v1/completions", fields)
        assert (answer.status, answer.json["error"]["param"]) == (400, "prompt"), answer
        assert "retry-after" not in answer.headers and "--max-requests" in answer.json["error"]["message"]
        assert front.call("POST", "/v1/completions", {**fields, "prompt": ["a", "b"]}).status == 200


def test_a_seed_of_minus_1_is_none(front):
    fields = {"model": "stories", "prompt": PROMPT, "max_tokens": 30, "temperature": 1.5}
    texts = {front.post("/v1/completions", **fields, seed=-1)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1
    assert len({front.post("/v1/completions", **fields, seed=-2)["choices"][0]["text"] for _ in range(2)}) == 1


def test_clients_that_send_slowly_are_sent_away(server):
    fields = json.dumps({"model": "stories", "prompt": PROMPT, "max_tokens": 1})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: front\r\nContent-Length: {len(fields)}\r\n\r\n"
    with Front(server, "--request-timeout=1", "--max-requests=1") as front:
        # A body that is not there yet takes no room from others.
        pieces = [(head + fields[:10]).encode(), head[:30].encode(), b""]
        with contextlib.ExitStack() as stack:
            slow_body, slow_head, silent = (stack.enter_context(front.sent(piece)) for piece in pieces)
            assert front.call("POST", "/v1/completions", fields).status == 200
            answer = slow_body.makefile("rb").read().decode()
            assert answer.startswith("HTTP/1.1 408 ") and "within 1 s" in answer
            for connection in (slow_head, silent):
                assert b"200 OK" not in connection.makefile("rb").read(), "it is closed"


@pytest.mark.leaving
def test_a_client_that_leaves_ends_its_request(server, front):
    fields = {"model": "stories", "prompt": PROMPT, "max_tokens": 100_000, "ignore_eos": True}
    with front.request("POST", "/v1/completions", {**fields, "stream": True}) as response:
        next(events_of(response))
    assert_blocks_come_back(server, "stories")


@pytest.mark.leaving
@pytest.mark.parametrize("model", ["stories", "queued"])
def test_a_client_that_leaves_has_its_request_stopped_and_not_cancelled(server, front, model):
    """A cancellation that meets a response can crash server 2.51."""

    def num(kind, reason):
        labels = (("model", model), ("reason", reason), ("version", "1"))
        return server.metrics().get((kind, tuple(label for label in labels if label[1])), 0)

    before = num("nv_inference_request_failure", "CANCELED"), num("nv_inference_request_success", "")
    fields = {"model": model, "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "stream": True}
    body = json.dumps(fields)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: front\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(4):
        with front.sent((head + body).encode()) as connection:
            connection.recv(100)
    deadline = time.monotonic() + 60
    # Each request succeeds; those that are stopped early have a stop request, which succeeds, too.
    while num("nv_inference_request_success", "") < before[1] + 4:
        assert time.monotonic() < deadline, "the requests never end"
    assert_blocks_come_back(server, model)
    if model == "queued":  # Each sequence of the other driver ends with a request of Triton's own, which counts as cancelled.
        assert num("nv_inference_request_failure", "CANCELED") == before[0]


@pytest.mark.leaving
def test_a_client_that_takes_nothing_gives_its_place_back(server):
    """Its answer is larger than what the system keeps for it."""
    fields = {"model": "stories", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True}
    body = json.dumps({**fields, "n": 8, "temperature": 1, "logprobs": 20})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: front\r\nContent-Length: {len(body)}\r\n\r\n"
    with Front(server, "--request-timeout=1", "--max-requests=1") as front, socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        host, port = front.address.split(":")
        silent.connect((host, int(port)))
        silent.sendall((head + body).encode())
        small = {"model": "stories", "prompt": "a", "max_tokens": 1}
        deadline = time.monotonic() + 60
        while front.call("POST", "/v1/completions", small).status == 429:
            assert time.monotonic() < deadline, "its place never comes back"
        assert front.stop() == 0, "it does not wait for the client"
    assert_blocks_come_back(server, "stories")


def test_half_a_head_does_not_keep_the_front_from_stopping(server):
    with Front(server, "--request-timeout=3600") as front:
        with front.sent(b"POST /v1/completions HTTP/1.1\r\nHost: fr"):
            assert front.call("GET", "/health").status == 200
            assert front.stop() == 0


@pytest.mark.leaving
def test_a_request_that_takes_too_long_ends_when_the_front_stops(server):
    fields = {"model": "stories", "prompt": PROMPT, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with Front(server, "--drain-timeout=1") as front, front.request("POST", "/v1/completions", fields) as response:
        next(events_of(response))
        assert front.stop() == 0
    assert_blocks_come_back(server, "stories")


@pytest.mark.leaving
def test_more_requests_than_there_is_room_for_are_told_to_come_again(server):
    endless = {"model": "stories", "prompt": PROMPT, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with Front(server, "--max-requests=2") as front:
        two = {**endless, "prompt": [PROMPT, "The old bear"]}
        with front.request("POST", "/v1/completions", two) as response:
            next(events_of(response))
            answer = front.call("POST", "/v1/completions", {"model": "stories", "prompt": "a"})
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            assert answer.json["error"]["type"] == "rate_limit_error"
        # The permits come back when the front has seen that the client has left.
        while front.call("POST", "/v1/completions", {"model": "stories", "prompt": "a"}).status == 429:
            pass


def test_a_full_queue_is_told_to_come_again(front):
    fields = {"model": "narrow", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: front.call("POST", "/v1/completions", fields), range(16)))
    refused = [answer for answer in answers if answer.status != 200]
    assert 0 < len(refused) < 16
    assert {answer.status for answer in refused} == {429}
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)


def test_requests_need_a_key_if_there_is_a_file_of_keys(server, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# team a\nsk-one\nsk-two\n")
    with Front(server, f"--api-key-file={keys}") as front:
        for headers in ({}, {"Authorization": "Bearer sk-three"}):
            answer = front.call("GET", "/v1/models", headers=headers)
            assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert front.call("GET", "/v1/models", headers={"Authorization": f"{scheme} sk-two"}).status == 200
        assert front.call("GET", "/health").status == 200, "for those that watch servers"
        assert front.call("POST", "/", {"inputs": "a"}).status == 401
        with front.request("GET", "/") as page:
            assert page.status == 200, "the page asks for the key"


def test_keys_are_read_again_when_the_front_is_told_so(server, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")

    def status(key):
        return front.call("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"}).status

    with open(tmp_path / "log", "w") as file, open(tmp_path / "log") as log:
        with Front(server, f"--api-key-file={keys}", log=file) as front:
            keys.write_text("sk-two\n")
            front.reload(log)
            assert (status("sk-one"), status("sk-two")) == (401, 200)
            keys.write_text("# nobody\n")
            said = front.reload(log)
            assert (status("sk-one"), status("sk-two")) == (401, 200)
    assert "has no key; write one a line; the keys of before stay" in said


def test_each_request_has_a_line_in_the_log(server, tmp_path):
    fields = {"model": "stories", "prompt": PROMPT, "max_tokens": 3}
    path = tmp_path / "log"
    with path.open("wb") as log, Front(server, "--access-log", log=log) as front:
        with front.request("POST", "/v1/completions", {**fields, "stream": True}) as response:
            id, num_bytes = response.headers["x-request-id"], len(response.read())
        front.call("GET", "/v1/models/tales")
        with front.request("POST", "/v1/completions", {**fields, "stream": True, "max_tokens": 100_000, "ignore_eos": True}) as response:
            next(events_of(response))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["method"], line["path"], line["status"], line["is_whole"]) for line in lines] == [
        ("POST", "/v1/completions", 200, True),
        ("GET", "/v1/models/tales", 404, True),
        ("POST", "/v1/completions", 200, False),
    ]
    assert (lines[0]["id"], lines[0]["num_bytes"]) == (id, num_bytes)


def test_without_a_server_behind_it_the_front_says_so(server):
    class Nowhere:
        grpc_url = "127.0.0.1:1"

    with Front(Nowhere()) as front:
        for method, path, body in (
            ("GET", "/health", None),
            ("GET", "/v1/models", None),
            ("POST", "/v1/completions", {"model": "stories", "prompt": "a"}),
        ):
            answer = front.call(method, path, body)
            assert answer.status == 503 and "tritonserver" in answer.json["error"]["message"], answer
