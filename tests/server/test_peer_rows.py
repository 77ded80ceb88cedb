"""`bench peers`: combining its rounds, without the engines themselves."""

import json
import pathlib
import random
import sys
import types

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benches/drivers"))

import peers  # noqa: E402  it is in that folder
from engines import in_server, llama_cpp, setup  # noqa: E402
from engines.loads import Load, argument, rates  # noqa: E402
from engines.programs import moments  # noqa: E402

pytestmark = pytest.mark.complete

PROMPT, GENERATION = LOADS = [Load(1, 512, 1), Load(8, 128, 128)]


def rounds(*rates):
    return [{PROMPT: 10 * rate, GENERATION: rate} for rate in rates]


def peer(name, measured):
    """An engine that measures these rounds, and then fails."""
    left = iter(measured)

    def measure(loads):
        assert loads is LOADS
        rates = next(left, None)
        if rates is None:
            raise setup.Unavailable("it ended")
        return rates

    return types.SimpleNamespace(name=name, precision="f16 weights", measure=measure)


def printed(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_row_has_the_medians_and_how_many_times_faster_ours_is(capsys):
    contest = peers.Contest([peer("other", rounds(80, 20, 100))], lambda _: next(ours), True)
    ours = iter(rounds(100, 120, 300))
    contest.run(3, LOADS, "bf16")
    prompt, generation = printed(capsys)
    assert prompt == {
        "row": "prompt",
        "peer": "other",
        "precision": "bf16",
        "peer_precision": "f16 weights",
        "concurrency": 1,
        "input": 512,
        "output": 1,
        "prompt_tokens_per_s": 1200,
        "peer_prompt_tokens_per_s": 800,
        "ratio": 1.5,
        "rounds": 3,
    }
    assert generation["concurrency"] == 8
    assert generation["output_tokens_per_s"] == 120
    assert generation["peer_output_tokens_per_s"] == 80


def test_a_failed_peer_is_named_with_the_reason_and_the_others_continue(capsys):
    contestants = [peer("weak", rounds(1)), peer("strong", rounds(50, 50))]
    peers.Contest(contestants, lambda _: rounds(100)[0], True).run(2, LOADS, "bf16")
    absent, *found = printed(capsys)
    assert absent == {"row": "absent", "peer": "weak", "precision": "bf16", "reason": "it ended"}
    assert {row["peer"] for row in found} == {"strong"}
    assert [row["ratio"] for row in found] == [2, 2]


def test_without_a_period_in_which_all_generate_there_is_no_ratio(capsys):
    none = [{PROMPT: 1, GENERATION: None}]
    peers.Contest([peer("other", none)], lambda _: rounds(100)[0], True).run(1, LOADS, "bf16")
    prompt, generation = printed(capsys)
    assert prompt["ratio"] == 1000
    assert "ratio" not in generation and generation["rounds"] == 1


def test_tokens_count_only_while_all_generate():
    # The second request's prompt is done at 3; the first one ends at 6.
    assert moments.rate(100, [[1, 3, 4, 5, 6], [3, 4, 5, 6, 8]]) == 6 / 3
    assert moments.rate(100, [[2], [5]]) == 200 / 5
    assert moments.rate(100, [[1, 2], [5, 6]]) is None


def test_loads_are_passed_to_a_program_and_its_rates_are_read():
    assert argument(LOADS) == "--loads=1x512x1,8x128x128"
    assert moments.loads("1x512x1,8x128x128") == {"1x512x1": [1, 512, 1], "8x128x128": [8, 128, 128]}
    printed = [{"load": "8x128x128", "rate": 2.0}, {"load": "1x512x1", "rate": 1.0}]
    assert rates(LOADS, printed) == {PROMPT: 1.0, GENERATION: 2.0}


def test_long_contexts_are_limited_to_the_models_positions(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1000}')
    options = types.SimpleNamespace(model=tmp_path, long_context=4096)
    assert peers.long_context(options) == Load(8, 904, 96)
    options.long_context = 512
    assert peers.long_context(options) == Load(8, 512, 96)
    options.long_context = 0
    assert peers.long_context(options) is None


def test_llama_cpp_is_run_for_each_load_and_its_rates_are_read():
    asked = []

    def run(program, *arguments):
        asked.append([program, *arguments])
        row = {"llama-bench": {"avg_ts": 50.5}, "llama-batched-bench": {"speed_tg": 20.5, "speed_pp": 7.0}}
        return f"a line of text\n{json.dumps(row[program])}\n"

    engine = object.__new__(llama_cpp.LlamaCpp)
    engine.programs, engine.file = types.SimpleNamespace(run=run), pathlib.Path("/model.gguf")
    assert engine.measure(LOADS) == {PROMPT: 50.5, GENERATION: 20.5}
    prompt, generation = asked
    assert prompt[0] == "llama-bench" and ("-p", 512) in zip(prompt, prompt[1:])
    pairs = list(zip(generation, generation[1:]))
    assert all(pair in pairs for pair in (("-npl", 8), ("-npp", 128), ("-ntg", 128), ("-c", 8 * 256)))


def test_no_round_in_the_server_reuses_an_earlier_prompt():
    server = object.__new__(in_server.InServer)
    server.rng = random.Random(0)
    prompts = [*server.prompts(3, 8), *server.prompts(3, 8)]
    assert len({tuple(prompt) for prompt in prompts}) == 6 and {len(prompt) for prompt in prompts} == {8}


def test_a_failed_program_is_reported_with_the_end_of_its_output():
    with pytest.raises(setup.Unavailable, match="exited with 1: no such thing"):
        setup.run(sys.executable, "-c", "raise SystemExit('no such thing')")
    with pytest.raises(setup.Unavailable, match="not-a-program"):
        setup.run("not-a-program")
    with pytest.raises(setup.Unavailable, match="did not finish within 0.2 s"):
        setup.run(sys.executable, "-c", "import time; time.sleep(60)", timeout=0.2)


def test_a_folder_is_made_once_and_again_after_a_failure_or_a_changed_stamp(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "FOLDER", tmp_path)
    made = []

    def fill(folder):
        assert list(folder.iterdir()) == []
        (folder / "half").touch()
        made.append(folder)

    def fail(folder):
        fill(folder)
        raise setup.Unavailable("no network")

    with pytest.raises(setup.Unavailable):
        setup.made("thing", "1", fail)
    for stamp in ("1", "1", "2"):
        setup.made("thing", stamp, fill)
    assert len(made) == 3
