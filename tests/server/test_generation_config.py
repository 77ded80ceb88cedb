"""`use_generation_config`: the options that a checkpoint recommends."""

import json

import pytest

from harness.clients import generate
from harness.repository import STORIES, add_model
from harness.server import Server

PROMPT = "Once upon a time"
RECOMMENDED = {"do_sample": True, "temperature": 0.8, "top_k": 5, "repetition_penalty": 1.2, "max_new_tokens": 9}


def add(repository, name, generation_config):
    version = add_model(repository, name, {"use_generation_config": "true"}, checkpoint=STORIES)
    path = version / "generation_config.json"
    path.unlink()
    if generation_config is not None:
        path.write_text(json.dumps(generation_config))


def test_requests_take_what_they_do_not_give(repository):
    add_model(repository, "plain", checkpoint=STORIES)
    add(repository, "recommended", RECOMMENDED)
    options = {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.2, "max_tokens": 9, "seed": 3}
    with Server(repository) as server:
        expected = generate(server, "plain", PROMPT, **options)
        assert generate(server, "recommended", PROMPT, seed=3).text == expected.text
        assert expected.text != generate(server, "plain", PROMPT, max_tokens=9).text
        own = {"temperature": 0, "repetition_penalty": 1, "max_tokens": 20}
        assert generate(server, "recommended", PROMPT, **own).text == generate(server, "plain", PROMPT, max_tokens=20).text


@pytest.mark.parametrize(
    "generation_config, words",
    [
        (None, ["use_generation_config is true", "no generation_config.json"]),
        ({**RECOMMENDED, "temperature": -1}, ["generation_config.json", "'temperature'", "from 0 to 100"]),
    ],
    ids=["no file", "a bad value"],
)
def test_a_recommendation_that_cannot_be_taken_fails_the_load(repository, generation_config, words):
    add(repository, "bad", generation_config)
    with Server(repository, "--model-control-mode=explicit") as server:
        reason = server.load("bad")
        assert reason is not None, "the model was loaded"
        for word in words:
            assert word in reason
