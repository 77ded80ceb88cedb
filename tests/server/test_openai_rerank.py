"""Rerankers, scores and classes by the server with OpenAI's API, and the API of Text Embeddings Inference, against the
numbers of transformers and sentence-transformers."""

import json
import os
import subprocess

import numpy
import pytest

from harness.clients import infer
from harness.front import Front
from harness.repository import ROOT, add_model
from harness.server import Server

FIXTURES = ROOT / "tests" / "fixtures"
MODELS = {
    "reranker": ("score", "classes/xlm-roberta"),
    "classifier": ("classify", "classes/bert"),
    "embedder": ("embed", "embeddings/qwen3"),
}
QUERY, DOCUMENTS = "a b", ["g h", "c", "d e f a b", "c"]
LONG = " ".join("abcdefgh" * 40)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_rerank") / "repository"
    for name, (task, folder) in MODELS.items():
        folder = FIXTURES / folder
        add_model(repository, name, {"task": task, "gpt_model_path": folder, "tokenizer_dir": folder})
    with Server(repository) as server:
        yield server


def texts(name):
    return json.loads((FIXTURES / MODELS[name][1] / "expected.json").read_text())["texts"]


def scores(server):
    """The score of each document, as Triton gives it, and the tokens of all pairs."""
    arrays = [infer(server, "reranker", QUERY, text_pair=document).last.arrays for document in DOCUMENTS]
    return [it["score"].item() for it in arrays], sum(it["num_input_tokens"].item() for it in arrays)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(server, front, path):
    expected, num_tokens = scores(server)
    answer = front.post(path, model="reranker", query=QUERY, documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]])
    order = sorted(range(4), key=lambda index: -expected[index])
    assert [result["index"] for result in answer["results"]] == order
    assert order.index(1) + 1 == order.index(3), "equal documents stay in their order"
    for result in answer["results"]:
        assert numpy.float32(result["relevance_score"]) == numpy.float32(expected[result["index"]])
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    best = front.post(path, model="reranker", query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)
    assert best["results"] == [{name: answer["results"][0][name] for name in ("index", "relevance_score")}]


def test_scores_are_those_of_a_cross_encoder(front):
    pairs = [text for text in texts("reranker") if text["pair"] and not text["max_tokens"]]
    firsts, seconds = [text["text"] for text in pairs], [text["pair"] for text in pairs]
    answer = front.post("/score", model="reranker", text_1=firsts, text_2=seconds)
    assert [entry["index"] for entry in answer["data"]] == list(range(len(pairs))) and len(pairs) > 2
    for entry, text in zip(answer["data"], pairs, strict=True):
        assert entry["object"] == "score" and entry["score"] == pytest.approx(text["values"][0], abs=0.01)
    one = front.post("/v1/score", model="reranker", text_1=firsts[0], text_2=seconds[:2], raw_scores=True)
    assert one["data"][0]["score"] == pytest.approx(pairs[0]["numbers"][0], abs=0.01)


def test_classes_are_those_of_transformers(front):
    alone = [text for text in texts("classifier") if not text["pair"] and not text["max_tokens"]]
    answer = front.post("/classify", model="classifier", input=[text["text"] for text in alone])
    predictions = front.post("/predict", inputs=[[text["text"]] for text in alone])
    assert len(alone) > 1
    for entry, prediction, text in zip(answer["data"], predictions, alone, strict=True):
        assert entry["probs"] == pytest.approx(text["values"], abs=0.01) and entry["num_classes"] == 3
        assert [it["score"] for it in prediction] == sorted(entry["probs"], reverse=True)
        assert prediction[0]["label"] == entry["label"]
    assert front.post("/predict", inputs=alone[0]["text"]) == predictions[0]


def test_a_pair_has_classes_too(front):
    pair = next(text for text in texts("classifier") if text["pair"] and not text["max_tokens"])
    prediction = front.post("/predict", inputs=[pair["text"], pair["pair"]])
    assert sorted(it["score"] for it in prediction) == pytest.approx(sorted(pair["values"]), abs=0.01)
    assert front.post("/predict", inputs=[[pair["text"], pair["pair"]]]) == [prediction]


def test_clients_of_text_embeddings_inference_name_no_model(server, front):
    (vector,) = front.post("/embed", inputs="a b c")
    expected = infer(server, "embedder", "a b c", normalize=True).last.arrays["embedding"][0]
    assert numpy.array_equal(numpy.float32(vector), expected)
    raw = front.post("/embed", inputs=["a b c", "d"], normalize=False)
    assert len(raw) == 2 and raw[0] != vector
    ranks = front.post("/rerank", query=QUERY, texts=DOCUMENTS, return_text=True)
    own = front.post("/rerank", model="reranker", query=QUERY, documents=DOCUMENTS)["results"]
    assert ranks == [{"index": it["index"], "score": it["relevance_score"], **it["document"]} for it in own]


@pytest.mark.parametrize(
    "path, fields",
    [("/rerank", {"query": LONG, "texts": ["a"]}), ("/predict", {"inputs": LONG})],
)
def test_a_text_that_is_too_long_is_cut_where_the_request_says_so(front, path, fields):
    refused = front.call("POST", path, fields)
    assert refused.status == 413 and refused.json["error_type"] == "Validation", refused
    assert "shorten" in refused.json["error"]
    assert front.call("POST", path, {**fields, "truncate": True}).status == 200


def test_a_text_is_cut_where_its_checkpoint_says_so(front):
    assert front.post("/embed", inputs=LONG, truncate=True) == front.post("/embed", inputs=LONG)


@pytest.mark.parametrize(
    "path, fields, status, words",
    [
        ("/rerank", {"model": "embedder", "query": "a", "documents": ["b"]}, 400, "task: score"),
        ("/rerank", {"model": "nobody", "query": "a", "documents": ["b"]}, 404, "'nobody'"),
        ("/rerank", {"model": "reranker", "query": "a", "documents": []}, 400, "2048"),
        ("/rerank", {"model": "reranker", "query": "a", "documents": ["b"], "tempo": 1}, 400, "'tempo'"),
        ("/score", {"model": "reranker", "text_1": ["a", "b"], "text_2": "c"}, 400, "text_1"),
        ("/classify", {"model": "reranker", "input": "a"}, 400, "task: classify"),
        ("/v1/embeddings", {"model": "classifier", "input": "a"}, 400, "task: embed"),
        ("/v1/completions", {"model": "reranker", "prompt": "a"}, 400, "/rerank"),
    ],
)
def test_a_mistake_is_named_in_the_words_of_openai(front, path, fields, status, words):
    answer = front.call("POST", path, fields)
    assert answer.status == status and words in answer.json["error"]["message"], answer


@pytest.mark.parametrize(
    "path, fields, status, kind",
    [
        ("/embed", {"model": "reranker", "inputs": "a"}, 413, "Validation"),
        ("/embed", {"inputs": "a", "prompt_name": 5}, 413, "Validation"),
        ("/embed", {"model": "nobody", "inputs": "a"}, 404, "Validation"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, 413, "Validation"),
        ("/rerank", {"texts": ["a"]}, 413, "Validation"),
    ],
)
def test_a_mistake_is_named_in_the_words_of_text_embeddings_inference(front, path, fields, status, kind):
    answer = front.call("POST", path, fields)
    assert (answer.status, answer.json["error_type"]) == (status, kind) and answer.json["error"], answer


def test_pooling_gives_the_numbers_of_each_task(front):
    texts_ = ["a b c", "d"]

    def numbers(model, **more):
        return [entry["data"] for entry in front.post("/pooling", model=model, input=texts_, **more)["data"]]

    vectors = front.post("/v1/embeddings", model="embedder", input=texts_)["data"]
    assert numbers("embedder", task="embed") == [entry["embedding"] for entry in vectors]
    assert [len(vector) for vector in numbers("embedder", dimensions=4)] == [4, 4]
    classes = front.post("/classify", model="classifier", input=texts_)["data"]
    assert numbers("classifier") == [entry["probs"] for entry in classes]
    assert [len(scores) for scores in numbers("reranker")] == [1, 1]
    for fields, param in [({"model": "embedder", "task": "score"}, "task"), ({"model": "tales"}, "model")]:
        answer = front.call("POST", "/pooling", {"input": "a", **fields})
        assert answer.status in (400, 404), answer
        assert answer.json["error"]["param"] == param, answer


def test_prompts_stand_before_texts(server, tmp_path):
    prompts = {"prompts": {"query": "a b ", "passage": "d "}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))

    with Front(server, f"--prompts=embedder={tmp_path}") as front:

        def vector(text, **more):
            return front.post("/v1/embeddings", model="embedder", input=text, **more)["data"][0]["embedding"]

        query = vector("a b c")
        assert query != vector("c")
        assert vector("c", prompt_name="query") == vector("c", input_type="search_query") == query
        assert vector("c", input_type="document") == vector("d c")
        assert front.post("/embed", inputs="c", prompt_name="query") == front.post("/embed", inputs="a b c")
        assert front.post("/pooling", model="embedder", input="c", input_type="query")["data"][0]["data"] == query
        answer = front.call("POST", "/v1/embeddings", {"model": "embedder", "input": "c", "prompt_name": "title"})
        assert answer.status == 400 and "'passage' or 'query'" in answer.json["error"]["message"], answer
    (tmp_path / "wrong.json").write_text("[")
    command = [os.environ["INFLIGHT_OPENAI"], "--port=0", f"--triton={server.grpc_url}", f"--prompts=m={tmp_path}/wrong.json"]
    wrong = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 1 and "wrong.json: it is not JSON" in wrong.stderr


def test_prompts_that_are_not_known_are_refused(front):
    for path, fields in [("/v1/embeddings", {"input": "c"}), ("/pooling", {"input": "c"}), ("/embed", {"inputs": "c"})]:
        answer = front.call("POST", path, {"model": "embedder", "prompt_name": "query", **fields})
        assert answer.status in (400, 413) and "--prompts embedder=PATH" in json.dumps(answer.json), answer


def test_models_are_not_asked_for_their_configurations_by_each_request(server, front):
    front.post("/embed", inputs="a b c")
    start = server.log_path.stat().st_size
    server.http("POST", "/v2/logging", json.dumps({"log_verbose_level": 1}))
    try:
        for _ in range(4):
            front.post("/embed", inputs="a b c")
    finally:
        server.http("POST", "/v2/logging", json.dumps({"log_verbose_level": 0}))
    log = server.log(start)
    num_calls = {name: log.count(f"Done for {name},") for name in ("RepositoryIndex", "ModelConfig")}
    assert num_calls["RepositoryIndex"] >= 4 and num_calls["ModelConfig"] <= len(MODELS), num_calls


def test_the_root_is_of_the_only_task(front):
    ranks = front.post("/", query=QUERY, texts=DOCUMENTS)
    assert ranks == front.post("/rerank", query=QUERY, texts=DOCUMENTS)
    answer = front.call("POST", "/", {"inputs": "a"})
    assert answer.status == 413 and "/embed or /predict" in answer.json["error"]


def test_a_mistake_is_named_in_the_words_of_cohere(front):
    answer = front.call("POST", "/v2/rerank", {"model": "reranker", "query": "a", "documents": "b"})
    assert answer.status == 400 and "documents" in answer.json["message"]


@pytest.mark.parametrize(
    "path, fields",
    [
        ("/rerank", {"model": "reranker", "query": "a" * (3 << 20), "documents": ["b"] * 2048}),
        ("/v1/embeddings", {"model": "embedder", "input": ["a"] * 2048, "stop": "b" * (3 << 20)}),
        ("/v1/completions", {"model": "embedder", "prompt": ["a"] * 128, "stop": "b" * (3 << 20)}),
    ],
)
def test_a_large_field_is_not_copied_for_each_of_many_texts(front, path, fields):
    answer = front.call("POST", path, fields)
    assert answer.status == 400 and "fewer inputs" in answer.json["error"]["message"], answer
    with open(f"/proc/{front.process.pid}/status") as status:
        (peak,) = (line.split()[1] for line in status if line.startswith("VmHWM"))
    assert int(peak) < 256 << 10, "kB"
