"""Stored responses of the server with OpenAI's API: continued, asked for again and deleted, by HTTP and by OpenAI's
package."""

import json
import os
import subprocess
import sys
import time

import pytest

from harness.conversations import REPLY, USER, WEATHER, add_calling_model
from harness.front import Front, named_events_of
from harness.repository import STORIES, add_model
from harness.server import Server, assert_blocks_come_back

PATH = "/v1/responses"
TEXT = USER["content"]
ASK = {"model": "stories", "max_output_tokens": 12}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_response_store") / "repository"
    add_calling_model(repository, "chat")
    add_model(repository, "stories", checkpoint=STORIES)
    with Server(repository) as server:
        yield server


@pytest.fixture(scope="module")
def front(server, tmp_path_factory):
    with Front(server, f"--response-store={tmp_path_factory.mktemp('store') / 'responses.db'}") as front:
        yield front


def output(response):
    return [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]


def test_a_response_is_continued_as_if_its_items_were_sent(front):
    first = front.post(PATH, **ASK, input=TEXT)
    assert (first["store"], first["previous_response_id"]) == (True, None)
    second = front.post(PATH, **ASK, input="And then?", previous_response_id=first["id"])
    third = front.post(PATH, **ASK, input=[{"role": "user", "content": "And?"}], previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    user = [{"role": "user", "content": text} for text in (TEXT, "And then?", "And?")]
    items = [user[0], *first["output"], user[1], *second["output"], user[2]]
    whole = front.post(PATH, **ASK, input=items, store=False)
    assert output(third) == output(whole) != output(first)
    assert third["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def test_instructions_are_of_one_request(front):
    fields = {"model": "chat", "max_output_tokens": 12}
    first = front.post(PATH, **fields, input=TEXT, instructions="Be brief.")
    second = front.post(PATH, **fields, input="And?", previous_response_id=first["id"])
    items = [USER, *first["output"], {"role": "user", "content": "And?"}]
    whole = front.post(PATH, **fields, input=items, store=False)
    assert output(second) == output(whole) and second["instructions"] is None
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


def test_a_stream_is_stored_when_it_is_complete(front):
    with front.request("POST", PATH, {**ASK, "input": TEXT, "stream": True}) as response:
        last = list(named_events_of(response))[-1]["response"]
    assert front.call("GET", f"{PATH}/{last['id']}").json == last
    again = front.post(PATH, **ASK, input="And?", previous_response_id=last["id"])
    assert again["status"] == "incomplete"


def test_calls_and_their_results_are_continued(front):
    fields = {"model": "chat", "tools": [{"type": "function", **WEATHER}]}
    called = front.post(PATH, **fields, input=TEXT, guided_choice=[REPLY])
    calls = [item for item in called["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "warm"} for call in calls]
    fields["max_output_tokens"] = 12
    answer = front.post(PATH, **fields, input=results, previous_response_id=called["id"])
    whole = front.post(PATH, **fields, input=[USER, *called["output"], *results], store=False)
    assert len(calls) == 2 and answer["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert output(answer) == output(whole)


def test_a_response_is_found_and_deleted(front):
    first = front.post(PATH, **ASK, input=TEXT)
    second = front.post(PATH, **ASK, input="And?", previous_response_id=first["id"])
    assert front.call("GET", f"{PATH}/{first['id']}").json == first
    items = front.call("GET", f"{PATH}/{second['id']}/input_items").json
    assert [item["content"] for item in items["data"]] == ["And?"] and items["has_more"] is False
    deleted = front.call("DELETE", f"{PATH}/{first['id']}")
    assert deleted.json == {"id": first["id"], "object": "response", "deleted": True}
    for method, path in (("GET", first["id"]), ("DELETE", first["id"]), ("GET", f"{first['id']}/input_items")):
        answer = front.call(method, f"{PATH}/{path}")
        assert answer.status == 404 and first["id"] in answer.json["error"]["message"], answer
    lost = front.call("POST", PATH, {**ASK, "input": "And?", "previous_response_id": second["id"]})
    assert (lost.status, lost.json["error"]["param"]) == (404, "previous_response_id")


def test_what_is_not_to_be_stored_is_not(front):
    response = front.post(PATH, **ASK, input=TEXT, store=False)
    assert response["store"] is False
    assert front.call("GET", f"{PATH}/{response['id']}").status == 404


def finished(front, response):
    """A response in the background, when it is complete."""
    for _ in range(600):
        answer = front.call("GET", f"{PATH}/{response['id']}").json
        if answer["status"] not in ("queued", "in_progress"):
            return answer
        time.sleep(0.1)
    raise AssertionError(answer)


def test_a_response_in_the_background_is_asked_for(front):
    begun = front.post(PATH, **ASK, input=TEXT, background=True)
    assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
    done = finished(front, begun)
    assert output(done) == output(front.post(PATH, **ASK, input=TEXT)) and done["background"] is True
    again = front.post(PATH, **ASK, input="And?", previous_response_id=begun["id"])
    assert again["status"] == "incomplete"


def test_a_response_in_the_background_is_cancelled_or_deleted(server, front):
    endless = {"model": "stories", "input": TEXT, "background": True, "ignore_eos": True, "max_output_tokens": 4000}
    cancelled, deleted = (front.post(PATH, **endless) for _ in range(2))
    answer = front.call("POST", f"{PATH}/{cancelled['id']}/cancel")
    assert (answer.status, answer.json["status"]) == (200, "cancelled")
    assert front.call("DELETE", f"{PATH}/{deleted['id']}").status == 200
    assert_blocks_come_back(server, "stories")
    assert front.call("GET", f"{PATH}/{cancelled['id']}").json["status"] == "cancelled"
    assert front.call("GET", f"{PATH}/{deleted['id']}").status == 404
    waited = front.post(PATH, **ASK, input=TEXT)
    assert front.call("POST", f"{PATH}/{waited['id']}/cancel").status == 400


def test_a_response_in_the_background_that_fails_says_so(front):
    begun = front.post(PATH, model="tales", input=TEXT, background=True)
    failed = finished(front, begun)
    assert failed["status"] == "failed" and "'tales'" in failed["error"]["message"]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"store": 1}, "store"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "stream"),
        ({"conversation": 5}, "conversation"),
        ({"conversation": {"name": "x"}}, "conversation"),
        ({"conversation": "conv-1", "store": False}, "conversation"),
        ({"conversation": "conv-1", "previous_response_id": "resp-1"}, "conversation"),
    ],
)
def test_a_mistake_is_named(front, fields, param):
    answer = front.call("POST", PATH, {**ASK, "input": TEXT, **fields})
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer


def test_the_index_of_a_wrong_item_counts_the_items_of_the_request(front):
    first = front.post(PATH, **ASK, input=TEXT)
    items = [{"role": "user", "content": "And?"}, {"type": "item_reference", "id": "a"}]
    answer = front.call("POST", PATH, {**ASK, "input": items, "previous_response_id": first["id"]})
    assert (answer.status, answer.json["error"]["param"]) == (400, "input"), answer
    assert answer.json["error"]["message"].startswith("'input[1]'"), answer


def test_responses_are_of_the_key_that_asked_for_them(server, tmp_path):
    (tmp_path / "keys").write_text("sk-one\nsk-two\n")
    one, two = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
    options = [f"--api-key-file={tmp_path / 'keys'}", f"--response-store={tmp_path / 'responses.db'}"]
    with Front(server, *options) as front:
        response = front.call("POST", PATH, {**ASK, "input": TEXT}, one).json
        path = f"{PATH}/{response['id']}"
        assert front.call("GET", path, headers=two).status == 404
        assert front.call("DELETE", path, headers=two).status == 404
        following = {**ASK, "input": "And?", "previous_response_id": response["id"]}
        assert front.call("POST", PATH, following, two).status == 404
        assert front.call("POST", PATH, following, one).status == 200
        assert front.call("GET", path).status == 401
    mode = (tmp_path / "responses.db").stat().st_mode
    assert mode & 0o077 == 0, "nobody else may read it"


def test_responses_outlive_the_front_and_the_oldest_make_room(server, tmp_path):
    store = f"--response-store={tmp_path / 'responses.db'}"
    with Front(server, store) as front:
        response = front.post(PATH, **ASK, input=TEXT)
        command = [os.environ["INFLIGHT_OPENAI"], "--port=0", f"--triton={server.grpc_url}", store]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert second.returncode == 1 and "locked" in second.stderr, "two fronts cannot have one file"
    num_bytes = len(json.dumps(response)) * 2
    with Front(server, store, f"--response-store-bytes={num_bytes}") as front:
        assert front.call("GET", f"{PATH}/{response['id']}").json == response
        for _ in range(3):
            last = front.post(PATH, **ASK, input=TEXT)
        assert front.call("GET", f"{PATH}/{response['id']}").status == 404
        assert front.call("GET", f"{PATH}/{last['id']}").status == 200


def test_a_history_that_is_too_long_is_refused(server, tmp_path):
    with Front(server, f"--response-store={tmp_path / 'responses.db'}", "--max-request-bytes=3000") as front:
        response = {"id": None}
        for _ in range(8):
            answer = front.call("POST", PATH, {**ASK, "input": TEXT, "previous_response_id": response["id"]})
            if answer.status != 200:
                break
            response = answer.json
        assert answer.status == 400 and "longer than 3000 bytes" in answer.json["error"]["message"], answer


@pytest.mark.skipif(sys.version_info < (3, 11), reason="OpenAI's client needs Python 3.11")
def test_the_package_of_openai_continues_and_deletes(front):
    import openai

    with openai.OpenAI(base_url=front.url + "/v1", api_key="any", max_retries=0) as client:
        first = client.responses.create(**ASK, input=TEXT)
        second = client.responses.create(**ASK, input="And?", previous_response_id=first.id)
        assert client.responses.retrieve(second.id) == second
        (item,) = client.responses.input_items.list(second.id)
        assert item.role == "user"
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
