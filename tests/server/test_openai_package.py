"""OpenAI's own client for Python, as it comes from PyPI, against the server with OpenAI's API."""

import asyncio
import concurrent.futures
import json
import re
import subprocess
import sys
import threading
import typing
from typing import Literal

import pydantic
import pytest

from harness.conversations import REPLY, TOOLS, USER, add_calling_model
from harness.front import Front
from harness.repository import ROOT, STORIES, add_model
from harness.server import Server, assert_blocks_come_back

try:
    import openai
except ImportError:
    pytest.skip("OpenAI's client for Python needs Python 3.11", allow_module_level=True)
from openai import types
from openai.types import chat, responses

PROMPT = "Once upon a time, there was a brave fox named Finn."
ENDLESS = {"model": "stories", "prompt": PROMPT, "max_tokens": 100_000, "extra_body": {"ignore_eos": True}}
EMBEDDINGS = ROOT / "tests" / "fixtures" / "embeddings" / "qwen3"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_package") / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    add_calling_model(repository, "chat")
    parameters = {"task": "embed", "gpt_model_path": EMBEDDINGS, "tokenizer_dir": EMBEDDINGS}
    add_model(repository, "qwen3", parameters)
    with Server(repository) as server:
        yield server


@pytest.fixture(scope="module")
def client(front):
    with client_of(front) as client:
        yield client


def client_of(front, **options):
    options = {"api_key": "sk-one", "max_retries": 0, **options}
    return openai.OpenAI(base_url=front.url + "/v1", **options)


def params_of(*variants):
    """The fields of the variants of a request."""
    return set().union(*(typing.get_type_hints(variant) for variant in variants))


@pytest.mark.parametrize(
    "section, variants",
    [
        ("completions", typing.get_args(types.completion_create_params.CompletionCreateParams)),
        ("chat", typing.get_args(chat.completion_create_params.CompletionCreateParams)),
        ("responses", typing.get_args(responses.response_create_params.ResponseCreateParams)),
        ("embeddings", [types.embedding_create_params.EmbeddingCreateParams]),
    ],
)
def test_each_field_of_a_request_is_in_the_table(section, variants):
    page = (ROOT / "docs/src/openai.md").read_text()
    (table,) = re.findall(rf"<!-- {section}: .*?<!-- /{section} -->", page, re.S)
    ours = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    theirs = params_of(*variants)
    assert {"model", "user"} <= theirs
    # Prompts of models, which OpenAI's have not.
    own = {"prompt_name", "input_type"} if section == "embeddings" else set()
    assert ours == theirs | own


def validated(kind, value, ours=()):
    """`value` as an object of `kind`, which has all that it must have, each part of its type, and nothing besides but
    `ours`."""
    value = pydantic.TypeAdapter(kind).validate_python(value)
    extras = set()

    def look(part):
        if isinstance(part, pydantic.BaseModel):
            extras.update(f"{type(part).__name__}.{name}" for name in part.model_extra or ())
            for name in type(part).model_fields:
                look(getattr(part, name))
        elif isinstance(part, list):
            for element in part:
                look(element)

    look(value)
    assert extras == set(ours)
    return value


def test_answers_have_the_types_of_the_package(front):
    validated(types.Model, front.call("GET", "/v1/models/stories").json)
    fields = {"model": "stories", "prompt": PROMPT, "max_tokens": 4, "n": 2, "logprobs": 2}
    validated(types.Completion, front.post("/v1/completions", **fields))
    for chunk in front.stream("/v1/completions", **fields, stream_options={"include_usage": True}):
        # The package has one type for answers and chunks, in which every choice has ended.
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        validated(types.Completion, chunk)
    fields = {"model": "chat", "messages": [USER], "max_tokens": 4, "n": 2, "logprobs": True, "top_logprobs": 2}
    validated(chat.ChatCompletion, front.post("/v1/chat/completions", **fields))
    for chunk in front.stream("/v1/chat/completions", **fields, stream_options={"include_usage": True}):
        validated(chat.ChatCompletionChunk, chunk)
    fields = {"model": "chat", "messages": [USER], "tools": TOOLS, "guided_choice": [REPLY]}
    names = ("reasoning", "reasoning_content")
    thoughts = [f"ChatCompletionMessage.{name}" for name in names]
    validated(chat.ChatCompletion, front.post("/v1/chat/completions", **fields), thoughts)
    for chunk in front.stream("/v1/chat/completions", **fields):
        delta = chunk["choices"][0]["delta"]
        validated(chat.ChatCompletionChunk, chunk, [f"ChoiceDelta.{name}" for name in names if name in delta])
    for encoding in ("float", "base64"):
        answer = front.post("/v1/embeddings", model="qwen3", input=["a", "b"], encoding_format=encoding)
        if encoding == "float":
            validated(types.CreateEmbeddingResponse, answer)
    fields = {"model": "chat", "input": "A fox", "tools": [{"type": "function", **TOOLS[0]["function"]}], "guided_choice": [REPLY]}
    # OpenAI's own responses have `store` as well.
    validated(responses.Response, front.post("/v1/responses", **fields), ["Response.store"])


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["chat", "qwen3", "stories"]
    assert client.models.retrieve("stories").object == "model"


def test_completions(client):
    fields = {"model": "stories", "prompt": PROMPT, "max_tokens": 30}
    whole = client.completions.create(**fields)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 30
    *chunks, last = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert (last.choices, last.usage.total_tokens) == ([], whole.usage.total_tokens)
    tokens = client.post("/../tokenize", body={"model": "stories", "prompt": PROMPT}, cast_to=object)["tokens"]
    assert client.completions.create(**{**fields, "prompt": tokens}).choices[0].text == whole.choices[0].text
    ended = client.completions.create(**fields, stop=whole.choices[0].text[10:14])
    assert ended.choices[0].text == whole.choices[0].text[:10] and ended.choices[0].finish_reason == "stop"
    drawn = [client.completions.create(**fields, temperature=1.5, seed=7, n=2, logprobs=1) for _ in range(2)]
    assert drawn[0].choices == drawn[1].choices
    first, second = drawn[0].choices
    assert first.text != second.text and len(first.logprobs.token_logprobs) == 30


def test_chat(client):
    fields = {"model": "stories", "messages": [USER], "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields)
    choice = whole.choices[0]
    assert "".join(place.token for place in choice.logprobs.content) == choice.message.content + "</s>"
    assert {len(place.top_logprobs) for place in choice.logprobs.content} == {2}
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        parts = [event.delta for event in stream if event.type == "content.delta"]
        streamed = stream.get_final_completion()
    assert "".join(parts) == streamed.choices[0].message.content == choice.message.content
    assert streamed.choices[0].logprobs == choice.logprobs and streamed.usage.total_tokens == whole.usage.total_tokens


class Animal(pydantic.BaseModel):
    """An answer."""

    kind: Literal["fox", "bear"]
    legs: Literal[2, 4]


def test_answers_conform_to_a_class(client):
    fields = {"model": "chat", "messages": [USER]}
    answer = client.chat.completions.parse(**fields, response_format=Animal)
    assert isinstance(answer.choices[0].message.parsed, Animal)
    with client.chat.completions.stream(**fields, response_format=Animal) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed
    answer = client.responses.parse(model="chat", input=USER["content"], text_format=Animal)
    assert isinstance(answer.output_parsed, Animal)


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]


def test_functions_are_called_and_their_results_sent_back(client):
    fields = {"model": "chat", "tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.parse(**fields, messages=[USER])
    message = answer.choices[0].message
    call = message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**fields, messages=[USER]) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0].message
    assert len(pieces) > 2 and all(piece.name == "Weather" for piece in pieces)
    assert "".join(piece.arguments_delta for piece in pieces) == streamed.tool_calls[0].function.arguments
    assert streamed.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    fields = {"model": "chat", "tools": fields["tools"], "tool_choice": "none", "max_tokens": 8}
    for said in (message, message.model_dump()):
        answer = client.chat.completions.create(**fields, messages=[USER, said, result])
        assert answer.choices[0].message.content


def test_responses(client):
    fields = {"model": "stories", "input": USER["content"]}
    assert client.responses.create(**fields, max_output_tokens=20).usage.output_tokens == 20
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(parts) == whole.output_text
    fields = {"model": "chat", "tools": [openai.pydantic_function_tool(Weather)]}
    asked = [USER]
    answer = client.responses.parse(**fields, input=asked, tool_choice="required", parallel_tool_calls=False)
    call = answer.output[-1]
    assert isinstance(call.parsed_arguments, Weather)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = client.responses.create(**fields, input=[*asked, *answer.output, result], max_output_tokens=8, tool_choice="none")
    assert answer.output_text


def test_embeddings(client):
    fields = {"model": "qwen3", "input": "The fox"}
    answer = client.embeddings.create(**fields)
    numbers = client.embeddings.create(**fields, encoding_format="float")
    # Without a format the client asks for base64, and decodes it.
    assert answer.data[0].embedding == pytest.approx(numbers.data[0].embedding, rel=1e-6)
    assert len(client.embeddings.create(model="qwen3", input=[[5, 6, 7], [8]], dimensions=8).data[1].embedding) == 8


def test_errors_are_exceptions_of_the_package(client, server, tmp_path):
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="tales", prompt="a")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="stories", prompt="a", suffix="b")
    assert error.value.param == "suffix" and error.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="stories", prompt="a", temperature=1000, stream=True)
    keys = tmp_path / "keys"
    keys.write_text("sk-two\n")
    with Front(server, f"--api-key-file={keys}") as front:
        with client_of(front) as stranger, pytest.raises(openai.AuthenticationError) as error:
            stranger.models.list()
        assert error.value.code == "invalid_api_key"
        with client_of(front, api_key="sk-two") as friend:
            assert friend.models.retrieve("stories").id == "stories"


def test_a_busy_server_is_asked_again(server):
    refused = threading.Event()

    def look(response):
        if response.status_code == 429:
            refused.set()

    hooks = openai.DefaultHttpxClient(event_hooks={"response": [look]})
    with (
        Front(server, "--max-requests=1") as front,
        client_of(front) as client,
        client_of(front, http_client=hooks, max_retries=20) as patient,
        concurrent.futures.ThreadPoolExecutor(1) as threads,
    ):
        with client.completions.create(**ENDLESS, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="stories", prompt=PROMPT, max_tokens=3)
            later = threads.submit(patient.completions.create, model="stories", prompt=PROMPT, max_tokens=3)
            refused.wait()
        assert later.result().usage.completion_tokens == 3


def test_a_client_that_closes_a_stream_or_waits_no_longer_ends_its_request(server, client):
    with client.completions.create(**ENDLESS, stream=True) as stream:
        next(iter(stream))
    assert_blocks_come_back(server, "stories")
    # The model needs longer for its whole context.
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**ENDLESS, timeout=0.02)
    assert_blocks_come_back(server, "stories")


def test_the_example_of_the_manual_prints_a_story(front):
    (example,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/src/openai.md").read_text(), re.M | re.S)
    url = "http://localhost:9000"
    assert url in example
    command = [sys.executable, "-c", example.replace(url, front.url).replace("any, unless there is an --api-key-file", "sk-one")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip()


def test_many_at_once(front):
    async def ask():
        async with openai.AsyncOpenAI(base_url=front.url + "/v1", api_key="sk-one", max_retries=0) as client:
            create = client.chat.completions.create
            fields = {"model": "stories", "messages": [USER], "max_tokens": 12}
            return await asyncio.gather(*(create(**fields) for _ in range(24)))

    texts = {answer.choices[0].message.content for answer in asyncio.run(ask())}
    assert len(texts) == 1, "a request has the same bits, alone or in a batch"
