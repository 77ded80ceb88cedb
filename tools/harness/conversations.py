"""A model that thinks and calls functions, as far as its chat template says: the demo model under another template.

It knows no functions. A guide makes it write a call."""

import json
import shutil

from harness.repository import STORIES, add_model

# The comment has the marks of replies, as the templates of models that think and call functions do.
TEMPLATE = (
    "{# <think></think><tool_call></tool_call> #}{{ bos_token }}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + (message.content or '') }}{% endfor %}"
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
# For the option `guided_choice`.
REPLY = (
    "<think>\nA fox?\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)


def add_calling_model(repository, name):
    """Adds the model."""
    version = add_model(repository, name)
    shutil.copytree(STORIES, version, dirs_exist_ok=True)
    config = json.loads((version / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (version / "tokenizer_config.json").write_text(json.dumps(config))
