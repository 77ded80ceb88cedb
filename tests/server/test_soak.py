"""`cargo xtask soak`: its comparisons and checks, its coverage of the options, and a short run."""

import json
import pathlib
import socket
import subprocess
import sys

import numpy
import pytest

pytestmark = pytest.mark.complete

SOAK = pathlib.Path(__file__).resolve().parents[2] / "tools" / "soak"
sys.path.insert(0, str(SOAK))

import answers  # noqa: E402  the soak is a script
import bodies  # noqa: E402
import contents  # noqa: E402
import steps  # noqa: E402
import watch  # noqa: E402
import whole  # noqa: E402
from transport import NotEndedOnce  # noqa: E402


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


USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def chunk(index, *, finish_reason=None, logprobs=None, **more):
    """A chunk of a stream with one choice."""
    return {"usage": None, "choices": [{"index": index, "finish_reason": finish_reason, "logprobs": logprobs, **more}]}


def test_chunks_of_a_stream_make_the_whole_answer():
    def call(**more):
        return {"tool_calls": [{"index": 0, **more}]}

    chunks = [
        chunk(1, delta={"role": "assistant", "content": ""}),
        chunk(0, delta={"role": "assistant", "content": "A"}, logprobs={"content": [1], "refusal": None}),
        chunk(0, delta={"content": "B"}, logprobs={"content": [2], "refusal": None}, finish_reason="stop"),
        chunk(1, delta=call(id="7", type="function", function={"name": "tell", "arguments": "{"})),
        chunk(1, delta=call(function={"arguments": "}"}), finish_reason="tool_calls"),
        {"usage": USAGE, "choices": []},
    ]
    called = {"id": "8", "type": "function", "function": {"name": "tell", "arguments": "{}"}}
    choices = [
        {"index": 1, "message": {"role": "assistant", "content": None, "refusal": None, "tool_calls": [called]}, "finish_reason": "tool_calls"},
        {"index": 0, "message": {"role": "assistant", "content": "AB", "refusal": None}, "finish_reason": "stop",
         "logprobs": {"content": [1, 2], "refusal": None}},
    ]
    expected = whole.whole({"choices": choices, "usage": USAGE})
    assert whole.joined(chunks) == expected
    assert whole.unlike(expected, whole.joined(chunks)) is None


def test_a_choice_that_ends_twice_or_not_at_all_is_a_fault():
    end = chunk(0, text="a", finish_reason="length")
    for chunks in ([end, end], [end, chunk(0, text="b")], [end, chunk(1, text="b")]):
        with pytest.raises(NotEndedOnce):
            whole.joined(chunks)
    cut_off = whole.joined([chunk(0, text="a"), chunk(1, text="b")], cut_off=True)
    assert [choice["text"] for choice in cut_off["choices"]] == ["a", "b"]


def test_differences_of_whole_answers_are_found():
    def answer(text, reason="length", num_tokens=4):
        choices = [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
        return whole.whole({"choices": choices, "usage": {**USAGE, "completion_tokens": num_tokens}})

    expected = answer("fox")
    assert whole.unlike(expected, answer("fox")) is None
    for found in (answer("fix"), answer("fox", "stop"), answer("fox", num_tokens=5), {"error": "no"}):
        assert whole.unlike(expected, found) is not None
    assert whole.unlike(expected, answer("fo"), cut_off=True) is None
    assert "not a prefix" in whole.unlike(expected, answer("fi"), cut_off=True)
    assert whole.unlike({"error": "no"}, {"error": "never"}) is not None


def test_bodies_are_the_same_for_a_seed_and_have_every_kind():
    made = bodies.bodies(1, len(bodies.KINDS))
    assert made == bodies.bodies(1, len(bodies.KINDS)) != bodies.bodies(2, len(bodies.KINDS))
    paths = {body.path for body in bodies.bodies(1, 100)}
    assert paths == {bodies.COMPLETIONS, bodies.CHAT}
    assert {body.guide for body in bodies.costly_bodies(1)} == set(bodies.GUIDES)
    named = bodies.Body(bodies.CHAT, '{"n": 2}', adapter="5")
    assert named.of("m", stream=True) == {"model": "m:5", "n": 2, "stream": True}


def test_counts_connections_that_somebody_holds():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert watch.connections(port) == 0
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            assert watch.connections(port) == 1
        assert watch.connections(port) == 0


def test_a_step_that_was_held_is_found_once(tmp_path):
    def record(number, step_s, model_s):
        return json.dumps({"Iteration Counter": number, "Step Duration (us)": step_s * 1e6, "Model Duration (us)": model_s * 1e6})

    (tmp_path / "m.jsonl").write_text("\n".join([record(1, 9, 8.9), record(2, 7, 0.5)]) + "\n")
    found = steps.Steps(tmp_path)
    assert found.look() == ["step 2 of m took 6.5 s besides the model"]
    assert found.look() == []
    assert found.figures() == {"m": {"steps": 2, "besides_model_ms_mean": 3300.0, "besides_model_ms_max": 6500.0}}


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
    for how in ["whole", "stream", "one connection", "neighbour", "costly guide", "slow reader", "leaves"]:
        assert counts[f"front, {how}: requests"] > 0, how
    assert found["slowest_token_s"] > 0
    assert counts["models loaded over themselves"] + counts["models unloaded and loaded"] > 0
    assert counts["rounds in which the gauges showed work"] > 0


def test_clients_that_leave_the_front_leave_nothing_behind():
    command = [sys.executable, SOAK / "leaving.py", "--leaving-clients=1000", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["driver"] for report in reports] == ["iterative", "queued"]
    for report in reports:
        assert report["findings"] == [] and report["servers"] == 1, report
        assert report["counts"]["clients that left"] == 1000 and report["counts"]["clients that stayed"] > 0
    assert done.returncode == 0
