"""Models that embed, in a real server, against what sentence-transformers makes of the same texts."""

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from harness import clients
from harness.clients import GrpcStream, Refused, infer
from harness.repository import ROOT, add_model
from harness.server import assert_blocks_come_back

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


@pytest.mark.parametrize("name", FOLDERS)
def test_the_tokens_of_a_text_can_be_had_instead(server, name):
    for text in texts(name):
        answer = infer(server, name, text["text"], prompt_only=True).last
        assert answer.ids == text["ids"] and set(answer.arrays) == {"text_output", "output_ids", "num_input_tokens"}
        assert (answer.num_input_tokens, answer.text) == (len(text["ids"]), text["text"])
        again = infer(server, name, "", prompt_token_ids=json.dumps(text["ids"]), prompt_only=True).last
        assert again.ids == answer.ids and again.text
    assert "output_ids" not in infer(server, name, "a").last.arrays


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


def test_a_text_is_cut_at_its_end_and_keeps_its_special_tokens(server):
    def tensors(text, **options):
        arrays = infer(server, "bert", text, **options).last.arrays
        return arrays["num_input_tokens"].item(), arrays["embedding"].tobytes()

    words = [chr(ord("a") + index % 26) for index in range(200)]
    # As sentence-transformers, after the tokens that the checkpoint names.
    assert tensors(" ".join(words)) == tensors(" ".join(words[:96])) and tensors(" ".join(words))[0] == 98
    for num in (3, 50, 97):
        assert tensors(" ".join(words), truncate_prompt_tokens=num) == tensors(" ".join(words[: num - 2]))
    with pytest.raises(Refused, match="allow at least 3"):
        infer(server, "bert", "a b c", truncate_prompt_tokens=2)
    assert infer(server, "bert", "a").last.arrays["embedding"].shape == (1, 32)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
@pytest.mark.cancelling
def test_cancelled_requests_leave_those_beside_them_the_same(server, name):
    words = [chr(ord("a") + index % 26) for index in range(90)]
    asked = [" ".join(words[: 1 + 11 * index % 90]) for index in range(64)]
    alone = {text: infer(server, name, text).last.arrays["embedding"].tobytes() for text in set(asked)}

    async def main():
        async with clients.grpc(server) as client:

            async def leave(text, seconds):
                stream = GrpcStream(client, name, text)
                answer = asyncio.create_task(anext(aiter(stream)))
                await asyncio.sleep(seconds)
                stream.cancel()
                with contextlib.suppress(Refused):
                    await answer

            async def stay(text):
                answer = await clients.stream(client, name, text, stream=False)
                return answer.last.tensors["embedding"].tobytes()

            pairs = zip(asked[::2], asked[1::2], strict=True)
            waits = (asyncio.gather(stay(one), leave(other, n / 4000)) for n, (one, other) in enumerate(pairs))
            return [answer for answer, _ in await asyncio.gather(*waits)]

    answers = clients.run(asyncio.wait_for(main(), clients.TIMEOUT_S))
    assert answers == [alone[text] for text in asked[::2]]
    # Nothing is left of the others.
    assert infer(server, name, asked[5]).last.arrays["embedding"].tobytes() == alone[asked[5]]
    assert_blocks_come_back(server, name)
