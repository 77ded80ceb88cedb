"""Models with recurrent states in a real server: many requests at once, some of them cancelled and some paused, get the answers
that they get alone; what such models cannot have is refused at load."""

import json

import pytest

from harness.clients import described, streams, streams_beside_cancelled
from harness.repository import QUEUED, ROOT, TIGHT, add_model
from harness.server import Server, assert_blocks_come_back

FIXTURES = ROOT / "tests" / "fixtures"
NAMES = ["lfm2-moe", "qwen3-5", "granite4"]
MAX_SEQ_LEN = 128
NUM_CANCELLED = 6


def requests():
    """Requests whose prompts begin alike, of many lengths."""
    kinds = [{}, {"temperature": 1.2, "seed": 3, "top_k": 20}, {"repetition_penalty": 1.3}]
    for index in range(8):
        prompt = [(37 * at + index % 2) % 150 + 3 for at in range(9 + 8 * index)]
        yield prompt, {"max_tokens": 40 + index, "ignore_eos": True, "return_log_probs": True, **kinds[index % len(kinds)]}


def serve(server, model, asked):
    """What requests get that are asked for at once, beside some that are cancelled in flight."""
    return streams_beside_cancelled(server, model, asked, [prompt for prompt, _ in asked[:NUM_CANCELLED]])


@pytest.mark.cancelling
def test_requests_get_the_answers_that_they_get_alone(repository, tmp_path):
    tight = {**TIGHT, "max_seq_len": MAX_SEQ_LEN, "max_tokens_in_paged_kv_cache": 3 * MAX_SEQ_LEN, "max_num_requests": 12}
    for name in NAMES:
        checkpoint = {"gpt_model_path": FIXTURES / name, "num_threads": 2}
        add_model(repository, f"{name}-alone", {**checkpoint, "max_seq_len": MAX_SEQ_LEN})
        add_model(repository, name, {**checkpoint, **tight, "stats_file": tmp_path / f"{name}.jsonl"})
        add_model(repository, f"{name}-queued", {**checkpoint, **tight}, fields=QUEUED)
    with Server(repository) as server:
        different = list(requests())
        for name in NAMES:
            fixture = json.loads((FIXTURES / name / "expected.json").read_text())["prompts"]
            asked = [(prompt["prompt"], {"max_tokens": len(prompt["greedy"])}) for prompt in fixture]
            answers = streams(server, f"{name}-alone", asked)
            assert [answer.ids for answer in answers] == [prompt["greedy"] for prompt in fixture], name
            expected = [described(streams(server, f"{name}-alone", [one])[0]) for one in different]
            for model in (name, f"{name}-queued"):
                assert serve(server, model, 3 * different) == 3 * expected, model
                assert_blocks_come_back(server, model)
            records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
            assert max(record["Paused Requests"] for record in records) > 0, name
            assert max(record["Active Request Count"] for record in records) > 8, name


def test_what_states_cannot_do_is_refused_at_load(repository):
    refusals = {
        "reuse": ({"enable_kv_cache_reuse": "true"}, "enable_kv_cache_reuse is true, and the model has layers with recurrent states"),
        "beams": ({"max_beam_width": 2}, "max_beam_width is above 1, and the model has layers with recurrent states"),
        "drafts": ({"speculation": "prompt_lookup"}, "speculation is on, and the model has layers with recurrent states"),
        "ranks": ({"tensor_parallel_size": 2}, "has layers with recurrent states, which are computed by one process"),
    }
    for name, (parameters, _) in refusals.items():
        add_model(repository, name, {"gpt_model_path": FIXTURES / "qwen3-5", **parameters})
    with Server(repository, "--model-control-mode=explicit") as server:
        for name, (_, words) in refusals.items():
            assert words in server.load(name), name
