"""The `usage` of OpenAI's API: tokens of prompts that are in the cache, of reasoning, and of predictions."""

import pytest

from harness.conversations import END_OF_THOUGHT, USER, add_thinking_model
from harness.front import counts
from harness.repository import STORIES, add_model
from harness.server import Server

CHAT = "/v1/chat/completions"
PROMPT = "Once upon a time, there was a brave fox named Finn. " * 8
TOKENS_PER_BLOCK = 32
DRAFTS = {"speculation": "draft_input_ids", "enable_adaptive_drafts": "false"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_usage") / "repository"
    add_model(repository, "stories", DRAFTS, checkpoint=STORIES)
    add_thinking_model(repository, "thinker")
    with Server(repository) as server:
        yield server


def whole_blocks(num_tokens):
    """The tokens of a prompt that can be found again. The last one is always computed."""
    return (num_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK


def num_cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_a_prompt_that_comes_again_is_in_the_cache(front):
    fields = {"model": "stories", "prompt": PROMPT, "max_tokens": 4}
    first, second = (front.post("/v1/completions", **fields)["usage"] for _ in range(2))
    assert (num_cached(first), num_cached(second)) == (0, whole_blocks(first["prompt_tokens"]))
    *_, last = front.stream("/v1/completions", **fields, stream_options={"include_usage": True})
    assert last["usage"] == second
    # The other choices of a request find the prompt that the first has computed, which does not count.
    several = front.post("/v1/completions", **fields, n=3, cache_salt="other")
    assert num_cached(several["usage"]) == 0
    both = front.post("/v1/completions", **{**fields, "prompt": [PROMPT, PROMPT]})
    assert num_cached(both["usage"]) == 2 * num_cached(second)


def test_the_turns_of_a_conversation_are_in_the_cache(front):
    messages = [USER]
    fields = {"model": "stories", "max_tokens": 20}
    answer = front.post(CHAT, **fields, messages=messages)
    messages = [*messages, answer["choices"][0]["message"], USER]
    chat = front.post(CHAT, **fields, messages=messages)["usage"]
    assert 0 < num_cached(chat) < chat["prompt_tokens"]
    response = front.post("/v1/responses", model="stories", input=messages, max_output_tokens=20)["usage"]
    assert response["input_tokens_details"]["cached_tokens"] == whole_blocks(chat["prompt_tokens"])


def test_tokens_of_the_reasoning_are_counted(front):
    fields = {"model": "thinker", "messages": [USER], "max_tokens": 20}

    def num_reasoning(**more):
        whole = front.post(CHAT, **fields, **more)
        *_, last = front.stream(CHAT, **fields, **more, stream_options={"include_usage": True})
        assert counts(last) == counts(whole)
        assert last["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
        return whole["usage"]["completion_tokens_details"]["reasoning_tokens"]

    assert num_reasoning() == 20
    assert num_reasoning(n=2, temperature=1.0) == 40
    # All tokens are the mark that ends the thought, and all but the first are the answer.
    assert num_reasoning(logit_bias={END_OF_THOUGHT: 100}) == 0
    assert num_reasoning(chat_template_kwargs={"enable_thinking": False}) == 0


def test_a_prediction_changes_how_fast_an_answer_comes_and_nothing_else(front):
    fields = {"model": "stories", "messages": [USER], "max_tokens": 30}
    plain = front.post(CHAT, **fields)
    text = plain["choices"][0]["message"]["content"]

    def details(prediction):
        content = {"type": "content", "content": prediction}
        answer = front.post(CHAT, **fields, prediction=content)
        assert answer["choices"] == plain["choices"]
        return answer["usage"]["completion_tokens_details"]

    right = details(text)
    assert right["accepted_prediction_tokens"] > 20 and right["rejected_prediction_tokens"] < 5, right
    parts = details([{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}])
    assert parts == right
    wrong = details("zebra " * 1000)
    assert wrong["accepted_prediction_tokens"] == 0, wrong
    assert plain["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 0
    refused = front.call("POST", CHAT, {**fields, "prediction": {"type": "content", "content": 5}})
    assert refused.status == 400 and refused.json["error"]["param"] == "prediction"
    unknown = {**fields, "model": "thinker", "prediction": {"type": "content", "content": text}}
    assert front.post(CHAT, **unknown)["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
