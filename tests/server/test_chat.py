"""Conversations: several chat templates, their variables, and messages that are continued."""

import json
import shutil

import pytest

from harness.clients import Refused, generate
from harness.repository import STORIES, add_model
from harness.server import Server

# Special tokens of the demo model, so that plain prompts have the same tokens.
TURNS = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEMPLATES = {
    "default": TURNS + "{% if mood is defined %}{{ mood }}{% endif %}",
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
