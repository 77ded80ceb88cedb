"""Conversations: several chat templates, their variables, messages that are continued, and the parts of replies.

The demo model knows no tools. A guide with a single choice makes it write a call."""

import json
import re
import shutil

import pytest

from harness.clients import Refused, generate, generate_stream
from harness.conversations import END_OF_THOUGHT, add_thinking_model, joined
from harness.repository import STORIES, add_model
from harness.server import Server

# Special tokens of the demo model, so that plain prompts have the same tokens.
TURNS = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEMPLATES = {
    # The comment has the marks of replies, as the templates of models that think and call functions do.
    "default": "{# <think></think><tool_call></tool_call> #}" + TURNS + "{% if mood is defined %}{{ mood }}{% endif %}",
    "tool_use": "{% for tool in tools %}{{ tool.function.name + ' ' }}{% endfor %}" + TURNS,
    "rag": "{% for document in documents %}{{ document.text + ' ' }}{% endfor %}" + TURNS,
}
USER = {"role": "user", "content": "Tell me a story about a fox."}
BEGUN = {"role": "assistant", "content": "Once upon a time "}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("chat") / "repository"
    version = add_model(repository, "chat")
    shutil.copytree(STORIES, version, dirs_exist_ok=True)
    config = json.loads((version / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": template} for name, template in TEMPLATES.items()]
    (version / "tokenizer_config.json").write_text(json.dumps(config))
    add_thinking_model(repository, "thinker")
    with Server(repository) as server:
        yield server


def prompt_of(server, messages, **options):
    """What the template writes: a full answer starts with the prompt."""
    options = {name: value if isinstance(value, bool) else json.dumps(value) for name, value in options.items()}
    if "chat_template" in options:
        options["chat_template"] = json.loads(options["chat_template"])
    answer = generate(server, "chat", "", messages=json.dumps(messages), max_tokens=1, skip_special_tokens=False, **options)
    whole = generate(
        server, "chat", "", messages=json.dumps(messages), max_tokens=1, exclude_input_in_output=True, skip_special_tokens=False, **options
    )
    return answer.text.removesuffix(whole.text)


@pytest.mark.parametrize(
    "messages, options, prompt",
    [
        ([USER], {}, "<s><|user|>Tell me a story about a fox.<|assistant|>"),
        ([USER], {"chat_template_kwargs": {"mood": "Sad:"}}, "<s><|user|>Tell me a story about a fox.<|assistant|>Sad:"),
        ([USER], {"add_generation_prompt": False}, "<s><|user|>Tell me a story about a fox."),
        ([USER], {"tools": TOOLS}, "weather <s><|user|>Tell me a story about a fox.<|assistant|>"),
        ([USER], {"tools": TOOLS, "chat_template": "default"}, "<s><|user|>Tell me a story about a fox.<|assistant|>"),
        (
            [USER],
            {"documents": [{"text": "Foxes are red."}], "chat_template": "rag"},
            "Foxes are red. <s><|user|>Tell me a story about a fox.<|assistant|>",
        ),
        (
            [USER, BEGUN],
            {"continue_final_message": True},
            "<s><|user|>Tell me a story about a fox.<|assistant|>Once upon a time ",
        ),
    ],
)
def test_the_template_writes_the_prompt(server, messages, options, prompt):
    assert prompt_of(server, messages, **options) == prompt


@pytest.mark.parametrize(
    "options, words",
    [
        ({"tools": json.dumps(TOOLS)}, "has no 'messages'"),
        ({"messages": json.dumps([USER]), "chat_template": "poetry"}, "'default', 'tool_use', 'rag'"),
        ({"messages": json.dumps([USER]), "chat_template_kwargs": '{"tools": []}'}, "which are options"),
        ({"messages": json.dumps([{"role": "user"}]), "continue_final_message": True}, "no text in 'content'"),
    ],
)
def test_options_that_do_not_fit_are_refused(server, options, words):
    with pytest.raises(Refused) as refused:
        generate(server, "chat", "" if "messages" in options else "Once", **options)
    assert words in str(refused.value)


REPLY = (
    "<think>\nA fox?\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'
)
CALLS = [
    {"type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city}, ensure_ascii=False)}}
    for city in ("Oslo", "東京")
]


def written(reply, **options):
    """Options that make the model write this reply."""
    return {
        "guided_choice": json.dumps([reply]),
        "max_tokens": 400,
        "exclude_input_in_output": True,
        "messages": json.dumps([USER]),
        **options,
    }


def without_ids(calls):
    assert len({call.pop("id") for call in calls}) == len(calls)
    return calls


def test_reasoning_and_calls_have_outputs_of_their_own(server):
    answer = generate(server, "chat", "", **written(REPLY, tools=json.dumps(TOOLS)))
    assert answer.text == "Let me see.\n"
    assert answer.last.tensors["reasoning_content"] == "A fox?"
    assert without_ids(json.loads(answer.last.tensors["tool_calls"])) == CALLS
    assert answer.finish_reason == "tool_calls"


def test_a_stream_has_the_new_part_of_each_output(server):
    answer = generate_stream(server, "chat", "", **written(REPLY, tools=json.dumps(TOOLS)))
    assert answer.text == "Let me see.\n"
    assert "".join(answer.tensors("reasoning_content")) == "A fox?"
    pieces = [piece for part in answer.tensors("tool_calls") for piece in json.loads(part)]
    assert len(pieces) > 2 * len(CALLS), "arguments come in pieces"
    assert without_ids(joined(pieces)) == CALLS
    assert answer.finish_reason == "tool_calls"


def test_parts_stay_in_the_text_of_requests_that_leave_them_out(server):
    left_out = {"return_reasoning_content": False, "return_tool_calls": False}
    answer = generate(server, "chat", "", **written(REPLY, tools=json.dumps(TOOLS), **left_out))
    assert answer.text == REPLY
    assert answer.finish_reason == "end_id"
    assert not {"reasoning_content", "tool_calls"} & set(answer.last.tensors)
    # Without tools there are no calls.
    answer = generate(server, "chat", "", **written(REPLY))
    assert answer.text == REPLY.partition("</think>\n\n")[2]
    # A prompt that is not a conversation.
    plain = {name: value for name, value in written(REPLY).items() if name != "messages"}
    assert generate(server, "chat", "Once", **plain).text == REPLY
    asked = generate(server, "chat", "Once", **plain, return_reasoning_content=True, return_tool_calls=True)
    assert asked.text == "Let me see.\n" and asked.finish_reason == "tool_calls"


def test_a_model_without_a_format_cannot_be_asked_for_parts(server, tmp_path):
    repository = tmp_path / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    with Server(repository) as plain:
        with pytest.raises(Refused, match="tool_call_parser"):
            generate(plain, "stories", "Once", return_tool_calls=True)


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
STRICT = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}} for name in ("weather", "time")
]


@pytest.mark.parametrize(
    "choice, names",
    [("required", {"weather", "time"}), (json.dumps({"type": "function", "function": {"name": "time"}}), {"time"})],
)
def test_a_call_that_must_be_is_well_formed(server, choice, names):
    for seed in range(4):
        answer = generate(
            server,
            "chat",
            "",
            messages=json.dumps([USER]),
            tools=json.dumps(STRICT),
            tool_choice=choice,
            parallel_tool_calls=False,
            # The prompt ends the reasoning: the demo model would not.
            chat_template="default",
            chat_template_kwargs=json.dumps({"mood": "<think>\n\n</think>\n\n"}),
            temperature=1.0,
            seed=seed,
            max_tokens=200,
            exclude_input_in_output=True,
        )
        (call,) = json.loads(answer.last.tensors["tool_calls"])
        assert call["function"]["name"] in names
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
        assert answer.text == "" and answer.finish_reason == "tool_calls"


def test_a_strict_function_guides_calls_that_the_model_begins(server):
    with pytest.raises(Refused, match="another guide"):
        generate(server, "chat", "", **written("No.", tools=json.dumps(STRICT)))
    answer = generate(server, "chat", "", messages=json.dumps([USER]), tools=json.dumps(STRICT), max_tokens=30)
    assert answer.last.tensors["tool_calls"] == "[]"


def test_a_structural_tag_guides_what_follows_its_trigger(server):
    tag = {
        "type": "structural_tag",
        "triggers": [" the"],
        "structures": [{"begin": " the <", "schema": {"type": "integer", "minimum": 0, "maximum": 99}, "end": ">"}],
    }
    options = {"max_tokens": 60, "exclude_input_in_output": True, "temperature": 1.0}
    for seed in range(4):
        for form in ({"structural_tag": json.dumps(tag)}, {"structured_outputs": json.dumps({"structural_tag": tag})}):
            text = generate(server, "chat", "Once upon a time,", seed=seed, **form, **options).text
            for start in [found.start() for found in re.finditer(" the", text)]:
                assert re.match(" the( <[0-9]{1,2}>| ?<?[0-9]{0,2}$)", text[start:]), text


GUIDES = {
    "schema": ({"guided_json": json.dumps({"type": "object", "required": ["n"], "additionalProperties": False,
                                           "properties": {"n": {"enum": [7]}}, "x-guidance": {"whitespace_flexible": False}})}, '{"n":7}'),
    "choice": ({"guided_choice": '["a fox"]'}, "a fox"),
    "regex": ({"guided_regex": "fo{3}x"}, "fooox"),
    "grammar": ({"guided_grammar": 'root ::= "an " "owl"'}, "an owl"),
    "structural tag": ({"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "so"}})}, "so"),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_begins_behind_the_thought_that_the_template_opens(server, guide, streams):
    options, content = GUIDES[guide]
    options = {"messages": json.dumps([USER]), "exclude_input_in_output": True, "max_tokens": 40, **options}
    ask = generate_stream if streams else generate

    def parts(answer):
        return answer.text, "".join(answer.tensors("reasoning_content")) if streams else answer.last.tensors["reasoning_content"]

    # Thoughts are free, and this model does not end them.
    text, thought = parts(ask(server, "thinker", "", **options))
    assert text == "" and len(thought) > 20
    # This ends them at once.
    ended = ask(server, "thinker", "", **options, logit_bias=json.dumps({END_OF_THOUGHT: 100}))
    assert parts(ended) == (content, "") and ended.finish_reason == "end_id"
    # No thought, because the prompt ends it, or because its text is not taken out.
    quiet = json.dumps({"enable_thinking": False})
    assert parts(ask(server, "thinker", "", **options, chat_template_kwargs=quiet)) == (content, "")
    assert ask(server, "thinker", "", **options, return_reasoning_content=False).text == content
