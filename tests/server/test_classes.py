"""Models that classify and score, in a real server, against what transformers and sentence-transformers make of the same texts."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.clients import Refused, infer
from harness.repository import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "classes"
TASKS = {"qwen3": "classify", "llama": "classify", "bert": "classify", "modernbert": "classify", "mistral": "score", "xlm-roberta": "score"}


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    repository = tmp_path_factory.mktemp("classes") / "repository"
    for name, task in TASKS.items():
        folder = FIXTURES / name
        deployment.add_model(repository, name, {"task": task, "gpt_model_path": folder, "tokenizer_dir": folder})
    with deployment.server(repository) as server:
        yield server


def texts(name):
    return json.loads((FIXTURES / name / "expected.json").read_text())["texts"]


def pair(text):
    options = {"text_pair": text["pair"], "truncate_prompt_tokens": text["max_tokens"]}
    return {name: value for name, value in options.items() if value is not None}


@pytest.mark.parametrize("name", ["qwen3", "llama", "bert", "modernbert"])
def test_probabilities_are_those_of_transformers(server, name):
    for text in texts(name):
        arrays = infer(server, name, text["text"], **pair(text)).last.arrays
        assert arrays["num_input_tokens"].item() == len(text["ids"])
        assert arrays["probs"][0] == pytest.approx(text["values"], abs=0.01)
        assert arrays["labels"][0].tolist() == [b"neutral", b"glad", b"sad"]
        best = max(range(3), key=lambda index: text["values"][index])
        assert arrays["label"][0, 0] == arrays["labels"][0, best]


@pytest.mark.parametrize("name", ["mistral", "xlm-roberta"])
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


def test_what_does_not_fit_the_task_is_refused(server):
    with pytest.raises(Refused, match="task: embed"):
        infer(server, "mistral", "a", text_pair="b", dimensions=3)
    with pytest.raises(Refused, match="is empty"):
        infer(server, "mistral", "a", text_pair="")
