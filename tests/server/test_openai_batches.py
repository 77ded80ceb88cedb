"""Batches of OpenAI's API: files of requests that the front works off, by HTTP and by OpenAI's package."""

import json
import sys
import time

import pytest

from harness.front import Front
from harness.repository import STORIES, add_model
from harness.server import Server, assert_blocks_come_back

PATH = "/v1/completions"
ASK = {"model": "stories", "prompt": "A fox", "max_tokens": 8, "temperature": 0}
ENDLESS = {"model": "stories", "prompt": "A", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_batches") / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    with Server(repository) as server:
        yield server


def options(folder, *more):
    return [f"--response-store={folder / 'responses.db'}", "--batch-requests=2", *more]


@pytest.fixture(scope="module")
def front(server, tmp_path_factory):
    with Front(server, *options(tmp_path_factory.mktemp("store"))) as front:
        yield front


def line(custom_id, body, url=PATH):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def uploaded(front, lines, headers=None, purpose="batch"):
    """The answer to the upload of a file."""
    content = "".join(json.dumps(it) + "\n" for it in lines)
    head = "--b\r\nContent-Disposition: form-data; name="
    body = f'{head}"purpose"\r\n\r\n{purpose}\r\n{head}"file"; filename="a.jsonl"\r\n\r\n{content}\r\n--b--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    return front.call("POST", "/v1/files", body.encode(), {**kind, **(headers or {})})


def begun(front, lines, headers=None, endpoint=PATH):
    """A batch of these lines."""
    file = uploaded(front, lines, headers)
    assert file.status == 200, file
    fields = {"input_file_id": file.json["id"], "endpoint": endpoint, "completion_window": "24h"}
    batch = front.call("POST", "/v1/batches", fields, headers)
    assert (batch.status, batch.json["status"]) == (200, "validating"), batch
    return batch.json


def at(front, batch, condition, headers=None):
    """A batch, when a condition holds for it."""
    for _ in range(1200):
        batch = front.call("GET", f"/v1/batches/{batch['id']}", headers=headers).json
        if condition(batch):
            return batch
        time.sleep(0.05)
    raise AssertionError(batch)


def ended(front, batch, headers=None):
    return at(front, batch, lambda batch: batch["status"] not in ("validating", "in_progress"), headers)


def results(front, file_id, headers=None):
    """The results in a file, by their `custom_id`."""
    with front.request("GET", f"/v1/files/{file_id}/content", headers=headers) as response:
        assert response.status == 200
        lines = response.read().decode().splitlines()
    return {result["custom_id"]: result["response"] for result in map(json.loads, lines)}


def test_each_line_has_the_answer_that_it_has_alone(front):
    prompts = ["A fox", "Once", "The"]
    lines = [line(prompt, {**ASK, "prompt": prompt}) for prompt in prompts]
    wrong = [line("no model", {**ASK, "model": "tales"}), line("no number", {**ASK, "max_tokens": "x"})]
    batch = ended(front, begun(front, [*lines, *wrong]))
    assert batch["status"] == "completed" and batch["completed_at"] >= batch["created_at"]
    assert batch["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
    answers = results(front, batch["output_file_id"])
    for prompt in prompts:
        alone = front.post(PATH, **{**ASK, "prompt": prompt})
        assert answers[prompt]["status_code"] == 200
        assert answers[prompt]["body"]["choices"] == alone["choices"]
        assert answers[prompt]["request_id"] == answers[prompt]["body"]["id"]
    errors = results(front, batch["error_file_id"])
    assert {name: error["status_code"] for name, error in errors.items()} == {"no model": 404, "no number": 400}
    assert errors["no number"]["body"]["error"]["param"] == "max_tokens"
    file = front.call("GET", f"/v1/files/{batch['output_file_id']}").json
    assert file["purpose"] == "batch_output" and file["bytes"] > 0


def test_a_chat_and_a_response_are_lines(front):
    chat = {"model": "stories", "input": "A fox", "max_output_tokens": 4}
    batch = ended(front, begun(front, [line("a", chat, "/v1/responses")], endpoint="/v1/responses"))
    (answer,) = results(front, batch["output_file_id"]).values()
    stored = front.call("GET", f"/v1/responses/{answer['body']['id']}")
    assert stored.status == 200 and stored.json == answer["body"]


def test_a_batch_is_cancelled_and_keeps_its_results(server, front):
    batch = begun(front, [line("a", ASK), *(line(str(i), ENDLESS) for i in range(4))])
    at(front, batch, lambda batch: batch["request_counts"]["completed"] == 1)
    cancelled = front.call("POST", f"/v1/batches/{batch['id']}/cancel").json
    assert cancelled["status"] == "cancelled" and cancelled["error_file_id"] is None
    assert list(results(front, cancelled["output_file_id"])) == ["a"]
    assert_blocks_come_back(server, "stories")
    assert ended(front, batch) == cancelled
    again = front.call("POST", f"/v1/batches/{batch['id']}/cancel").json
    assert again == cancelled


def test_lines_without_a_result_run_again_after_a_restart(server, tmp_path):
    # The last lines take longer than the first front lives.
    lines = [line("a", ASK), line("b", {**ENDLESS, "max_tokens": 1500}), line("c", ASK)]
    with Front(server, *options(tmp_path)[:1], "--batch-requests=1") as front:
        batch = begun(front, lines)
        at(front, batch, lambda batch: batch["request_counts"]["completed"] == 1)
    with Front(server, *options(tmp_path)) as front:
        batch = ended(front, batch)
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        answers = results(front, batch["output_file_id"])
        assert sorted(answers) == ["a", "b", "c"]
        assert answers["a"]["body"]["choices"] == answers["c"]["body"]["choices"]


def test_files_and_batches_are_of_their_key(server, tmp_path):
    (tmp_path / "keys").write_text("sk-one\nsk-two models=other\n")
    one, two = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
    with Front(server, *options(tmp_path, f"--api-key-file={tmp_path / 'keys'}")) as front:
        batch = ended(front, begun(front, [line("a", ASK)], one), one)
        assert list(results(front, batch["output_file_id"], one)) == ["a"]
        for method, path in [
            ("GET", f"/v1/batches/{batch['id']}"),
            ("POST", f"/v1/batches/{batch['id']}/cancel"),
            ("GET", f"/v1/files/{batch['input_file_id']}"),
            ("GET", f"/v1/files/{batch['output_file_id']}/content"),
            ("DELETE", f"/v1/files/{batch['input_file_id']}"),
        ]:
            assert front.call(method, path, headers=two).status == 404, path
        assert front.call("GET", "/v1/files", headers=two).json["data"] == []
        fields = {"input_file_id": batch["input_file_id"], "endpoint": PATH, "completion_window": "24h"}
        assert front.call("POST", "/v1/batches", fields, two).status == 404
        own = ended(front, begun(front, [line("a", ASK)], two), two)
        (error,) = results(front, own["error_file_id"], two).values()
        assert error["status_code"] == 403, "a line may use no more than its key"


def test_lines_wait_for_room(server, tmp_path):
    with Front(server, *options(tmp_path, "--max-requests=1")) as front:
        batch = ended(front, begun(front, [line(str(i), ASK) for i in range(6)]))
        assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0}


def test_lines_have_no_options_that_clients_may_not_send(server, tmp_path):
    with Front(server, *options(tmp_path, "--allow-options=top_k")) as front:
        lines = [line("a", {**ASK, "top_k": 1}), line("b", {**ASK, "min_p": 0.5})]
        batch = ended(front, begun(front, lines))
        assert list(results(front, batch["output_file_id"])) == ["a"]
        assert list(results(front, batch["error_file_id"])) == ["b"]


def test_files_are_bounded(server, tmp_path):
    with Front(server, *options(tmp_path, "--batch-bytes=5000")) as front:
        first = uploaded(front, [line("a", {"prompt": "x" * 3000})]).json
        full = uploaded(front, [line("a", {"prompt": "x" * 3000})])
        assert full.status == 507 and "--batch-bytes" in full.json["error"]["message"], full
        assert front.call("DELETE", f"/v1/files/{first['id']}").json["deleted"] is True
        assert uploaded(front, [line("a", {"prompt": "x" * 3000})]).status == 200


def test_lines_that_are_wrong_fail_the_batch_before_it_begins(front):
    batch = ended(front, begun(front, [line("a", ASK), line("a", ASK), line("b", ASK, "/v1/files")]))
    assert batch["status"] == "failed" and batch["request_counts"]["total"] == 0
    assert [error["line"] for error in batch["errors"]["data"]] == [2, 3]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": 5}, "metadata"),
        ({"priority": 5}, "priority"),
    ],
)
def test_a_mistake_is_named(front, fields, param):
    fields = {"input_file_id": "file-1", "endpoint": PATH, "completion_window": "24h", **fields}
    answer = front.call("POST", "/v1/batches", fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer
    assert uploaded(front, [], purpose="vision").json["error"]["param"] == "purpose"


def test_there_are_no_batches_unless_the_operator_says_so(server, tmp_path):
    with Front(server, options(tmp_path)[0]) as front:
        assert front.call("GET", "/v1/batches").status == 404


@pytest.mark.skipif(sys.version_info < (3, 11), reason="OpenAI's client needs Python 3.11")
def test_the_package_of_openai_works_with_batches(front, tmp_path):
    import openai

    (tmp_path / "requests.jsonl").write_text(json.dumps(line("a", ASK)) + "\n")
    with openai.OpenAI(base_url=front.url + "/v1", api_key="any", max_retries=0) as client:
        with open(tmp_path / "requests.jsonl", "rb") as content:
            file = client.files.create(file=content, purpose="batch")
        assert file.filename == "requests.jsonl" and client.files.retrieve(file.id) == file
        made = client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h", metadata={"a": "b"})
        ended(front, {"id": made.id})
        batch = client.batches.retrieve(made.id)
        assert (batch.status, batch.metadata, batch.request_counts.completed) == ("completed", {"a": "b"}, 1)
        assert json.loads(client.files.content(batch.output_file_id).text)["custom_id"] == "a"
        assert client.batches.list(limit=1).data[0] == batch
        assert file.id in [found.id for found in client.files.list(limit=2)]
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
