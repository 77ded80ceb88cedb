"""Models that classify and score, in a real server, against what transformers and sentence-transformers make of the
same texts."""

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from harness import clients
from harness.clients import GrpcStream, Refused, infer, tensor
from harness.repository import ROOT
from harness.server import assert_blocks_come_back

FIXTURES = ROOT / "tests" / "fixtures" / "classes"
CLASSIFIERS = ["qwen3", "llama", "bert", "modernbert"]
RERANKERS = ["mistral", "xlm-roberta", "qwen3-reranker", "qwen2-reranker"]
TASKS = dict.fromkeys(CLASSIFIERS, "classify") | dict.fromkeys(RERANKERS, "score")
MORE = {
    "qwen3-reranker": {"is_original_qwen3_reranker": "true"},
    "qwen2-reranker": {"classifier_from_token": '["0", "1"]'},
    # A prompt takes several steps.
    "qwen3": {"max_num_requests": 8, "max_num_tokens": 12, "tokens_per_block": 4},
}
IDS_AND_TYPES = """
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true },
  { name: "token_type_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }
]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    repository = tmp_path_factory.mktemp("classes") / "repository"
    for name, task in TASKS.items():
        folder = FIXTURES / name
        parameters = {"task": task, "gpt_model_path": folder, "tokenizer_dir": folder, **MORE.get(name, {})}
        deployment.add_model(repository, name, parameters)
    bert = {"task": "classify", "gpt_model_path": FIXTURES / "bert"}
    deployment.add_model(repository, "bert_ids", bert, fields=IDS_AND_TYPES)
    with deployment.server(repository) as server:
        yield server


def texts(name):
    return json.loads((FIXTURES / name / "expected.json").read_text())["texts"]


def pair(text):
    options = {"text_pair": text["pair"], "truncate_prompt_tokens": text["max_tokens"]}
    return {name: value for name, value in options.items() if value is not None}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_probabilities_are_those_of_transformers(server, name):
    for text in texts(name):
        arrays = infer(server, name, text["text"], **pair(text)).last.arrays
        assert arrays["num_input_tokens"].item() == len(text["ids"])
        assert arrays["probs"][0] == pytest.approx(text["values"], abs=0.01)
        assert arrays["labels"][0].tolist() == [b"neutral", b"glad", b"sad"]
        best = max(range(3), key=lambda index: text["values"][index])
        assert arrays["label"][0, 0] == arrays["labels"][0, best]


@pytest.mark.parametrize("name", RERANKERS)
def test_many_pairs_at_once_have_the_scores_of_a_cross_encoder(server, name):
    asked = texts(name) * 8
    with ThreadPoolExecutor(16) as pool:
        scores = list(pool.map(lambda text: infer(server, name, text["text"], **pair(text)).last.arrays["score"], asked))
    for text, score in zip(asked, scores):
        assert score.shape == (1, 1) and score[0] == pytest.approx(text["values"], abs=0.01)
    assert len({score.tobytes() for score in scores}) == len(texts(name)), "the same bits in any batch"


@pytest.mark.parametrize("name", TASKS)
def test_the_tokens_of_texts_and_pairs_can_be_had_instead(server, name):
    for text in texts(name):
        answer = infer(server, name, text["text"], **pair(text), prompt_only=True).last
        assert answer.ids == text["ids"] and set(answer.arrays) == {"text_output", "output_ids", "num_input_tokens"}


def test_the_http_endpoint_of_generation_has_them_as_json(server):
    text = texts("qwen3")[1]
    body = {"text_input": text["text"], **pair(text)}
    status, body = server.http("POST", "/v2/models/qwen3/generate", json.dumps(body))
    assert status == 200
    body = json.loads(body)
    assert body["probs"] == pytest.approx(text["values"], abs=0.01)
    assert body["labels"] == ["neutral", "glad", "sad"] and body["label"] == "glad"


def test_pairs_in_tokens_have_the_types_that_the_request_gives(server):
    async def ask(ids, types):
        async with clients.grpc(server) as client:
            arrays = [numpy.array([row], dtype=numpy.int32) for row in (ids, types)]
            inputs = [tensor(name, array, "INT32") for name, array in zip(["input_ids", "token_type_ids"], arrays)]
            return (await client.infer("bert_ids", inputs)).as_numpy("probs")

    pairs = [text for text in texts("bert") if text["pair"]]
    for text in pairs:
        num_first = text["second_text"]
        types = [0] * num_first + [1] * (len(text["ids"]) - num_first)
        probs = clients.run(ask(text["ids"], types))
        assert probs[0] == pytest.approx(text["values"], abs=0.01)
        assert (probs == infer(server, "bert", text["text"], **pair(text)).last.arrays["probs"]).all(), "the same bits"
        assert (probs != clients.run(ask(text["ids"], [0] * len(types)))).any()
    assert pairs


def test_outputs_have_the_names_that_users_of_other_servers_know(server):
    # TEI's /predict has a label and its score, vLLM's /classify probs and the label; both have a score of a pair.
    for name, expected in [("qwen3", {"probs", "labels", "label"}), ("mistral", {"score"}), ("qwen3-reranker", {"score"})]:
        status, body = server.http("GET", f"/v2/models/{name}")
        assert status == 200
        outputs = {output["name"] for output in json.loads(body)["outputs"]}
        assert expected <= outputs and "embedding" not in outputs
        status, body = server.http("POST", f"/v2/models/{name}/generate", json.dumps({"text_input": "a b"}))
        assert status == 200 and expected | {"num_input_tokens"} <= json.loads(body).keys()


@pytest.mark.cancelling
def test_requests_that_clients_leave_disturb_no_others(server):
    text = max(texts("qwen3"), key=lambda text: len(text["ids"]))["text"]
    alone = infer(server, "qwen3", text).last.arrays["probs"].tobytes()

    async def main():
        async with clients.grpc(server) as client:

            async def leave(seconds):
                stream = GrpcStream(client, "qwen3", text)
                answer = asyncio.create_task(anext(aiter(stream)))
                await asyncio.sleep(seconds)
                stream.cancel()
                with contextlib.suppress(Refused):
                    await answer

            async def stay():
                answer = await clients.stream(client, "qwen3", text, stream=False)
                return answer.last.tensors["probs"].tobytes()

            _, *answers = await asyncio.gather(asyncio.gather(*(leave(n / 4000) for n in range(24))), *(stay() for _ in range(24)))
            return answers

    answers = clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))
    assert answers == [alone] * 24
    assert_blocks_come_back(server, "qwen3")


def test_what_does_not_fit_the_task_is_refused(server):
    with pytest.raises(Refused, match="task: embed"):
        infer(server, "mistral", "a", text_pair="b", dimensions=3)
    with pytest.raises(Refused, match="is empty"):
        infer(server, "mistral", "a", text_pair="")
