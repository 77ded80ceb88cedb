"""Anthropic's Messages API: the answers of conversations, in another form.

The demo model knows no tools. A guide with a single choice makes it write a call."""

import json

import pytest

from harness.conversations import REPLY, TOOL, TOOLS, USER, add_calling_model, add_thinking_model
from harness.front import Front, named_events_of
from harness.repository import STORIES, add_model
from harness.server import Server, assert_blocks_come_back

PATH = "/v1/messages"
CHAT = "/v1/chat/completions"
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("messages") / "repository"
    add_calling_model(repository, "chat")
    add_thinking_model(repository, "thinker")
    add_model(repository, "stories", checkpoint=STORIES)
    add_model(repository, "short", {"max_seq_len": 64}, checkpoint=STORIES)
    with Server(repository) as server:
        yield server


def fields_of(**fields):
    return {"model": "stories", "messages": [USER], "max_tokens": 1000, **fields}


def stream(front, **fields):
    with front.request("POST", PATH, {**fields, "stream": True}) as response:
        assert response.status == 200, response.read()
        assert response.headers["request-id"] == response.headers["x-request-id"]
        return list(named_events_of(response))


def built(events):
    """The message that the events of a stream build, by Anthropic's rules."""
    message, inputs = None, {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta" | "thinking_delta" | "signature_delta" as kind:
                        field = kind.removesuffix("_delta")
                        block[field] += delta[field]
                    case "input_json_delta":
                        inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            case "message_delta":
                message.update(event["delta"], usage=event["usage"])
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    assert events[-1]["type"] == "message_stop"
    return message


def num_input(usage):
    """The tokens of a prompt, whether they were in the cache or not."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def without_id(message):
    """A message without its id, and with counts that the cache does not change."""
    usage = (num_input(message["usage"]), message["usage"]["output_tokens"])
    return {**message, "id": None, "usage": usage}


def test_a_message_has_the_text_of_a_conversation_whole_and_as_a_stream(front):
    fields = fields_of(temperature=0.8, seed=3)
    chat = front.post(CHAT, **fields)
    message = front.post(PATH, **fields)
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["id"].startswith("msg_") and message["role"] == "assistant"
    counts = chat["usage"]
    usage = message["usage"]
    assert (num_input(usage), usage["output_tokens"]) == (counts["prompt_tokens"], counts["completion_tokens"])
    assert usage["cache_creation_input_tokens"] == 0
    events = stream(front, **fields)
    assert without_id(built(events)) == without_id(message)
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert len(deltas) > 20


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thoughts_and_calls_are_blocks_and_go_back_to_the_model(front, display):
    thinking = {"type": "adaptive", "display": display}
    fields = fields_of(model="chat", tools=[TOOL], guided_choice=[REPLY], thinking=thinking)
    message = front.post(PATH, **fields)
    thought, text, *calls = message["content"]
    assert thought["thinking"].strip() == ("A fox?" if display == "summarized" else "") and thought["signature"]
    assert text["text"].strip() == "Let me see." and message["stop_reason"] == "tool_use"
    assert [(call["name"], call["input"]) for call in calls] == [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]
    assert all(call["id"].startswith("toolu_") for call in calls)
    events = stream(front, **fields)
    assert without_id(built(events)) == without_id(message)
    pieces = [event for event in events if event.get("delta", {}).get("type") == "input_json_delta"]
    assert len(pieces) > 2 * len(calls)

    # The prompt of the next request is the prompt of OpenAI's API, also if the client has not seen the thought.
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "Rain.", "is_error": True} for call in calls]
    messages = [USER, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": results}]
    said = front.post(CHAT, model="chat", messages=[USER], tools=TOOLS, guided_choice=[REPLY])["choices"][0]["message"]
    rain = [{"role": "tool", "tool_call_id": call["id"], "content": "Rain."} for call in said["tool_calls"]]
    expected = front.post("/tokenize", model="chat", messages=[USER, said, *rain], tools=TOOLS)
    counted = front.post(PATH + "/count_tokens", model="chat", messages=messages, tools=[TOOL])
    assert counted == {"input_tokens": expected["count"]}
    answer = front.post(PATH, **fields_of(model="chat", messages=messages, tools=[TOOL], max_tokens=5))
    assert num_input(answer["usage"]) == expected["count"] and answer["usage"]["output_tokens"] == 5
    assert answer["stop_reason"] == "max_tokens"


def test_a_tool_that_must_be_called_is_called_once(front):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = front.post(PATH, **fields_of(model="chat", tools=[TOOL], tool_choice=choice))
    (*_, call) = message["content"]
    assert message["stop_reason"] == "tool_use"
    assert call["name"] == "weather" and call["input"]["city"] in ("Oslo", "Rome")


def test_thinking_is_the_templates_variable(front):
    """The template of this model closes the thought that it opens, if it is told to."""
    count = lambda **fields: front.post(PATH + "/count_tokens", model="thinker", messages=[USER], **fields)["input_tokens"]
    assert count() == count(thinking={"type": "enabled", "budget_tokens": 1024}) < count(thinking={"type": "disabled"})
    kinds = lambda **fields: [block["type"] for block in front.post(PATH, **fields_of(model="thinker", **fields))["content"]]
    assert kinds(max_tokens=9) == ["thinking"]
    assert kinds(max_tokens=9, thinking={"type": "disabled"}) == ["text"]
    # The budget ends the thought.
    assert kinds(max_tokens=40, thinking={"type": "enabled", "budget_tokens": 9}) == ["thinking", "text"]


def test_the_end_has_its_reason(front):
    text = front.post(PATH, **fields_of())["content"][0]["text"]
    stop = text[40:48]
    sequences = ["never here", stop]
    message = front.post(PATH, **fields_of(stop_sequences=sequences))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.index(stop)]
    assert without_id(built(stream(front, **fields_of(stop_sequences=sequences)))) == without_id(message)
    message = front.post(PATH, **fields_of(max_tokens=7))
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 7)
    assert front.post(PATH, **fields_of(model="short"))["stop_reason"] == "model_context_window_exceeded"


def test_an_answer_that_has_begun_is_continued(front):
    begun = {"role": "assistant", "content": "Once upon a time, there was a brave"}
    message = front.post(PATH, **fields_of(messages=[USER, begun], max_tokens=9))
    options = {"model": "stories", "messages": [USER, begun], "max_tokens": 9}
    chat = front.post(CHAT, **options, continue_final_message=True)
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert num_input(message["usage"]) == chat["usage"]["prompt_tokens"]


def test_an_answer_conforms_to_its_schema(front):
    schema = {"type": "object", "properties": {"fox": {"enum": ["red"]}}, "required": ["fox"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = front.post(PATH, **fields_of(output_config=config))
    assert json.loads(message["content"][0]["text"]) == {"fox": "red"}


@pytest.mark.parametrize(
    "path, fields, status, kind, words",
    [
        (PATH, {"max_tokens": None}, 400, "invalid_request_error", "'max_tokens' is missing"),
        (PATH, {"tempo": 1}, 400, "invalid_request_error", "tempo: Extra inputs are not permitted"),
        (PATH, {"n": 2}, 400, "invalid_request_error", "n: Extra inputs are not permitted"),
        (PATH, {"container": "c"}, 400, "invalid_request_error", "'container' is not supported"),
        (PATH, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "invalid_request_error", "'document'"),
        (PATH, {"top_p": 7}, 400, "invalid_request_error", "'top_p': 7"),
        (PATH, {"stop_sequences": ["a" * 257]}, 400, "invalid_request_error", "'stop_sequences'"),
        (PATH, {"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        (PATH, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "string", "pattern": "(?=a)a"}}}}, 400, "invalid_request_error", "'pattern'"),
        (PATH, {"model": "tales"}, 404, "not_found_error", "'tales'"),
        (PATH + "/count_tokens", {"model": "tales", "max_tokens": None}, 404, "not_found_error", "'tales'"),
        (PATH + "/count_tokens", {}, 400, "invalid_request_error", "max_tokens: Extra inputs"),
        (PATH + "/batches", {}, 404, "not_found_error", PATH + "/batches"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_wrong_is_named(front, path, fields, status, kind, words, is_stream):
    body = {**fields_of(**fields), **({"stream": True} if is_stream and path == PATH else {})}
    answer = front.call("POST", path, body)
    error = answer.json
    assert (answer.status, error["type"], error["error"]["type"]) == (status, "error", kind), error
    assert words in error["error"]["message"] and error["error"].keys() == {"type", "message"}
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_keys_and_models_are_those_of_anthropics_clients(server, front, tmp_path):
    page = front.call("GET", "/v1/models", headers=VERSION).json
    assert [model["id"] for model in page["data"]] == ["chat", "short", "stories", "thinker"]
    assert (page["has_more"], page["last_id"], page["data"][1]["max_tokens"]) == (False, "thinker", 64)
    assert front.call("GET", "/v1/models/short", headers=VERSION).json == page["data"][1]
    assert front.call("GET", "/v1/models").json["object"] == "list"
    assert front.call("GET", "/v1/files", headers=VERSION).json["error"]["type"] == "not_found_error"
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    with Front(server, f"--api-key-file={keys}") as locked:
        body = fields_of(max_tokens=1)
        for headers in ({"x-api-key": "sk-one"}, {"authorization": "Bearer sk-one"}):
            assert locked.call("POST", PATH, body, headers).status == 200
        for headers in ({}, {"x-api-key": "sk-two"}):
            answer = locked.call("POST", PATH, body, headers)
            assert (answer.status, answer.json["error"]["type"]) == (401, "authentication_error")


def test_a_client_that_leaves_ends_its_request(server, front):
    fields = fields_of(ignore_eos=True, stream=True, max_tokens=100_000)
    with front.request("POST", PATH, fields) as response:
        next(named_events_of(response))
    assert_blocks_come_back(server, "stories")
