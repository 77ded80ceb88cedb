"""Adapters as models of the server with OpenAI's API."""

import json

import pytest

from harness.adapters import write_adapter
from harness.clients import generate
from harness.front import Front
from harness.repository import STORIES, add_model
from harness.server import Server

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for index, name in enumerate(["poet", "critic"]):
        write_adapter(folder / name, index)
    (folder / "no-adapter").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, folders):
    repository = tmp_path_factory.mktemp("openai_adapters") / "repository"
    add_model(repository, "stories", {"lora_dir": folders}, checkpoint=STORIES)
    version = add_model(repository, "table", checkpoint=STORIES)
    (version / "multi_lora.json").write_text(json.dumps({"bard": str(folders / "poet")}))
    with Server(repository) as server:
        server.table = version / "multi_lora.json"
        yield server


@pytest.fixture(scope="module")
def front(server, folders):
    with Front(server, f"--adapters=stories={folders}", f"--adapters=table={server.table}") as front:
        yield front


def test_adapters_are_listed_behind_their_model(front, folders):
    def listed():
        return [(model["id"], model.get("parent")) for model in front.call("GET", "/v1/models").json["data"]]

    expected = [
        ("stories", None),
        ("stories:critic", "stories"),
        ("stories:poet", "stories"),
        ("table", None),
        ("table:bard", "table"),
    ]
    assert listed() == expected
    assert front.call("GET", "/v1/models/stories:poet").json["parent"] == "stories"
    assert front.call("GET", "/v1/models/stories:none").status == 404
    write_adapter(folders / "zealot", 9)
    assert listed() == [*expected[:3], ("stories:zealot", "stories"), *expected[3:]]


@pytest.mark.parametrize("model, name", [("stories", "poet"), ("stories", "critic"), ("table", "bard")])
def test_an_adapter_is_named_as_a_model(server, front, model, name):
    fields = {"max_tokens": 20, "exclude_input_in_output": True}
    expected = generate(server, model, PROMPT, lora_name=name, **fields).text
    assert expected != generate(server, model, PROMPT, **fields).text
    answer = front.post("/v1/completions", model=f"{model}:{name}", prompt=PROMPT, max_tokens=20)
    assert (answer["model"], answer["choices"][0]["text"]) == (f"{model}:{name}", expected)
    chunks = front.stream("/v1/completions", model=f"{model}:{name}", prompt=PROMPT, max_tokens=20)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    messages = [{"role": "user", "content": PROMPT}]
    by_name = front.post("/v1/chat/completions", model=f"{model}:{name}", messages=messages, max_tokens=20)
    by_option = front.post("/v1/chat/completions", model=model, lora_name=name, messages=messages, max_tokens=20)
    assert by_name["choices"] == by_option["choices"]


@pytest.mark.parametrize(
    "fields, status, words",
    [
        ({"model": "stories:none"}, 404, "the adapter 'none' is not known"),
        ({"model": "stories:../poet"}, 404, "the adapter '../poet' is not known"),
        ({"model": "stories:"}, 400, "behind the colon"),
        ({"model": "stories:poet", "lora_name": "critic"}, 400, "leave one of them out"),
        ({"model": "tales:poet"}, 404, "no model 'tales:poet'"),
    ],
)
def test_what_is_no_adapter_is_refused(front, fields, status, words):
    answer = front.call("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 1, **fields})
    assert answer.status == status and words in answer.json["error"]["message"], answer
