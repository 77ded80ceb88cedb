"""Prompts that take long to tokenise, or would without end: others do not wait for them."""

import asyncio
import json

import pytest

from harness import clients
from harness.clients import Refused, generate
from harness.repository import STORIES, add_model

PROMPT = "Once upon a time"
MAX_SEQ_LEN = 32768
# It is far too long for a sequence, and takes the library a second.
LONG = "fox and bear " * 31_000
# The end of a prompt is kept, so that little of it is computed.
SHORTENED = {"truncate_prompt_tokens": 8}


def edit_json(path, **keys):
    """Changes a file that is a link to the demo model's."""
    content = json.loads(path.read_text()) | keys
    path.unlink()
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    repository = tmp_path_factory.mktemp("long") / "repository"
    parameters = {"max_seq_len": MAX_SEQ_LEN, "max_tokens_in_paged_kv_cache": MAX_SEQ_LEN + 64}
    version = deployment.add_model(repository, "long", parameters, checkpoint=STORIES)
    edit_json(version / "config.json", max_position_embeddings=MAX_SEQ_LEN)
    version = add_model(repository, "multiplying", checkpoint=STORIES)
    eight = {"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 8}
    edit_json(version / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [eight] * 30})
    with deployment.server(repository) as server:
        yield server


@pytest.mark.parametrize("small", [PROMPT, PROMPT * 60], ids=["at_once", "prepared"])
def test_a_small_request_is_answered_while_a_long_prompt_is_tokenised(server, small):
    ended = []

    async def ask(client, name, prompt, **options):
        await clients.stream(client, "long", prompt, max_tokens=1, **options)
        ended.append(name)

    async def main():
        async with clients.grpc(server) as client:
            # All of each text is tokenised, one after the other. When the first is answered, the others wait.
            long = [asyncio.create_task(ask(client, "long", LONG, **SHORTENED)) for _ in range(5)]
            await asyncio.wait(long, return_when=asyncio.FIRST_COMPLETED)
            await ask(client, "small", small, **SHORTENED)
            await asyncio.gather(*long)

    clients.run(main())
    assert ended.count("long") == 5 and ended[-1] == "long", ended


def test_a_prompt_that_is_too_long_is_refused_before_all_of_it_is_tokenised(server):
    words = f"the prompt has at least [0-9]+ tokens, more than max_seq_len = {MAX_SEQ_LEN}: shorten the prompt"
    for text in (LONG, "<|user" * 68_000):
        with pytest.raises(Refused, match=words):
            generate(server, "long", text)
    assert generate(server, "long", PROMPT, max_tokens=4).text


@pytest.mark.deployments("iterative")
def test_a_normalizer_that_multiplies_a_text_is_an_error_of_its_request(server):
    with pytest.raises(Refused, match="the text cannot be tokenised: 'Replace' of the normalizer"):
        generate(server, "multiplying", "A queen " * 10)
    assert generate(server, "multiplying", PROMPT, max_tokens=4).text
