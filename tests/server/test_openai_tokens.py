"""The tokens of prompts, and prompts that are tokens, with the server with OpenAI's API."""

import pytest

from harness.clients import generate
from harness.front import Front, counts
from harness.repository import STORIES, add_model
from harness.server import Server, assert_blocks_come_back

PROMPT = "Once upon a time, there was a brave fox named Finn."
USER = {"role": "user", "content": "Tell me a story."}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_tokens") / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    add_model(repository, "queued", fields="dynamic_batching {}", checkpoint=STORIES)
    with Server(repository) as server:
        yield server


@pytest.mark.parametrize("model", ["stories", "queued"])
def test_tokens_are_those_that_the_model_reads(server, front, model):
    expected = generate(server, model, PROMPT, max_tokens=1)
    answer = front.post("/tokenize", model=model, prompt=PROMPT)
    num_tokens = expected.responses[0].num_input_tokens
    assert answer == {"count": num_tokens, "tokens": expected.ids[:num_tokens]}
    assert front.post("/tokenize", model=model, content=PROMPT) == answer
    text = front.post("/detokenize", model=model, tokens=answer["tokens"])
    assert text["prompt"] == text["content"] and text["prompt"].endswith(PROMPT)
    assert front.post("/detokenize", model=model, tokens=answer["tokens"][-3:])["prompt"] == " named Finn."
    assert front.post("/detokenize", model=model, tokens=[]) == {"prompt": "", "content": ""}


def test_the_tokens_of_a_conversation_are_those_that_are_counted(front):
    chat = front.post("/v1/chat/completions", model="stories", messages=[USER], max_tokens=1)
    counted = front.post("/tokenize", model="stories", messages=[USER])["count"]
    assert counted == chat["usage"]["prompt_tokens"]


def test_completions_of_tokens_are_those_of_their_text(front):
    tokens = front.post("/tokenize", model="stories", prompt=PROMPT)["tokens"]
    fields = {"model": "stories", "max_tokens": 12}
    expected = front.post("/v1/completions", **fields, prompt=PROMPT)
    answer = front.post("/v1/completions", **fields, prompt=tokens)
    assert (answer["choices"], counts(answer)) == (expected["choices"], counts(expected))
    both = front.post("/v1/completions", **fields, prompt=[tokens, PROMPT])["choices"]
    assert [choice["text"] for choice in both] == [expected["choices"][0]["text"]] * 2
    chunks = front.stream("/v1/completions", **fields, prompt=tokens)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected["choices"][0]["text"]


def test_texts_of_many_token_prompts_are_read_in_order(server, front):
    """More prompts than a model has slots for, of which several are read at a time; one that has no text is the
    client's error."""
    whole = front.post("/tokenize", model="stories", prompt=PROMPT)["tokens"]
    prompts = [whole[: 1 + index % len(whole)] for index in range(100)]
    prompts[50] = PROMPT
    fields = {"model": "stories", "max_tokens": 0, "echo": True}
    expected = [front.post("/detokenize", model="stories", tokens=whole[: 1 + index])["prompt"] for index in range(len(whole))]
    expected = [expected[index % len(whole)] for index in range(100)]
    expected[50] = PROMPT
    choices = front.post("/v1/completions", **fields, prompt=prompts)["choices"]
    assert [choice["text"] for choice in choices] == expected
    answer = front.call("POST", "/v1/completions", {**fields, "prompt": [*prompts[:20], [1536], *prompts[20:]]})
    assert answer.status == 400 and "0 to 1535" in answer.json["error"]["message"]
    with Front(server, "--max-requests=10") as narrow:
        choices = narrow.post("/v1/completions", **fields, prompt=prompts[:10])["choices"]
        assert [choice["text"] for choice in choices] == expected[:10]
    assert_blocks_come_back(server, "stories")


@pytest.mark.parametrize(
    "path, fields, words",
    [
        ("/tokenize", {"prompt": PROMPT}, "names no model, and 2 could be meant"),
        ("/tokenize", {"model": "stories"}, "'messages'"),
        ("/tokenize", {"model": "stories", "prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"model": "stories", "prompt": "a", "return_token_strs": True}, "/detokenize"),
        ("/detokenize", {"model": "stories", "tokens": "a"}, "token ids"),
        ("/detokenize", {"model": "stories", "tokens": [1536]}, "0 to 1535"),
    ],
)
def test_what_has_no_tokens_is_refused(front, path, fields, words):
    answer = front.call("POST", path, fields)
    assert answer.status == 400 and words in answer.json["error"]["message"], answer


def test_the_only_model_need_not_be_named(repository):
    add_model(repository, "stories", checkpoint=STORIES)
    with Server(repository) as server, Front(server) as front:
        tokens = front.post("/tokenize", content="A fox.")["tokens"]
        assert front.post("/detokenize", tokens=tokens)["content"].endswith("A fox.")
