"""Models with recurrent states in a real server: many requests at once, some of them cancelled and some paused, get the
answers that they get alone, also from several processes; what such models cannot have is refused at load."""

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


def test_a_conversation_returns_behind_its_last_turn(repository, tmp_path):
    """Three turns, beside another conversation that begins with the same system prompt; with drafts and without."""
    reusing = {"num_threads": 2, "tokens_per_block": 8, "max_seq_len": MAX_SEQ_LEN}
    system = [(11 * at) % 150 + 3 for at in range(32)]
    for name in NAMES:
        checkpoint = {"gpt_model_path": FIXTURES / name, **reusing}
        add_model(repository, f"{name}-alone", {**checkpoint, "enable_kv_cache_reuse": "false"})
        add_model(repository, name, {**checkpoint, "stats_file": tmp_path / f"{name}.jsonl"})
        drafts = {"speculation": "prompt_lookup", "enable_adaptive_drafts": "false"}
        add_model(repository, f"{name}-drafts", {**checkpoint, **drafts})
    with Server(repository) as server:
        for name in NAMES:
            texts = {model: [system, system] for model in (f"{name}-alone", name, f"{name}-drafts")}
            for turn in range(3):
                for model, prompts in texts.items():
                    asked = [[(7 * at + 5 * turn + 3 * own) % 150 + 3 for at in range(6)] for own in range(2)]
                    prompts = [prompt + question for prompt, question in zip(prompts, asked, strict=True)]
                    options = {"max_tokens": 12, "ignore_eos": True}
                    answers = streams(server, model, [(prompt, options) for prompt in prompts])
                    texts[model] = [prompt + answer.ids for prompt, answer in zip(prompts, answers, strict=True)]
            alone, *others = texts.values()
            assert others == [alone, alone], name
            records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
            # The second and the third turn of both; and the first turn of the one that starts later, if it does.
            num_restored = records[-1]["Restored states"]
            assert num_restored in (4, 5), name
            assert 0 < records[-1]["Used state snapshots"] <= records[-1]["Max state snapshots"], name
            samples = server.metrics().items()
            restored = {("model", name), ("state_snapshot_type", "restored")}
            values = [v for (f, labels), v in samples if f == "nv_inflight_state_snapshot_metrics" and restored <= set(labels)]
            assert values == [num_restored], name


def test_states_return_from_host_memory_also_those_of_several_sequences(repository, tmp_path):
    """More conversations than snapshots of the device, twice, some with several sequences that begin alike."""
    few = {"max_state_snapshots": 2, "kv_cache_host_memory_bytes": 1 << 20, "tokens_per_block": 8}
    names = ["qwen3-5", "mamba"]
    for name in names:
        checkpoint = {"gpt_model_path": FIXTURES / name, "num_threads": 2, "max_seq_len": MAX_SEQ_LEN}
        add_model(repository, f"{name}-alone", {**checkpoint, "enable_kv_cache_reuse": "false"})
        add_model(repository, name, {**checkpoint, **few, "stats_file": tmp_path / f"{name}.jsonl"})
    several = {"n": 3, "temperature": 1.0, "stream": False}
    asked = []
    for index in range(6):
        prompt = [(7 * at + 5 * index) % 100 + 3 for at in range(20 + index)]
        options = {"max_tokens": 6, "ignore_eos": True, "return_log_probs": True, "seed": index}
        asked.append((prompt, {**options, **(several if index % 2 else {})}))
    with Server(repository) as server:

        def answers(model):
            served = [streams(server, model, [request])[0] for request in asked]
            return [[described(sequence) for sequence in answer.sequences()] for answer in served]

        for name in names:
            expected = answers(f"{name}-alone")
            assert len({str(sequence) for sequence in expected[1]}) == 3, name
            assert [answers(name), answers(name)] == [expected, expected], name
            last = json.loads((tmp_path / f"{name}.jsonl").read_text().splitlines()[-1])
            assert last["Max state snapshots"] == 2 and last["Used state slots"] <= last["Max state slots"], name
            assert 0 < last["Used host state snapshots"] <= last["Max host state snapshots"], name
            # Each conversation that returns.
            assert last["Onboarded states"] >= 6 <= last["Offloaded states"], name
            moved = {("model", name), ("state_snapshot_type", "onboarded")}
            samples = server.metrics().items()
            values = [v for (f, labels), v in samples if f == "nv_inflight_state_snapshot_metrics" and moved <= set(labels)]
            assert values == [last["Onboarded states"]], name


def test_ranks_stages_and_beams_give_the_answers_of_one_process(repository):
    common = {"gpt_model_path": FIXTURES / "qwen3-5", "max_seq_len": MAX_SEQ_LEN, "num_threads": 1, "max_beam_width": 3}
    ranks = {"rank_timeout_seconds": 100, "max_rank_restarts": 0}
    tight = {**TIGHT, "max_seq_len": MAX_SEQ_LEN, "max_tokens_in_paged_kv_cache": 4 * MAX_SEQ_LEN}
    # The model has 3 key heads, 6 query heads and 4 value heads.
    variants = {
        "alone": {"deterministic": "true"},
        "ranks": {**ranks, "tensor_parallel_size": 2},
        "tight": {**ranks, **tight, "tensor_parallel_size": 2},
        "whole": {},
        "stages": {**ranks, "pipeline_parallel_size": 2},
    }
    for name, parameters in variants.items():
        add_model(repository, name, {**common, **parameters})
    asked = list(requests())
    beams = {"beam_width": 3, "max_tokens": 20, "stream": False, "return_log_probs": True}
    asked += [(prompt, beams) for prompt, _ in asked[:2]]
    with Server(repository) as server:

        def sequences(model, asked):
            return [[described(sequence) for sequence in answer.sequences()] for answer in streams(server, model, asked)]

        for one, others in {"alone": ["ranks", "tight"], "whole": ["stages"]}.items():
            expected = [sequences(one, [request])[0] for request in asked]
            assert len({str(beam) for beam in expected[-1]}) == 3
            for other in others:
                assert sequences(other, 2 * asked) == 2 * expected, other


def test_states_whose_heads_have_one_norm_are_refused_on_ranks(repository):
    add_model(repository, "ranks", {"gpt_model_path": FIXTURES / "granite4-dense", "tensor_parallel_size": 2})
    with Server(repository, "--model-control-mode=explicit") as server:
        assert "6 have one norm of their results; use fewer ranks" in server.load("ranks")
