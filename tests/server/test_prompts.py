"""Prompts as tokens: without an answer, and instead of a text."""

import json
import shutil

import pytest

from harness.clients import Refused, generate, generate_stream
from harness.repository import STORIES, add_model
from harness.server import Server

PROMPT = "Once upon a time, there was a brave fox named Finn."
TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"


def test_a_prompt_alone_is_its_text_and_its_tokens(server):
    whole = generate(server, "stories", PROMPT, max_tokens=5)
    prompt = generate(server, "stories", PROMPT, prompt_only=True, exclude_input_in_output=True)
    num_tokens = whole.responses[0].num_input_tokens
    assert (prompt.text, prompt.ids) == (PROMPT, whole.ids[:num_tokens])
    [response] = prompt.responses
    assert (response.num_input_tokens, response.num_output_tokens) == (num_tokens, 0)
    assert generate(server, "stories", PROMPT, prompt_only=True, truncate_prompt_tokens=3).ids == prompt.ids[-3:]
    assert generate(server, "synthetic", [5, 6, 7], prompt_only=True).ids == [5, 6, 7]


def test_tokens_stand_for_their_text(server):
    ids = generate(server, "stories", PROMPT, prompt_only=True).ids
    as_text = generate(server, "stories", PROMPT, max_tokens=20, exclude_input_in_output=True)
    options = {"prompt_token_ids": json.dumps(ids), "exclude_input_in_output": True}
    as_ids = generate(server, "stories", "", max_tokens=20, **options)
    assert (as_ids.text, as_ids.ids) == (as_text.text, as_text.ids)
    stream = generate_stream(server, "stories", "", max_tokens=20, prompt_token_ids=json.dumps(ids))
    assert (stream.text, stream.ids) == (as_text.text, as_text.ids)
    # The tokenizer's special tokens are tokens as others.
    text = generate(server, "stories", "", prompt_token_ids=json.dumps(ids), prompt_only=True).text
    assert text.endswith(PROMPT)


@pytest.mark.parametrize(
    "model, prompt, options, words",
    [
        ("stories", "Once", {"prompt_token_ids": "[5]"}, "text_input is empty"),
        ("stories", "", {"prompt_token_ids": "[5]", "messages": "[]"}, "messages"),
        ("stories", "", {"prompt_token_ids": "[1536]"}, "0 to 1535"),
        ("stories", "", {"prompt_token_ids": json.dumps([5] * 1025)}, "1025 tokens, and max_seq_len = 1024"),
        ("synthetic", [5], {"prompt_token_ids": "[5]"}, "input_ids"),
        ("stories", "Once", {"prompt_only": True, "stream": True}, "leave out 'stream'"),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(server, model, prompt, options, words):
    with pytest.raises(Refused) as refused:
        generate(server, model, prompt, **options)
    assert words in str(refused.value)


@pytest.mark.parametrize("fields", ["", "dynamic_batching {}"])
def test_a_conversation_alone_is_what_the_template_makes_of_it(repository, fields):
    version = add_model(repository, "chat", fields=fields)
    shutil.copytree(STORIES, version, dirs_exist_ok=True)
    config = json.loads((version / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (version / "tokenizer_config.json").write_text(json.dumps(config))
    with Server(repository) as server:
        messages = json.dumps([{"role": "user", "content": "Hello"}])
        answer = generate(server, "chat", "", messages=messages, prompt_only=True)
        assert answer.text == "<|user|>Hello"
        ids = json.dumps(answer.ids)
        assert generate(server, "chat", "", prompt_token_ids=ids, prompt_only=True).text == answer.text
