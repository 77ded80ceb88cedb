"""Draft models: the same answers in fewer steps, whatever the smaller model guesses."""

import json
import time

import pytest

from harness import clients
from harness.clients import generate_stream
from harness.repository import STORIES, TIGHT

PROMPT = "Once upon a time, there was a brave fox named Finn."
FIGURES = ["acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"]
# The model guesses for itself: there is no smaller one with its tokens.
DRAFTED = {"speculation": "draft_model", "draft_model_path": STORIES, "max_draft_tokens": 6}
# As many drafts as there may be, so that their number does not depend on what steps of this machine cost.
ALL = {**DRAFTED, "enable_adaptive_drafts": "false"}
OPTIONS = {
    "greedy": {},
    "sampled": {"temperature": 0.3, "seed": 3},
    "penalised": {"temperature": 0.3, "seed": 4, "repetition_penalty": 1.02, "presence_penalty": 0.2},
    "guided": {"guided_regex": "(the red fox, |the brown bear, ){4,9}"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    folder = tmp_path_factory.mktemp("draft_models")
    repository = folder / "repository"
    add_model = deployment.add_model
    add_model(repository, "plain", checkpoint=STORIES)
    add_model(repository, "drafted", {**ALL, "stats_file": folder / "steps.jsonl"}, checkpoint=STORIES)
    add_model(repository, "adaptive", DRAFTED, checkpoint=STORIES)
    add_model(repository, "tight", {**ALL, **TIGHT}, checkpoint=STORIES)
    add_model(repository, "overlap", {**ALL, "enable_trt_overlap": "true"}, checkpoint=STORIES)
    with deployment.server(repository, "--metrics-interval-ms=100") as server:
        server.stats_file = folder / "steps.jsonl"
        yield server


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("model", ["drafted", "overlap"])
def test_a_text_is_the_same_in_fewer_steps(server, model, options):
    options = {"max_tokens": 60, "return_cumulative_logprob": True, **options}
    plain = generate_stream(server, "plain", PROMPT, **options)
    answer = generate_stream(server, model, PROMPT, return_perf_metrics=True, **options)
    assert (answer.text, answer.ids, answer.finish_reason) == (plain.text, plain.ids, plain.finish_reason)
    assert answer.last.tensors["cumulative_logprob"] == plain.last.tensors["cumulative_logprob"]
    rate, accepted, drafted = (answer.last.tensors[name] for name in FIGURES)
    assert rate == pytest.approx(accepted / drafted)
    # The draft model does not know the guide.
    assert accepted <= drafted and (accepted > 5 or "guided_regex" in options)
    # Each response has the tokens of one step.
    assert len([response for response in answer.responses if response.ids]) == len(plain.ids) - accepted


def test_greedy_drafts_of_the_model_itself_are_right(server):
    answer = generate_stream(server, "drafted", PROMPT, max_tokens=43, ignore_eos=True, return_perf_metrics=True)
    # The first token comes with the prompt, followed by seven per step.
    assert [answer.last.tensors[name] for name in FIGURES] == [1.0, 36, 36]


def test_a_full_batch_with_pauses_gets_what_each_request_gets_alone(server):
    def request(index):
        options = {"max_tokens": 50 + index, "ignore_eos": True}
        if index % 2:
            options |= {"temperature": 0.8, "seed": index}
        return (f"{PROMPT} He was {index} years old."[-60 + index :], options)

    requests = [request(index) for index in range(20)]
    plain = clients.streams(server, "plain", requests)
    for model in ("tight", "drafted", "overlap", "adaptive"):
        answers = clients.streams(server, model, requests)
        assert [answer.ids for answer in answers] == [answer.ids for answer in plain], model


def test_records_and_metrics_count_the_drafts(server):
    def count(name):
        name = f"nv_inflight_spec_decode_num_{name}_tokens"
        found = [v for (family, pairs), v in server.metrics().items() if family == name and ("model", "drafted") in pairs]
        assert len(found) == 1
        return found[0]

    def record():
        last = json.loads(server.stats_file.read_text().splitlines()[-1])
        return [last["Total Draft Tokens"], last["Total Accepted Draft Tokens"]]

    def eventually(condition, seconds=30):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    before = [count("draft"), count("accepted")]
    answer = generate_stream(server, "drafted", PROMPT, max_tokens=43, ignore_eos=True, return_perf_metrics=True)
    _, accepted, drafted = (answer.last.tensors[name] for name in FIGURES)
    eventually(lambda: [count("draft"), count("accepted")] == [before[0] + drafted, before[1] + accepted])
    eventually(lambda: record() == [count("draft"), count("accepted")])
