"""Speculation: the same answers in fewer steps, whatever the draft tokens are."""

import json
import time

import numpy
import pytest

from harness import clients
from harness.clients import Refused, generate, generate_stream
from harness.repository import STORIES, TIGHT

pytestmark = pytest.mark.also_on_gpu
PROMPT = "Once upon a time, there was a brave fox named Finn."
FIGURES = ["acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"]
# As many drafts as there may be, so that their number does not depend on what steps of this machine cost.
ALL = {"enable_adaptive_drafts": "false"}
LOOKUP = {"speculation": "prompt_lookup", "max_draft_tokens": 6, **ALL}
GIVEN = {"speculation": "draft_input_ids", **ALL}
WITH_TENSOR = """
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "draft_input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }
]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory, deployment):
    add_model, add_synthetic = deployment.add_model, deployment.add_synthetic
    folder = tmp_path_factory.mktemp("speculation")
    repository = folder / "repository"
    add_model(repository, "plain", checkpoint=STORIES)
    stats = {"stats_file": folder / "steps.jsonl"}
    add_model(repository, "lookup", {**LOOKUP, **stats}, checkpoint=STORIES)
    add_model(repository, "given", {**GIVEN, "max_draft_tokens": 4}, checkpoint=STORIES)
    add_model(repository, "adaptive", {"speculation": "prompt_lookup", "max_draft_tokens": 6}, checkpoint=STORIES)
    add_model(repository, "tensor", GIVEN, fields=WITH_TENSOR, checkpoint=STORIES)
    add_model(repository, "tight", {**LOOKUP, **TIGHT}, checkpoint=STORIES)
    add_model(repository, "overlap", {**LOOKUP, "enable_trt_overlap": "true"}, checkpoint=STORIES)
    add_synthetic(repository, "synthetic", {"max_seq_len": 512})
    add_synthetic(repository, "synthetic_given", {**GIVEN, "max_seq_len": 512})
    with deployment.server(repository, "--metrics-interval-ms=100") as server:
        server.stats_file = folder / "steps.jsonl"
        yield server


def eventually(condition, seconds=10):
    """Waits for records and metrics, which are written asynchronously."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def figures(server, model, prompt=PROMPT, **options):
    """The streamed answer, and its acceptance rate, accepted drafts and drafts."""
    answer = generate_stream(server, model, prompt, return_perf_metrics=True, **options)
    rate, accepted, drafted = (answer.last.tensors[name] for name in FIGURES)
    assert rate == pytest.approx(accepted / drafted if drafted else 0.0)
    return answer, accepted, drafted


@pytest.fixture(scope="module")
def again(server):
    """A story whose beginning is repeated, so that its continuation can be predicted."""
    return f"{PROMPT}{generate_stream(server, 'plain', PROMPT, max_tokens=90).text}\n\n{PROMPT}"


OPTIONS = {
    "greedy": {},
    "sampled": {"temperature": 0.3, "seed": 3},
    "penalised": {"temperature": 0.3, "seed": 4, "repetition_penalty": 1.02, "presence_penalty": 0.2},
    "guided": {"guided_regex": "(the red fox, the brown bear, ){4,9}"},
    "biased": {"no_repeat_ngram_size": 30, "min_tokens": 50, "logit_bias": '{"5": -1.5}'},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("model", ["lookup", "overlap"])
def test_repetitive_text_is_the_same_in_fewer_steps(server, again, model, options):
    options = {"max_tokens": 60, "return_cumulative_logprob": True, **options}
    plain = generate_stream(server, "plain", again, **options)
    answer, accepted, drafted = figures(server, model, again, **options)
    assert (answer.text, answer.ids, answer.finish_reason) == (plain.text, plain.ids, plain.finish_reason)
    assert answer.last.tensors["cumulative_logprob"] == plain.last.tensors["cumulative_logprob"]
    assert 5 < accepted <= drafted
    # Each response has the tokens of one step.
    assert len([response for response in answer.responses if response.ids]) == len(plain.ids) - accepted
    whole = generate(server, model, again, **options, exclude_input_in_output=True)
    assert (whole.text, whole.ids) == (plain.text, plain.ids)


def test_a_clients_draft_is_verified_and_never_changes_the_answer(server):
    plain = generate_stream(server, "plain", PROMPT, max_tokens=41)
    ids = plain.ids
    assert len(ids) == 41
    # The first token comes with the prompt, followed by five per step.
    answer, *counts = figures(server, "given", max_tokens=41, draft_input_ids=json.dumps(ids))
    assert (answer.ids, counts) == (ids, [32, 32])
    # Too long: the rest is unused.
    too_long = json.dumps(ids + ids)
    answer, *counts = figures(server, "given", max_tokens=41, draft_input_ids=too_long)
    assert (answer.ids, counts) == (ids, [32, 32])
    # Wrong from the first token, or from the seventh: the rest is ignored.
    for num_right, expected in ((0, [0, 0]), (6, [4, 8])):
        wrong = json.dumps(ids[:num_right] + [(id + 1) % 1536 for id in ids[num_right:]])
        answer, *counts = figures(server, "given", max_tokens=41, draft_input_ids=wrong)
        assert (answer.ids, counts) == (ids, expected)
    # Fewer per step, or none.
    for num_draft_tokens, expected in ((1, [20, 20]), (0, [0, 0]), (100, [32, 32])):
        options = {"draft_input_ids": json.dumps(ids), "num_draft_tokens": num_draft_tokens}
        answer, *counts = figures(server, "given", max_tokens=41, **options)
        assert (answer.ids, counts) == (ids, expected)
    # Without drafts there are no figures.
    answer, *counts = figures(server, "plain", max_tokens=41, draft_input_ids=json.dumps(ids))
    assert (answer.ids, counts) == (ids, [0, 0])


def test_drafts_can_be_a_tensor(server):
    ids = generate(server, "plain", PROMPT, max_tokens=16, exclude_input_in_output=True).ids
    inputs = [
        clients.tensor("text_input", numpy.array([[PROMPT.encode()]], dtype=object), "BYTES"),
        clients.tensor("max_tokens", numpy.array([[16]], dtype=numpy.int32), "INT32"),
        clients.tensor("draft_input_ids", numpy.array([ids], dtype=numpy.int32), "INT32"),
    ]
    answer = clients.streams(server, "tensor", [(inputs, {"return_perf_metrics": True})])[0]
    assert answer.ids == ids
    assert [answer.last.tensors[name].item() for name in FIGURES] == [1.0, 12, 12]


@pytest.mark.parametrize(
    "ids, message",
    [
        ("[5, 1536]", "'draft_input_ids': token 1536 is not in the vocabulary, 0 to 1535"),
        ("[5, -1]", "'draft_input_ids': .* is not a JSON list of at most 65536 token ids"),
        ("[5, 1.5]", "is not a JSON list"),
        ('"fox"', "is not a JSON list"),
        (json.dumps([5] * 65537), "is not a JSON list of at most 65536"),
    ],
)
def test_bad_draft_ids_are_rejected(server, ids, message):
    for model in ("given", "plain"):
        with pytest.raises(Refused, match=message):
            generate(server, model, PROMPT, max_tokens=4, draft_input_ids=ids)
    with pytest.raises(Refused, match="'num_draft_tokens'"):
        generate(server, "given", PROMPT, max_tokens=4, num_draft_tokens=-1)


def test_nothing_follows_a_stop_word_among_the_drafts(server):
    ids = generate(server, "plain", PROMPT, max_tokens=60, exclude_input_in_output=True).ids
    text = generate(server, "plain", PROMPT, max_tokens=60, exclude_input_in_output=True).text
    for start in range(20, 60, 7):
        options = {"max_tokens": 60, "stop": json.dumps([text[start : start + 4]])}
        options |= {"return_log_probs": True, "return_stop_reason": True}
        plain = generate_stream(server, "plain", PROMPT, **options)
        answer, accepted, _ = figures(server, "given", draft_input_ids=json.dumps(ids), **options)
        assert (answer.text, answer.ids) == (plain.text, plain.ids)
        assert plain.finish_reason == answer.finish_reason == "stop_words"
        for name in ("cum_log_probs", "stop_reason"):
            assert answer.last.tensors[name] == plain.last.tensors[name], name
        assert accepted > 0
    for end_id in (ids[9], ids[17]):
        plain = generate_stream(server, "plain", PROMPT, max_tokens=60, end_id=end_id)
        answer, *_ = figures(server, "given", max_tokens=60, end_id=end_id, draft_input_ids=json.dumps(ids))
        assert (plain.ids, answer.finish_reason) == (answer.ids, "end_id")


def test_a_full_batch_with_pauses_gets_what_each_request_gets_alone(server, deployment, again):
    def request(index):
        options = {"max_tokens": 50 + index, "ignore_eos": True}
        if index % 2:
            options |= {"temperature": 0.8, "seed": index}
        return (again[-40 - 20 * index :] if index % 3 else PROMPT, options)

    requests = [request(index) for index in range(8 if deployment.on_gpu else 20)]
    plain = clients.streams(server, "plain", requests)
    for model in ("tight", "lookup", "overlap", "adaptive"):
        answers = clients.streams(server, model, requests)
        assert [answer.ids for answer in answers] == [answer.ids for answer in plain], model


def test_the_synthetic_runner_verifies_drafts_too(server):
    prompt = [5, 6, 7]
    plain = generate(server, "synthetic", prompt, max_tokens=21)
    answer, *counts = figures(server, "synthetic_given", prompt, max_tokens=21, draft_input_ids=json.dumps(plain.ids[3:]))
    assert (prompt + answer.ids, counts) == (plain.ids, [16, 16])


def test_records_and_metrics_count_the_drafts(server, again):
    def count(name):
        name = f"nv_inflight_spec_decode_num_{name}_tokens"
        found = [v for (family, pairs), v in server.metrics().items() if family == name and ("model", "lookup") in pairs]
        assert len(found) == 1
        return found[0]

    def record():
        last = json.loads(server.stats_file.read_text().splitlines()[-1])
        return [last["Total Draft Tokens"], last["Total Accepted Draft Tokens"]]

    before = [count("draft"), count("accepted")]
    _, accepted, drafted = figures(server, "lookup", again, max_tokens=50)
    assert accepted > 0
    eventually(lambda: [count("draft"), count("accepted")] == [before[0] + drafted, before[1] + accepted])
    eventually(lambda: record() == [count("draft"), count("accepted")])
