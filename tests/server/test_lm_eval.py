"""EleutherAI's lm-evaluation-harness, as it comes from PyPI, against the server with OpenAI's API: a small task on the
demo model."""

import json
import os
import pathlib
import subprocess

import numpy
import pytest

from harness.clients import infer
from harness.repository import FULL_ANSWER, STORIES, add_model
from harness.server import Server

pytestmark = pytest.mark.complete

DOCUMENTS = [
    {"start": "Once upon a time, there was a brave fox named", "ends": [" Finn.", " of the", " 17"]},
    {"start": "The old bear was very", "ends": [" happy.", " and", " sad and wanted to go home."]},
]
# A name, and what makes the task: questions with choices, and texts that are generated.
TASKS = {
    "choices": "output_type: multiple_choice\ndoc_to_text: '{{start}}'\ndoc_to_choice: '{{ends}}'\ntarget_delimiter: ''\n"
    "doc_to_target: 0\nmetric_list:\n  - metric: acc\n",
    "text": "output_type: generate_until\ndoc_to_text: '{{start}}'\ndoc_to_target: ''\n"
    "generation_kwargs: {until: ['.'], max_gen_toks: 24, temperature: 0}\nmetric_list:\n  - metric: exact_match\n",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("lm_eval") / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    add_model(repository, "whole", fields=FULL_ANSWER, checkpoint=STORIES)
    with Server(repository) as server:
        yield server


@pytest.fixture(scope="module")
def answers(front, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {documents}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{task}")
    script = pathlib.Path(__file__).parent / "clients" / "lm_eval_tasks.py"
    command = [os.environ["AIPERF_PYTHON"], script, front.url, folder, STORIES]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "OPENAI_API_KEY": "any"}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def log_probabilities(server, text):
    """The tokens of a text, and the log-probabilities of all tokens after each of them, from the model's logits."""
    # The harness sends tokens, without the one that begins a text.
    _, *ids = infer(server, "whole", text, max_tokens=1, prompt_only=True).ids
    answer = infer(server, "whole", "", prompt_token_ids=json.dumps(ids), max_tokens=1, return_context_logits=True)
    logits = answer.last.arrays["context_logits"]
    logits = logits.reshape(len(ids), -1).astype(numpy.float64)
    return ids, logits - numpy.log(numpy.exp(logits).sum(axis=1, keepdims=True))


def test_choices_are_as_likely_as_the_models_logits_say(server, answers):
    for document, found in zip(DOCUMENTS, answers["choices"]["answers"], strict=True):
        before, _ = log_probabilities(server, document["start"])
        expected = []
        for end in document["ends"]:
            ids, rows = log_probabilities(server, document["start"] + end)
            assert ids[: len(before)] == before, "the texts are divided between tokens"
            places = range(len(before) - 1, len(ids) - 1)
            is_greedy = all(rows[place].argmax() == ids[place + 1] for place in places)
            expected.append((sum(rows[place, ids[place + 1]] for place in places), is_greedy))
        for (likelihood, is_greedy), (sum_, greedy) in zip(found, expected, strict=True):
            assert float(likelihood) == pytest.approx(sum_, abs=1e-3)
            assert str(is_greedy) == str(greedy)
    assert 0 <= answers["choices"]["metrics"]["acc,none"] <= 1


def test_texts_are_those_that_the_model_writes(front, answers):
    options = {"model": "stories", "max_tokens": 24, "stop": ["."]}
    for document, text, chat in zip(DOCUMENTS, answers["text"]["answers"], answers["chat"]["answers"], strict=True):
        _, *ids = front.post("/tokenize", model="stories", prompt=document["start"])["tokens"]
        plain = front.post("/v1/completions", prompt=ids, **options)["choices"][0]["text"]
        assert text == [plain]
        messages = [{"role": "user", "content": document["start"]}]
        answer = front.post("/v1/chat/completions", messages=messages, **options)
        assert chat == [answer["choices"][0]["message"]["content"]]
