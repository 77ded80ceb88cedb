"""Responses of the server with OpenAI's API: the answers of conversations, in another form.

The demo model knows no tools. A guide with a single choice makes it write a call."""

import json

import pytest

from harness.conversations import REPLY, USER, WEATHER, add_calling_model
from harness.front import counts, named_events_of
from harness.repository import STORIES, add_model
from harness.server import Server, assert_blocks_come_back

PATH = "/v1/responses"
CHAT = "/v1/chat/completions"
TEXT = USER["content"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_responses") / "repository"
    add_calling_model(repository, "chat")
    add_model(repository, "stories", checkpoint=STORIES)
    with Server(repository) as server:
        yield server


def stream(front, **fields):
    with front.request("POST", PATH, {**fields, "stream": True}) as response:
        assert response.status == 200, response.read()
        events = list(named_events_of(response))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


# Fields that differ between runs.
LEFT_OUT = ("id", "created_at", "call_id", "cached_tokens")


def without_ids(value):
    """A response without the fields that differ between runs."""
    if isinstance(value, list):
        return [without_ids(element) for element in value]
    if isinstance(value, dict):
        return {name: without_ids(element) for name, element in value.items() if name not in LEFT_OUT}
    return value


@pytest.mark.parametrize("given", [TEXT, [USER], [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]])
def test_a_response_has_the_text_of_a_conversation(front, given):
    chat = front.post(CHAT, model="stories", messages=[USER], max_tokens=40)
    response = front.post(PATH, model="stories", input=given, max_output_tokens=40)
    (item,) = response["output"]
    (part,) = item["content"]
    assert (item["type"], item["role"], part["type"]) == ("message", "assistant", "output_text")
    assert part["text"] == chat["choices"][0]["message"]["content"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    usage = {name: response["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")}
    assert list(usage.values()) == list(counts(chat).values())
    assert (response["object"], response["model"], response["store"]) == ("response", "stories", False)


def test_a_stream_builds_the_same_response(front):
    fields = {"model": "stories", "input": TEXT, "temperature": 0.8, "seed": 3}
    whole = front.post(PATH, **fields)
    assert whole["status"] == "completed" and whole["temperature"] == 0.8
    events = stream(front, **fields)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == whole["output"][0]["content"][0]["text"] and len(deltas) > 20


def test_instructions_are_a_message_of_the_system(front):
    system = {"role": "system", "content": "Be brief."}
    chat = front.post(CHAT, model="chat", messages=[system, USER], max_tokens=20)
    response = front.post(PATH, model="chat", input=TEXT, instructions="Be brief.", max_output_tokens=20)
    assert response["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_thoughts_and_calls_are_items_and_go_back_to_the_model(front):
    tools = [{"type": "function", **WEATHER}]
    fields = {"model": "chat", "input": TEXT, "tools": tools, "guided_choice": [REPLY]}
    response = front.post(PATH, **fields)
    reasoning, message, *calls = response["output"]
    assert reasoning["content"][0]["text"].strip() == "A fox?"
    assert message["content"][0]["text"].strip() == "Let me see."
    called = [(call["type"], call["name"], json.loads(call["arguments"])) for call in calls]
    assert called == [("function_call", "weather", {"city": "Oslo"}), ("function_call", "weather", {"city": "Rome"})]
    events = stream(front, **fields)
    assert without_ids(events[-1]["response"]) == without_ids(response)
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(pieces) > 2 * len(calls) and "".join(pieces) == "".join(call["arguments"] for call in calls)
    done = [event["arguments"] for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done == [call["arguments"] for call in calls]

    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."} for call in calls]
    items = [USER, *response["output"], *results]
    answer = front.post(PATH, model="chat", input=items, tools=tools, max_output_tokens=5)
    assert answer["usage"]["output_tokens"] == 5
    must = {"tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False, "max_output_tokens": 300}
    (*_, call) = front.post(PATH, model="chat", input=TEXT, tools=tools, **must)["output"]
    assert call["name"] == "weather" and json.loads(call["arguments"])["city"] in ("Oslo", "Rome")


def test_a_response_conforms_to_its_schema(front):
    schema = {"type": "object", "properties": {"fox": {"enum": ["red"]}}, "required": ["fox"], "additionalProperties": False}
    format = {"type": "json_schema", "name": "fox", "schema": schema, "strict": True}
    response = front.post(PATH, model="stories", input=TEXT, text={"format": format})
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"fox": "red"}
    assert response["text"] == {"format": format}


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"store": True}, "store", "nothing is stored"),
        ({"previous_response_id": "resp-1"}, "previous_response_id", "nothing is stored"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'function'"),
        ({"temperature": 101}, "temperature", "'temperature': 101"),
        ({"model": "tales"}, "model", "'tales'"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_wrong_is_named(front, fields, param, words, is_stream):
    answer = front.call("POST", PATH, {"model": "stories", "input": TEXT, **fields, "stream": is_stream})
    error = answer.json["error"]
    assert (answer.status in (400, 404), error["param"]) == (True, param), error
    assert words in error["message"]


def test_a_client_that_leaves_ends_its_request(server, front):
    fields = {"model": "stories", "input": TEXT, "ignore_eos": True, "stream": True}
    with front.request("POST", PATH, fields) as response:
        next(named_events_of(response))
    assert_blocks_come_back(server, "stories")
