"""Models that embed, in a real server, against what sentence-transformers makes of the same texts."""

import json

import numpy
import pytest

from harness.clients import Refused, infer
from harness.repository import ROOT, add_model

FIXTURES = ROOT / "tests" / "fixtures" / "embeddings"


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    repository = tmp_path_factory.mktemp("embeddings") / "repository"
    for name in ["qwen3", "mistral"]:
        folder = FIXTURES / name
        deployment.add_model(
            repository, name, {"task": "embed", "gpt_model_path": folder, "tokenizer_dir": folder}
        )
    add_model(repository, "generating", {"gpt_model_path": FIXTURES / "qwen3", "tokenizer_dir": FIXTURES / "qwen3"})
    loads = [f"--load-model={name}" for name in ["qwen3", "mistral"]]
    with deployment.server(repository, "--model-control-mode=explicit", *loads) as server:
        yield server


def texts(name):
    return json.loads((FIXTURES / name / "expected.json").read_text())["texts"]


def cosine(a, b):
    return numpy.dot(a, b) / (numpy.linalg.norm(a) * numpy.linalg.norm(b))


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_an_embedding_is_that_of_sentence_transformers(server, name):
    for text in texts(name):
        answer = infer(server, name, text["text"])
        assert answer.last.arrays["num_input_tokens"].tolist() == [[len(text["ids"])]]
        embedding = answer.last.arrays["embedding"]
        assert embedding.shape == (1, 32) and embedding.dtype == numpy.float32
        assert cosine(embedding[0], text["embedding"]) > 0.9999
        length = numpy.linalg.norm(text["embedding"])
        assert numpy.linalg.norm(embedding) == pytest.approx(length, rel=0.01)


def test_options_shorten_it_and_say_whether_it_is_normalised(server):
    whole = infer(server, "qwen3", "a b c", normalize=False).last.arrays["embedding"][0]
    some = infer(server, "qwen3", "a b c", dimensions=8).last.arrays["embedding"][0]
    assert numpy.linalg.norm(whole) > 2
    assert some == pytest.approx(whole[:8] / numpy.linalg.norm(whole[:8]), abs=1e-6)
    with pytest.raises(Refused, match="have 32"):
        infer(server, "qwen3", "a b c", dimensions=33)


def test_the_http_endpoint_of_generation_has_it_as_json(server):
    status, body = server.http("POST", "/v2/models/qwen3/generate", json.dumps({"text_input": "a b c"}))
    assert status == 200
    body = json.loads(body)
    expected = infer(server, "qwen3", "a b c").last.arrays["embedding"][0]
    assert body["embedding"] == pytest.approx(expected.tolist(), abs=1e-6)
    assert body["num_input_tokens"] == 4


def test_a_model_without_an_output_layer_only_embeds(server):
    assert "Qwen3Model" in server.load("generating")
