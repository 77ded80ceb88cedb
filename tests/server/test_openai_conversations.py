"""Conversations that clients keep on the server with OpenAI's API, by HTTP and by OpenAI's package."""

import sys

import pytest

from harness.front import Front
from harness.repository import STORIES, add_model
from harness.server import Server

PATH = "/v1/conversations"
ASK = {"model": "stories", "max_output_tokens": 12}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_conversations") / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    with Server(repository) as server:
        yield server


@pytest.fixture(scope="module")
def front(server, tmp_path_factory):
    with Front(server, f"--response-store={tmp_path_factory.mktemp('store') / 'responses.db'}") as front:
        yield front


def user(text):
    return {"type": "message", "role": "user", "content": text}


def texts(answer):
    return [item["content"][0]["text"] for item in answer]


def listed(front, conversation):
    return front.call("GET", f"{PATH}/{conversation['id']}/items?order=asc").json["data"]


def test_responses_continue_a_conversation_and_add_to_it(front):
    made = front.post(PATH, items=[user("A fox.")], metadata={"topic": "foxes"})
    first = front.post("/v1/responses", **ASK, input="And?", conversation=made["id"])
    assert first["conversation"] == {"id": made["id"]} and first["previous_response_id"] is None
    second = front.post("/v1/responses", **ASK, input=[user("Then?")], conversation={"id": made["id"]})
    items = [user("A fox."), user("And?"), *first["output"], user("Then?")]
    whole = front.post("/v1/responses", **ASK, input=items, store=False)
    assert texts(second["output"]) == texts(whole["output"])
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    found = listed(front, made)
    said = ["A fox.", "And?", *texts(first["output"]), "Then?", *texts(second["output"])]
    assert texts(found) == said and len({item["id"] for item in found}) == len(said)
    assert found[2] == first["output"][0], "items of responses keep their ids"


def test_a_stream_and_a_response_in_the_background_add_to_it(front):
    made = front.post(PATH)
    with front.request("POST", "/v1/responses", {**ASK, "input": "A", "conversation": made["id"], "stream": True}) as response:
        assert b"response.incomplete" in response.read()
    assert texts(listed(front, made))[0] == "A" and len(listed(front, made)) == 2
    begun = front.post("/v1/responses", **ASK, input="B", conversation=made["id"], background=True)
    while front.call("GET", f"/v1/responses/{begun['id']}").json["status"] == "queued":
        pass
    assert texts(listed(front, made))[2] == "B" and len(listed(front, made)) == 4


def test_a_response_that_fails_adds_nothing(front):
    made = front.post(PATH, items=[user("A")])
    failed = front.post("/v1/responses", model="tales", input="B", conversation=made["id"], background=True)
    while front.call("GET", f"/v1/responses/{failed['id']}").json["status"] == "queued":
        pass
    assert texts(listed(front, made)) == ["A"]
    lost = front.call("POST", "/v1/responses", {**ASK, "input": "A", "conversation": "conv-1"})
    assert (lost.status, lost.json["error"]["param"]) == (404, "conversation"), lost


def test_conversations_are_of_their_key(server, tmp_path):
    (tmp_path / "keys").write_text("sk-one\nsk-two\n")
    one, two = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
    options = [f"--api-key-file={tmp_path / 'keys'}", f"--response-store={tmp_path / 'responses.db'}"]
    with Front(server, *options) as front:
        made = front.call("POST", PATH, {"items": [user("A")]}, one).json
        path = f"{PATH}/{made['id']}"
        for method, path_, body in [
            ("GET", path, None),
            ("POST", path, {"metadata": {}}),
            ("GET", f"{path}/items", None),
            ("POST", f"{path}/items", {"items": [user("B")]}),
            ("POST", "/v1/responses", {**ASK, "input": "B", "conversation": made["id"]}),
            ("DELETE", path, None),
        ]:
            assert front.call(method, path_, body, two).status == 404, path_
        assert front.call("GET", path).status == 401
        assert front.call("DELETE", path, headers=one).status == 200
    with Front(server) as front:
        answer = front.call("POST", PATH, {})
        assert answer.status == 404 and "--response-store" in answer.json["error"]["message"]


def test_a_conversation_that_is_too_long_is_refused(server, tmp_path):
    with Front(server, f"--response-store={tmp_path / 'responses.db'}", "--max-request-bytes=2000") as front:
        made = front.post(PATH, items=[user("x" * 1000)])
        answer = front.call("POST", f"{PATH}/{made['id']}/items", {"items": [user("x" * 1000)]})
        assert answer.status == 400 and "a request may continue" in answer.json["error"]["message"], answer
        assert len(listed(front, made)) == 1


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"items": 5}, "items"),
        ({"items": [{"type": "web_search_call"}]}, "items"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_mistake_is_named(front, fields, param):
    answer = front.call("POST", PATH, fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer


@pytest.mark.skipif(sys.version_info < (3, 11), reason="OpenAI's client needs Python 3.11")
def test_the_package_of_openai_keeps_conversations(front):
    import openai

    with openai.OpenAI(base_url=front.url + "/v1", api_key="any", max_retries=0) as client:
        made = client.conversations.create(items=[user("A"), user("B")], metadata={"a": "b"})
        assert client.conversations.retrieve(made.id) == made and made.metadata == {"a": "b"}
        assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
        added = client.conversations.items.create(made.id, items=[user("C")])
        (item,) = added.data
        assert client.conversations.items.retrieve(item.id, conversation_id=made.id) == item
        pages = client.conversations.items.list(made.id, limit=2)
        assert [found.content[0].text for found in pages] == ["C", "B", "A"]
        assert client.conversations.items.delete(item.id, conversation_id=made.id).id == made.id
        client.responses.create(**ASK, input="D", conversation=made.id)
        found = client.conversations.items.list(made.id, order="asc").data
        assert [one.content[0].text for one in found][:3] == ["A", "B", "D"]
        assert client.conversations.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(made.id)
