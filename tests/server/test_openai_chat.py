"""Conversations with the server with OpenAI's API.

The demo model knows no tools. A guide with a single choice makes it write a call."""

import ast
import json

import pytest

from harness.clients import generate
from harness.conversations import END_OF_THOUGHT, REPLY, TOOLS, USER, WEATHER, add_calling_model, add_thinking_model, joined
from harness.front import counts
from harness.repository import STORIES, add_model
from harness.server import Server

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_chat") / "repository"
    add_calling_model(repository, "chat")
    add_thinking_model(repository, "thinker")
    add_model(repository, "stories", checkpoint=STORIES)
    with Server(repository) as server:
        yield server


def merged(chunks, index=0):
    """The message that the chunks of a choice make, and how it ended."""
    message = {}
    reasons = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            for name, value in choice["delta"].items():
                message[name] = message[name] + value if name in message else value
            reasons.append(choice["finish_reason"])
    *running, last = reasons
    assert set(running) <= {None}
    return message, last


@pytest.mark.parametrize("content", [USER["content"], [{"type": "text", "text": "Tell me a story"}, {"type": "text", "text": " about a fox."}]])
def test_a_message_is_what_the_model_gives(server, front, content):
    expected = generate(
        server, "stories", "", messages=json.dumps([USER]), max_tokens=40, exclude_input_in_output=True
    )
    messages = [{"role": "user", "content": content}]
    answer = front.post(CHAT, model="stories", messages=messages, max_completion_tokens=40)
    message = {"role": "assistant", "content": expected.text, "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    num_prompt_tokens = expected.responses[0].num_input_tokens
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 40, "total_tokens": num_prompt_tokens + 40}
    assert counts(answer) == usage


def test_a_stream_makes_the_same_message(front):
    fields = {"model": "stories", "messages": [USER], "max_tokens": 40, "temperature": 0.8, "seed": 3, "n": 2}
    whole = front.post(CHAT, **fields)
    *chunks, last = front.stream(CHAT, **fields, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index, choice in enumerate(whole["choices"]):
        expected = {"role": "assistant", "content": choice["message"]["content"]}
        assert merged(chunks, index) == (expected, choice["finish_reason"])
    assert whole["choices"][0]["message"] != whole["choices"][1]["message"]
    assert (last["choices"], counts(last)) == ([], counts(whole))


def test_an_answer_without_a_limit_is_whole(front):
    choice = front.post(CHAT, model="stories", messages=[USER])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["message"]["content"]) > 200


def test_thoughts_and_calls_are_parts_of_the_message(front):
    fields = {"model": "chat", "messages": [USER], "tools": TOOLS, "guided_choice": [REPLY]}
    choice = front.post(CHAT, **fields)["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning_content"].strip() == "A fox?" and message["content"].strip() == "Let me see."
    called = [(call["type"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert called == [("function", "weather", {"city": "Oslo"}), ("function", "weather", {"city": "Rome"})]
    streamed, reason = merged(front.stream(CHAT, **fields))
    assert reason == "tool_calls"
    assert len(streamed["tool_calls"]) > 4, "arguments come in pieces"
    streamed["tool_calls"] = joined(streamed["tool_calls"])
    message.pop("refusal")
    assert streamed == message


def test_a_guided_answer_is_content_where_the_template_opens_a_thought(front):
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    fields = {"model": "thinker", "messages": [USER], "response_format": form, "max_tokens": 40}
    thinking = front.post(CHAT, **fields)["choices"][0]["message"]
    assert not thinking["content"] and len(thinking["reasoning_content"]) > 20
    fields["logit_bias"] = {END_OF_THOUGHT: 100}
    choice = front.post(CHAT, **fields)["choices"][0]
    assert json.loads(choice["message"]["content"]) == {"n": 7} and choice["finish_reason"] == "stop"
    streamed, reason = merged(front.stream(CHAT, **fields))
    assert (streamed["content"], reason) == (choice["message"]["content"], "stop")
    items = front.post("/v1/responses", model="thinker", input="x", text={"format": {"name": "a", "type": "json_schema", "schema": schema}}, logit_bias=fields["logit_bias"])
    assert json.loads(items["output"][-1]["content"][0]["text"]) == {"n": 7}


def test_a_thought_ends_with_its_budget(server, front):
    fields = {"model": "thinker", "messages": [USER], "max_tokens": 40, "logit_bias": {END_OF_THOUGHT: -20}}

    def parts(**more):
        answer = front.post(CHAT, **fields, **more)
        message = answer["choices"][0]["message"]
        details = answer["usage"]["completion_tokens_details"]
        return message.get("reasoning_content"), message["content"], details["reasoning_tokens"]

    thought, content, num_tokens = parts()
    assert (content, num_tokens) == ("", 40)
    for budget in (3, 7, 39):
        cut, answer, num_tokens = parts(thinking_token_budget=budget)
        assert thought.startswith(cut) and num_tokens == budget and (answer or budget == 39)
    assert parts(thinking_token_budget=0)[2] == 0 and parts(thinking_token_budget=40) == (thought, "", 40)
    # Beside a guide, in a stream, and with others at once.
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [[7, 8]]}}}}
    guided, answer, num_tokens = parts(thinking_token_budget=7, **form)
    assert (guided, json.loads(answer), num_tokens) == (parts(thinking_token_budget=7)[0], [7, 8], 7)
    streamed, _ = merged(front.stream(CHAT, **fields, **form, thinking_token_budget=7))
    assert (streamed["reasoning_content"], streamed["content"]) == (guided, answer)
    drawn = {**fields, "temperature": 1.0, "seed": 5, "thinking_token_budget": 7}
    both = front.post(CHAT, **drawn, n=2)
    alone = [front.post(CHAT, **{**drawn, "seed": seed})["choices"][0]["message"] for seed in (5, 6)]
    assert [choice["message"] for choice in both["choices"]] == alone
    assert both["usage"]["completion_tokens_details"]["reasoning_tokens"] == 14
    # The template has closed the thought.
    closed = {"enable_thinking": False}
    assert parts(thinking_token_budget=1, chat_template_kwargs=closed) == parts(chat_template_kwargs=closed)
    plain = {**fields, "logit_bias": None, "thinking_token_budget": 5}
    refused = front.call("POST", CHAT, {**plain, "model": "chat"})
    assert refused.status == 400 and "no token for '</think>'" in refused.json["error"]["message"], refused.json
    # A model without reasoning has nothing to limit.
    assert len(front.post(CHAT, **{**plain, "model": "stories"})["choices"][0]["message"]["content"]) > 40


UNENFORCED = {"type": "object", "required": ["a"], "additionalProperties": False, "properties": {
    "a": {"type": "array", "uniqueItems": True, "maxItems": 2, "items": {"type": "string", "pattern": "^[a-z]{1,3}$"}}}}


def test_what_of_a_schema_is_not_enforced_is_in_a_header(front):
    def form(schema, **more):
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}

    fields = {"model": "stories", "messages": [USER], "response_format": form(UNENFORCED), "max_tokens": 60}
    for streams in (False, True):
        with front.request("POST", CHAT, {**fields, "stream": streams}) as response:
            warning = response.headers["Warning"]
            assert response.status == 200 and response.read()
        assert warning == "299 inflight \"not enforced: 'uniqueItems' at '#/properties/a'\""
    refused = front.call("POST", CHAT, {**fields, "response_format": form(UNENFORCED, strict=True)})
    assert refused.status == 400 and "'uniqueItems' at '#/properties/a'" in refused.json["error"]["message"]
    everyday = {"type": "object", "required": ["a"], "properties": {"a": {"type": "string", "format": "password", "maxLength": 2}}, "additionalProperties": False}
    answer = front.call("POST", CHAT, {**fields, "response_format": form(everyday, strict=True)})
    assert answer.status == 200 and "warning" not in answer.headers
    assert len(json.loads(answer.json["choices"][0]["message"]["content"])["a"]) <= 2


def test_a_function_whose_schema_cannot_be_used_refuses_nothing(front):
    bad = {"name": "bad", "parameters": {"type": "object", "properties": {"x": {"$ref": "http://example.com/x"}}}}
    tools = [{"type": "function", "function": function} for function in (bad, WEATHER, {"name": "now"})]
    fields = {"model": "chat", "messages": [USER], "tools": tools, "parallel_tool_calls": False, "max_tokens": 300}
    for name, arguments in [("weather", ({"city": "Oslo"}, {"city": "Rome"})), ("now", ({},))]:
        answer = front.call("POST", CHAT, {**fields, "tool_choice": {"type": "function", "function": {"name": name}}})
        (call,) = answer.json["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == name and json.loads(call["function"]["arguments"]) in arguments
        assert "warning" not in answer.headers
    answer = front.call("POST", CHAT, {**fields, "tool_choice": "required"})
    assert answer.status == 200 and "function 'bad': its whole schema, because its '$ref' to 'http" in answer.headers["warning"]
    bad["strict"] = True
    refused = front.call("POST", CHAT, {**fields, "tool_choice": "required"})
    assert refused.status == 400 and "function 'bad'" in refused.json["error"]["message"]


@pytest.mark.parametrize(
    "choice, reason", [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")]
)
def test_a_call_that_must_be_is_one(front, choice, reason):
    fields = {"model": "chat", "messages": [USER], "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    answer = front.post(CHAT, **fields, max_tokens=300)["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    assert answer["finish_reason"] == reason
    streamed, streamed_reason = merged(front.stream(CHAT, **fields, max_tokens=300))
    assert len(joined(streamed["tool_calls"])) == 1 and streamed_reason == reason
    cut_off = front.post(CHAT, **fields, max_tokens=3)["choices"][0]
    assert "tool_calls" not in cut_off["message"] and cut_off["finish_reason"] == "length"


def test_the_result_of_a_call_goes_back_to_the_model(front):
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "Rain."},
    ]
    answer = front.post(CHAT, model="chat", messages=messages, tools=TOOLS, max_tokens=5)
    assert answer["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("strict", [True, False, None])
def test_an_answer_conforms_to_its_schema(front, strict):
    schema = {
        "type": "object",
        "properties": {"fox": {"enum": ["red", "grey"]}, "age": {"type": "integer", "maximum": 9, "minimum": 1}},
        "required": ["fox", "age"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "json_schema": {"name": "fox", "schema": schema, "strict": strict}}
    choice = front.post(CHAT, model="stories", messages=[USER], response_format=format)["choices"][0]
    found = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert found.keys() == {"fox", "age"} and found["fox"] in ("red", "grey") and found["age"] in range(1, 10)


def test_an_answer_may_be_any_object(front):
    fields = {"model": "stories", "messages": [USER], "response_format": {"type": "json_object"}, "max_tokens": 60}
    content = front.post(CHAT, **fields)["choices"][0]["message"]["content"]
    assert content.lstrip().startswith("{")


def test_log_probabilities_are_those_of_each_token(front):
    fields = {"model": "stories", "messages": [USER], "max_tokens": 8, "logprobs": True}
    choice = front.post(CHAT, **fields, top_logprobs=2)["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == choice["message"]["content"]
    for token in tokens:
        assert [len(token["top_logprobs"]), token["top_logprobs"][0]["logprob"]] == [2, token["logprob"]]
    chunks = front.stream(CHAT, **fields, top_logprobs=2)
    assert sum((chunk["choices"][0]["logprobs"]["content"] for chunk in chunks), []) == tokens
    alone = front.post(CHAT, **fields)["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in alone] == [[]] * 8


FOXES = "a \U0001f98a \U0001f98a"


def test_the_bytes_of_tokens_are_those_of_the_text(front):
    fields = {"model": "stories", "messages": [USER], "guided_choice": [FOXES], "logprobs": True, "top_logprobs": 3}
    choice = front.post(CHAT, **fields)["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert choice["message"]["content"] == FOXES
    joined = b"".join(bytes(token["bytes"]) for token in tokens).decode()
    assert joined.strip().removesuffix("</s>") == FOXES
    assert any("\ufffd" in token["token"] for token in tokens), "the fox is of several tokens"
    chunks = front.stream(CHAT, **fields)
    assert sum((chunk["choices"][0]["logprobs"]["content"] for chunk in chunks if chunk["choices"][0]["logprobs"]), []) == tokens


def test_the_keys_of_completions_have_the_bytes_of_parts_of_characters(front):
    fields = {"model": "stories", "prompt": "The fox", "guided_choice": [FOXES], "logprobs": 3, "max_tokens": 60}
    choice = front.post("/v1/completions", **fields)["choices"][0]
    logprobs = choice["logprobs"]
    parts = [key.removeprefix("bytes:") if key.startswith("bytes:") else None for key in logprobs["tokens"]]
    joined = [
        key.encode() if part is None else ast.literal_eval(f'b"{part}"')
        for key, part in zip(logprobs["tokens"], parts, strict=True)
    ]
    assert b"".join(joined).decode().strip().removesuffix("</s>") == choice["text"].strip() == FOXES
    assert sum(part is not None for part in parts) >= 4
    assert all(len(top) >= 3 for top in logprobs["top_logprobs"]), "no two tokens have the same key"


def test_only_functions_that_are_allowed_are_called(front):
    other = {"type": "function", "function": {**WEATHER, "name": "forecast"}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    fields = {"model": "chat", "messages": [USER], "tools": [other, *TOOLS], "tool_choice": choice}
    answer = front.post(CHAT, **fields, max_tokens=300)["choices"][0]
    calls = answer["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"weather"}
    fields["tools"] = [other]
    error = front.call("POST", CHAT, fields).json["error"]
    assert error["param"] == "tool_choice" and "'weather' is allowed" in error["message"]


@pytest.mark.parametrize("arguments", ["", "null", None, "[]", "{bad"])
def test_a_call_that_went_wrong_is_no_end_of_a_conversation(front, arguments):
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "No."}]
    answer = front.post(CHAT, model="chat", messages=messages, tools=TOOLS, max_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


def test_biases_and_stops_act(front):
    fields = {"model": "stories", "messages": [USER], "max_tokens": 40}
    text = front.post(CHAT, **fields)["choices"][0]["message"]["content"]
    word = text.split()[3]
    stopped = front.post(CHAT, **fields, stop=word)["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == (text[: text.index(word)], "stop")
    biased = front.post(CHAT, **fields, logit_bias={"20": 100})["choices"][0]["message"]["content"]
    assert biased != text


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"messages": []}, "messages", "1 to"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "content[0]"),
        ({"functions": [WEATHER]}, "functions", "give 'tools'"),
        ({"top_logprobs": 2}, "top_logprobs", "'logprobs'"),
        ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
        ({"tool_choice": "required"}, "tool_choice", "'tools'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format", "'response_format'"),
        ({"tools": [{"type": "custom"}]}, "tools", '"custom"'),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools[0].function.name"),
        ({"verbosity": "low"}, "verbosity", "leave it out"),
        ({"best": 1}, "best", "'best_of'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_named(front, fields, param, words, stream):
    answer = front.call("POST", CHAT, {"model": "stories", "messages": [USER], **fields, "stream": stream})
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert words in error["message"]


def test_fields_without_effect_may_be_given(front):
    fields = {"model": "stories", "messages": [USER], "max_tokens": 5}
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k"}
    nothing = {"audio": None, "modalities": ["text"], "verbosity": "medium"}
    expected = front.post(CHAT, **fields)["choices"]
    assert front.post(CHAT, **fields, **ignored, **nothing)["choices"] == expected
