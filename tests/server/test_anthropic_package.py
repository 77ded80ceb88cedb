"""Anthropic's own client for Python, as it comes from PyPI, against the server with Anthropic's API."""

import asyncio
import re
import subprocess
import sys
from typing import Literal

import pydantic
import pytest

from harness.conversations import REPLY, TOOL, USER, add_calling_model
from harness.front import Front
from harness.repository import ROOT, STORIES, add_model
from harness.server import Server, assert_blocks_come_back

try:
    import anthropic
except ImportError:
    pytest.skip("Anthropic's client for Python needs Python 3.11", allow_module_level=True)
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params

PAGE = ROOT / "docs" / "src" / "anthropic.md"
FIELDS = {"model": "stories", "messages": [USER], "max_tokens": 1000}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("anthropic_package") / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    add_calling_model(repository, "chat")
    with Server(repository) as server:
        yield server


@pytest.fixture(scope="module")
def client(front):
    with client_of(front) as client:
        yield client


def client_of(front, **options):
    return anthropic.Anthropic(base_url=front.url, **{"api_key": "sk-one", "max_retries": 0, **options})


def parts(message):
    """The blocks of a message, as the request that follows it has them."""
    return [block.model_dump(exclude={"parsed_output"}, exclude_none=True) for block in message.content]


# The package sends these as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}


@pytest.mark.parametrize(
    "section, params",
    [
        ("messages", message_create_params.MessageCreateParamsBase),
        ("messages", beta_create_params.MessageCreateParamsBase),
        ("count-tokens", message_count_tokens_params.MessageCountTokensParams),
    ],
    ids=["messages", "beta", "count_tokens"],
)
def test_all_fields_of_requests_are_documented(section, params):
    table = PAGE.read_text().partition(f"<!-- {section}:")[2].partition(f"<!-- /{section} -->")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    assert params.__annotations__.keys() - HEADERS <= documented


def test_messages(client):
    whole = client.messages.create(**FIELDS)
    assert whole.stop_reason == "end_turn" and len(whole.content[0].text) > 200
    with client.messages.stream(**FIELDS) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert (parts(final), final.usage.output_tokens) == (parts(whole), whole.usage.output_tokens)
    raw = client.messages.with_raw_response.create(**{**FIELDS, "max_tokens": 3})
    message = raw.parse()
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)
    assert raw.headers["request-id"] == message.id == message._request_id
    counted = client.messages.count_tokens(model="stories", messages=[USER])
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_thoughts_and_tools_go_back_and_forth(client):
    fields = {**FIELDS, "model": "chat", "tools": [TOOL]}
    forced = {"extra_body": {"guided_choice": [REPLY]}}
    message = client.messages.create(**fields, **forced)
    with client.messages.stream(**fields, **forced) as stream:
        assert parts(stream.get_final_message()) == parts(message)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    asked = [USER, message.to_param()]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "Rain."} for block in message.content if block.type == "tool_use"]
    answer = client.messages.create(**{**fields, "messages": [*asked, {"role": "user", "content": results}], "max_tokens": 8})
    assert answer.usage.output_tokens == 8 and answer.usage.cache_read_input_tokens > 0
    beta = client.beta.messages.create(**fields, **forced, betas=["interleaved-thinking-2025-05-14"])
    assert parts(beta) == parts(message)


def test_the_runner_of_tools_calls_functions(client):
    asked = []

    @anthropic.beta_tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city.

        Args:
            city: The city.
        """
        asked.append(city)
        return "sunny"

    choice = {"type": "any", "disable_parallel_tool_use": True}
    runner = client.beta.messages.tool_runner(**{**FIELDS, "model": "chat"}, tools=[weather], tool_choice=choice, max_iterations=2)
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use"]
    assert asked and set(asked) <= {"Oslo", "Rome"}


def test_an_answer_is_parsed(client):
    class City(pydantic.BaseModel):
        city: Literal["Oslo", "Rome"]

    parsed = client.messages.parse(**FIELDS, output_format=City).parsed_output
    assert parsed.city in ("Oslo", "Rome")


def test_models(client):
    assert [model.id for model in client.models.list()] == ["chat", "stories"]
    assert client.models.retrieve("stories").display_name == "stories"


def test_errors_are_exceptions_of_the_package(client, server, tmp_path):
    with pytest.raises(anthropic.NotFoundError) as error:
        client.messages.create(**{**FIELDS, "model": "tales"})
    assert error.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="'container' is not supported"):
        client.messages.create(**FIELDS, extra_body={"container": "c"})
    with pytest.raises(anthropic.BadRequestError, match="top_p"), client.messages.stream(**FIELDS, extra_body={"top_p": 7}):
        pass
    keys = tmp_path / "keys"
    keys.write_text("sk-two\n")
    with Front(server, f"--api-key-file={keys}") as front:
        with client_of(front) as stranger, pytest.raises(anthropic.AuthenticationError):
            stranger.models.list()
        for options in ({"api_key": "sk-two"}, {"api_key": None, "auth_token": "sk-two"}):
            with client_of(front, **options) as friend:
                assert friend.messages.create(**{**FIELDS, "max_tokens": 1}).id


def test_a_busy_server_and_clients_that_leave(server):
    endless = {**FIELDS, "max_tokens": 100_000, "extra_body": {"ignore_eos": True}}
    with Front(server, "--max-requests=1") as front, client_of(front) as client:
        with client.messages.stream(**endless) as stream:
            next(iter(stream))
            with pytest.raises(anthropic.RateLimitError):
                client.messages.create(**FIELDS)
        assert_blocks_come_back(server, "stories")


def test_many_at_once(front):
    async def ask():
        async with anthropic.AsyncAnthropic(base_url=front.url, api_key="sk-one", max_retries=0) as client:
            return await asyncio.gather(*(client.messages.create(**{**FIELDS, "max_tokens": 12}) for _ in range(24)))

    texts = {message.content[0].text for message in asyncio.run(ask())}
    assert len(texts) == 1, "a request has the same bits, alone or in a batch"


def test_the_example_of_the_manual_prints_a_story(front):
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    url = "http://localhost:9000"
    assert url in example
    command = [sys.executable, "-c", example.replace(url, front.url).replace("any, unless there is an --api-key-file", "sk-one")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip()
