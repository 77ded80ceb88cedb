"""LiteLLM, as it comes from PyPI, against the server with OpenAI's API."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from harness.conversations import TOOLS, USER, add_calling_model
from harness.repository import ROOT, add_model
from harness.server import Server

pytestmark = pytest.mark.complete

if sys.version_info < (3, 11):
    pytest.skip("LiteLLM imports OpenAI's client, which needs Python 3.11", allow_module_level=True)
FIXTURES = ROOT / "tests" / "fixtures"
MODELS = {"qwen3": ("embed", "embeddings/qwen3"), "reranker": ("score", "classes/xlm-roberta")}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("litellm") / "repository"
    add_calling_model(repository, "chat")
    for name, (task, folder) in MODELS.items():
        folder = FIXTURES / folder
        add_model(repository, name, {"task": task, "gpt_model_path": folder, "tokenizer_dir": folder})
    with Server(repository) as server:
        yield server


def test_litellm_gets_what_the_server_answers(front):
    script = pathlib.Path(__file__).parent / "clients" / "litellm_calls.py"
    command = [os.environ["AIPERF_PYTHON"], script, front.url, USER["content"], json.dumps(TOOLS)]
    # Its prices come from the package: it downloads none.
    variables = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout.splitlines()[-1])

    chat = {"model": "chat", "messages": [USER], "max_tokens": 20, "seed": 7, "temperature": 0.8}
    expected = front.post("/v1/chat/completions", **chat, logprobs=True, top_logprobs=2)
    choice, own = expected["choices"][0], results["chat"]["choices"][0]
    assert own["message"]["content"] == choice["message"]["content"]
    assert own["finish_reason"] == "length"
    logprobs = [(token["token"], token["logprob"]) for token in own["logprobs"]["content"]]
    assert logprobs == [(token["token"], token["logprob"]) for token in choice["logprobs"]["content"]]
    assert results["chat"]["usage"]["total_tokens"] == expected["usage"]["total_tokens"]
    assert results["stream"] == results["rebuilt"] == choice["message"]["content"]
    assert results["stream_usage"]["completion_tokens"] == 20
    call = results["call"]
    assert call["name"] == "weather" and json.loads(call["arguments"])["city"] in ("Oslo", "Rome")
    plain = front.post("/v1/completions", model="chat", prompt=USER["content"], max_tokens=20)
    assert results["text"] == plain["choices"][0]["text"]
    response = front.post("/v1/responses", model="chat", input=USER["content"], max_output_tokens=20)
    assert results["response"] == response["output"][0]["content"][0]["text"]
    vectors = front.post("/v1/embeddings", model="qwen3", input=[USER["content"], "The end."])["data"]
    assert results["embedding"] == [pytest.approx(vector["embedding"]) for vector in vectors]
    documents = ["The end.", USER["content"], "A bear."]
    ranks = front.post("/rerank", model="reranker", query=USER["content"], documents=documents)["results"][:2]
    ranks = [[rank["index"], pytest.approx(rank["relevance_score"])] for rank in ranks]
    # Cohere's, Jina's, vLLM's and Text Embeddings Inference's forms.
    assert results["reranked"] == [ranks] * 4
    assert results["unknown_model"] == ["NotFoundError", 404]
    assert results["bad_option"] == ["BadRequestError", 400]
