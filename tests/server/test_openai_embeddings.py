"""Embeddings by the server with OpenAI's API."""

import base64

import numpy
import pytest

from harness.clients import infer
from harness.front import Front
from harness.repository import ROOT, STORIES, add_model
from harness.server import Server

PATH = "/v1/embeddings"
TEXTS = ["The fox jumps.", "a b c", "An old bear"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_embeddings") / "repository"
    for name, folder in [("qwen3", "embeddings/qwen3"), ("bert", "encoders/bert")]:
        folder = ROOT / "tests" / "fixtures" / folder
        add_model(repository, name, {"task": "embed", "gpt_model_path": folder, "tokenizer_dir": folder})
    add_model(repository, "stories", checkpoint=STORIES)
    with Server(repository) as server:
        yield server


def test_each_text_has_its_vector(server, front):
    answer = front.post(PATH, model="qwen3", input=TEXTS)
    assert (answer["object"], answer["model"]) == ("list", "qwen3")
    num_tokens = 0
    for index, (text, entry) in enumerate(zip(TEXTS, answer["data"], strict=True)):
        expected = infer(server, "qwen3", text).last.arrays
        assert (entry["object"], entry["index"]) == ("embedding", index)
        assert numpy.array_equal(numpy.float32(entry["embedding"]), expected["embedding"][0])
        num_tokens += int(expected["num_input_tokens"][0, 0])
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert front.post(PATH, model="qwen3", input=TEXTS[0])["data"] == answer["data"][:1]


def test_tokens_have_vectors_too(front):
    answer = front.post(PATH, model="qwen3", input=[[5, 6, 7], [5, 6, 7], [7, 6, 5]])
    first, second, third = (entry["embedding"] for entry in answer["data"])
    assert first == second != third
    assert answer["usage"]["prompt_tokens"] == 9


@pytest.mark.parametrize("model", ["qwen3", "bert"])
def test_its_tokens_are_those_of_the_text(front, model):
    answer = front.post(PATH, model=model, input=TEXTS[1])
    read = front.post("/tokenize", model=model, prompt=TEXTS[1])
    assert read["count"] == len(read["tokens"]) == answer["usage"]["prompt_tokens"] > 3
    assert front.post(PATH, model=model, input=[read["tokens"]])["data"] == answer["data"]
    text = front.post("/detokenize", model=model, tokens=read["tokens"])["prompt"]
    assert TEXTS[1] in text


def test_base64_is_the_same_vector(front):
    (numbers,) = front.post(PATH, model="qwen3", input="a b c", dimensions=8)["data"]
    (encoded,) = front.post(PATH, model="qwen3", input="a b c", dimensions=8, encoding_format="base64")["data"]
    vector = numpy.frombuffer(base64.b64decode(encoded["embedding"]), "<f4")
    assert len(vector) == 8
    assert numpy.array_equal(vector, numpy.float32(numbers["embedding"]))


def test_many_texts_are_served_a_part_at_a_time(server):
    with Front(server, "--max-requests=3") as front:
        answer = front.post(PATH, model="qwen3", input=[f"fox {n}" for n in range(100)])
        assert [entry["index"] for entry in answer["data"]] == list(range(100))
        assert answer["data"][99]["embedding"] == front.post(PATH, model="qwen3", input="fox 99")["data"][0]["embedding"]


@pytest.mark.parametrize(
    "fields, status, words",
    [
        ({"model": "qwen3", "input": [["a"]]}, 400, "token ids"),
        ({"model": "qwen3", "input": "a", "dimensions": 33}, 400, "have 32"),
        ({"model": "qwen3", "input": "a", "encoding_format": "hex"}, 400, "base64"),
        ({"model": "stories", "input": "a"}, 400, "task: embed"),
        ({"model": "tales", "input": "a"}, 404, "'tales'"),
    ],
)
def test_what_is_wrong_is_named(front, fields, status, words):
    answer = front.call("POST", PATH, fields)
    error = answer.json["error"]
    assert answer.status == status and words in error["message"], answer
    assert error["param"] in fields and "INVALID_ARG" not in error["message"], answer


@pytest.mark.parametrize(
    "path, fields",
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_a_model_that_embeds_writes_no_text_and_says_so(front, path, fields):
    answer = front.call("POST", path, {"model": "qwen3", **fields})
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, "model"), error
    assert "'qwen3' writes no text" in error["message"] and "/v1/embeddings" in error["message"]
