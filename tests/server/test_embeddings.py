"""Models that embed, in a real server, against what sentence-transformers makes of the same texts."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from harness.clients import Refused, infer
from harness.repository import ROOT, add_model

FIXTURES = ROOT / "tests" / "fixtures"
FOLDERS = {
    "qwen3": FIXTURES / "embeddings" / "qwen3",
    "mistral": FIXTURES / "embeddings" / "mistral",
    "bert": FIXTURES / "encoders" / "bert",
    "xlm-roberta": FIXTURES / "encoders" / "xlm-roberta",
    "modernbert": FIXTURES / "encoders" / "modernbert",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    repository = tmp_path_factory.mktemp("embeddings") / "repository"
    for name, folder in FOLDERS.items():
        deployment.add_model(
            repository, name, {"task": "embed", "gpt_model_path": folder, "tokenizer_dir": folder}
        )
    add_model(repository, "generating", {"gpt_model_path": FOLDERS["qwen3"], "tokenizer_dir": FOLDERS["qwen3"]})
    loads = [f"--load-model={name}" for name in FOLDERS]
    with deployment.server(repository, "--model-control-mode=explicit", *loads) as server:
        yield server


def texts(name):
    return json.loads((FOLDERS[name] / "expected.json").read_text())["texts"]


def cosine(a, b):
    return numpy.dot(a, b) / (numpy.linalg.norm(a) * numpy.linalg.norm(b))


@pytest.mark.parametrize("name", FOLDERS)
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


def test_an_encoder_embeds_many_texts_of_mixed_lengths_with_the_bits_of_each_alone(server):
    words = [chr(ord("a") + index % 26) for index in range(97)]
    asked = [" ".join(words[:num]) for num in [1, 97, 30, 2, 64, 63, 65, 96] * 6]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda text: infer(server, "bert", text).last.arrays["embedding"], asked))
    alone = {text: infer(server, "bert", text).last.arrays["embedding"].tobytes() for text in set(asked)}
    assert all(embedding.tobytes() == alone[text] for text, embedding in zip(asked, together))


def test_a_text_that_an_encoder_has_no_positions_for_is_refused_and_others_go_on(server):
    with pytest.raises(Refused, match="101 tokens"):
        infer(server, "bert", "a " * 99)
    assert infer(server, "bert", "a").last.arrays["embedding"].shape == (1, 32)
