"""A model that thinks and calls functions, as far as its chat template says: the demo model under another template.

It knows no functions. A guide makes it write a call."""

import json
import shutil

from harness.repository import STORIES, add_model

# The comment has the marks of replies, as the templates of models that think and call functions do.
TEMPLATE = (
    "{# <think></think><tool_call></tool_call> #}{{ bos_token }}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + (message.tool_call_id or '') + (message.content or '') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
USER = {"role": "user", "content": "Tell me a story about a fox."}
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
# The function in the form of Anthropic's API.
TOOL = {"name": WEATHER["name"], "input_schema": WEATHER["parameters"], "input_examples": [{"city": "Oslo"}]}
# For the option `guided_choice`.
REPLY = (
    "<think>\nA fox?\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)


def joined(pieces):
    """The calls that the pieces of a stream make, by OpenAI's rules: each names its call by index, and adds to the
    arguments."""
    calls = {}
    for piece in pieces:
        index = piece.pop("index")
        if index not in calls:
            assert index == len(calls) and piece["id"] and piece["type"] == "function" and piece["function"]["name"]
            calls[index] = piece
        else:
            assert piece.keys() == {"function"} and piece["function"].keys() == {"arguments"}
            calls[index]["function"]["arguments"] += piece["function"]["arguments"]
    return list(calls.values())


def add_calling_model(repository, name):
    """Adds the model."""
    version = add_model(repository, name)
    shutil.copytree(STORIES, version, dirs_exist_ok=True)
    config = json.loads((version / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (version / "tokenizer_config.json").write_text(json.dumps(config))


# A token that is the end of a thought in the model that thinks.
END_OF_THOUGHT = 2


def add_thinking_model(repository, name):
    """Adds a model whose template opens a thought. It does not end thoughts unless a bias makes it."""
    version = add_model(repository, name)
    shutil.copytree(STORIES, version, dirs_exist_ok=True)
    tokenizer = (version / "tokenizer.json").read_text()
    (version / "tokenizer.json").write_text(tokenizer.replace("<|user|>", "</think>"))
    config = json.loads((version / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}<|assistant|>"
        "{{ '<think>\n' }}{% if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}"
    )
    (version / "tokenizer_config.json").write_text(json.dumps(config))
