"""`cargo xtask soak`: its comparisons and checks, its coverage of the options, and a short run."""

import json
import pathlib
import subprocess
import sys

import numpy
import pytest

pytestmark = pytest.mark.complete

SOAK = pathlib.Path(__file__).resolve().parents[2] / "tools" / "soak"
sys.path.insert(0, str(SOAK))

import answers  # noqa: E402  the soak is a script
import contents  # noqa: E402
import watch  # noqa: E402


def arrays(text, ids, counts, reasons):
    """A response over gRPC, with the batch dimension."""
    return {
        "text_output": numpy.array([[t.encode() for t in text]], dtype=object),
        "output_ids": numpy.array([ids], dtype=numpy.int32),
        "num_output_tokens": numpy.array([counts], dtype=numpy.int32),
        "finish_reason": numpy.array([[r.encode() for r in reasons]], dtype=object),
    }


def test_a_stream_and_a_whole_answer_with_several_rows_compare_equal():
    stream = [
        arrays(["a", "x"], [[1], [5]], [1, 1], ["", "length"]),
        arrays(["b", ""], [[2], [0]], [2, 1], ["length", "length"]),
    ]
    whole = [
        {
            "text_output": ["ab", "x"],
            "output_ids": [1, 2, 5, 0],
            "num_output_tokens": [2, 1],
            "finish_reason": ["length", "length"],
        }
    ]
    expected = {"text": ["ab", "x"], "ids": [[1, 2], [5]], "reason": [["length"], ["length"]]}
    assert answers.answer_of(stream) == answers.answer_of(whole) == expected
    assert answers.answer_of(stream, has_beams=True)["text"] == ["b", ""]


def test_an_answer_that_ends_twice_differs_from_one_that_ends_once():
    last = arrays(["a"], [[1]], [1], ["length"])
    nothing = arrays([""], [[]], [1], ["length"])
    once, twice = answers.answer_of([last]), answers.answer_of([last, nothing])
    assert answers.difference(once, twice).startswith("reason: alone")
    assert answers.difference(once, once) is None


@pytest.mark.parametrize(
    "found, words",
    [
        ({"text": ["ab"], "ids": [[1, 3]]}, "ids: alone"),
        ({"text": ["ac"], "ids": [[1, 2]]}, "text: alone"),
        ({"error": "no"}, "here {'error': 'no'}"),
    ],
)
def test_differences_name_the_field(found, words):
    assert words in answers.difference({"text": ["ab"], "ids": [[1, 2]]}, found)


def test_a_cancelled_answer_must_be_a_prefix():
    whole = {"text": ["ab"], "ids": [[1, 2]]}
    assert answers.difference(whole, {"text": ["a"], "ids": [[1]]}, cut_off=True) is None
    assert "not a prefix" in answers.difference(whole, {"text": ["b"], "ids": [[2]]}, cut_off=True)
    assert "here {'error'" in answers.difference(whole, {"error": "lost"}, cut_off=True)


def test_reports_gauges_that_are_not_zero_and_blocks_that_are_not_free():
    def samples(active, used, free):
        kinds = {
            (watch.REQUESTS, "request_type", "active"): active,
            (watch.REQUESTS, "request_type", "max"): 64,
            (watch.BLOCKS, "kv_cache_block_type", "used"): used,
            (watch.BLOCKS, "kv_cache_block_type", "free"): free,
            (watch.BLOCKS, "kv_cache_block_type", "max"): 10,
        }
        return {(family, ((label, kind), ("model", "m"))): n for (family, label, kind), n in kinds.items()}

    assert watch.not_idle(samples(0, 0, 10)) == []
    assert len(watch.not_idle(samples(1, 0, 10))) == 1
    assert len(watch.not_idle(samples(0, 2, 8))) == 2
    assert len(watch.not_idle(samples(0, 0, 9))) == 1


def test_reports_continuous_growth_but_not_initial_growth():
    def series(kib, threads):
        return [{"anonymous_kib": kib(n), "threads": threads(n), "files": 60} for n in range(12)]

    assert watch.growth(series(lambda n: 100_000 + min(n, 3) * 50_000, lambda n: 70)) == []
    assert watch.growth(series(lambda n: 100_000 + n * 8_000, lambda n: 70))[0].startswith("anonymous_kib grew")
    assert watch.growth(series(lambda n: 100_000, lambda n: 70 + 2 * n))[0].startswith("threads grew")


def test_a_death_is_tritons_only_after_cancelled_calls_and_without_our_functions_in_the_trace():
    trace = "all was well\nSignal (11) received.\n 0# ModelStreamInferHandler::StreamInferResponseComplete"
    assert watch.death(trace, 1)[0]
    assert not watch.death(trace, 0)[0]
    assert not watch.death(trace + "\n 1# 0x0 in libtriton_inflight.so", 1)[0]
    assert "all was well" not in watch.death(trace, 1)[1]


def test_every_error_line_of_the_log_needs_a_cause():
    def unstarted(model):
        return (
            'E1122 20:08:30.5 1 sequence_utils.cc:54] "Invalid argument: inference request for sequence 7 to model '
            f"'{model}' must specify the START flag on the first request of the sequence\""
        )

    lines = [
        'E1122 18:11:00.1 1 server.cc:243] "CudaDriverHelper has not been initialized."',
        'I1122 18:11:00.2 1 instance.rs:41] "all is well"',
        unstarted("a"),
        unstarted("b"),
        unstarted("a"),
        'E1122 20:09:00.1 1 model.cc:9] "something else"',
        "thread 'inflight-runner' panicked at src/lib.rs",
        "W1122 20:09:01.1 1 sequence_batch_scheduler.cc:763] \"sequence 7 for model 'a' has a conflict\"",
        "W1122 20:09:01.2 1 sequence_batch_scheduler.cc:763] \"sequence 8 for model 'a' has a conflict\"",
    ]
    expired = {"a": 1, "b": 2}
    causes = {"requests whose time was over in Triton's backlog": 2, "no CUDA driver": 1}
    assert watch.errors("\n".join(lines), expired, 0) == (causes, lines[4:])
    known, unknown = watch.errors("\n".join(lines), expired, 1)
    assert known == {**causes, watch.FREED_AGAIN: 1}
    assert unknown == lines[4:7] + lines[8:]


def test_every_documented_option_is_among_what_is_asked():
    asked = contents.names_of(contents.pool(1, 3000)) | contents.BY_CLIENTS
    documented = {name for names in contents.documented_options() for name in names}
    assert documented - asked == set()


def test_the_same_seed_gives_the_same_requests():
    assert contents.pool(1, 100) == contents.pool(1, 100) != contents.pool(2, 100)


def test_a_short_run_tries_everything_and_finds_nothing():
    command = [sys.executable, SOAK / "soak.py", "--minutes=0.5", "--round=10", "--cancel-every=3600", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    assert found["findings"] == [] and done.returncode == 0, found
    counts = found["counts"]
    for how in ["/generate", "/generate_stream", "/infer", "gRPC ModelInfer", "gRPC stream", "gRPC stream of several"]:
        assert counts[f"{how}: requests"] > 0, how
    for name in ["SIGSTOP and SIGCONT", "HTTP nonsense: refused", "gRPC nonsense: refused", "tokens compared"]:
        assert counts[name] > 0, name
    assert counts["models loaded over themselves"] + counts["models unloaded and loaded"] > 0
    assert counts["rounds in which the gauges showed work"] > 0
