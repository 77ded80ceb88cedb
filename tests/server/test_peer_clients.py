"""The clients shipped with TensorRT-LLM's and vLLM's backends, unchanged, against our models.

They are not part of this project: the tests look for them in the folder `shared/clients` beside it, or in the folder
named by PEER_CLIENTS, and are skipped if they are missing.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from harness.clients import generate, generate_stream
from harness.repository import FULL_ANSWER, ROOT, STORIES, add_model
from harness.server import Server

CLIENTS = pathlib.Path(os.environ.get("PEER_CLIENTS", ROOT.parent / "shared" / "clients"))
TENSORRT_LLM = CLIENTS / "tensorrtllm_backend" / "inflight_batcher_llm" / "client"
STOCK = CLIENTS / "tensorrtllm_backend" / "all_models" / "inflight_batcher_llm" / "tensorrt_llm" / "config.pbtxt"
VLLM = CLIENTS / "vllm_backend"

pytestmark = [
    pytest.mark.complete,
    pytest.mark.skipif(
        not CLIENTS.is_dir(),
        reason=f"the clients of the other backends are not in {CLIENTS}; PEER_CLIENTS may name their folder",
    ),
]

PROMPT = "Once upon a time, there was a brave fox named Finn."
# Values for the stock config's placeholders: values of its documentation, or values that disable a feature.
FILLED = {
    "triton_max_batch_size": "8",
    "max_queue_delay_microseconds": "0",
    "max_queue_size": "0",
    "encoder_input_features_data_type": "TYPE_FP16",
    "logits_datatype": "TYPE_FP32",
    "max_beam_width": "4",
    "batching_strategy": "inflight_fused_batching",
    "encoder_engine_dir": "",
    "max_tokens_in_paged_kv_cache": "8192",
    "max_attention_window_size": "2048",
    "sink_token_length": "0",
    "batch_scheduler_policy": "guaranteed_no_evict",
    "kv_cache_free_gpu_mem_fraction": "0.5",
    "cross_kv_cache_fraction": "0.5",
    "kv_cache_host_memory_bytes": "0",
    "kv_cache_onboard_blocks": "true",
    "exclude_input_in_output": "false",
    "cancellation_check_period_ms": "100",
    "stats_check_period_ms": "100",
    "iter_stats_max_iterations": "1000",
    "request_stats_max_iterations": "0",
    "enable_kv_cache_reuse": "true",
    "enable_trt_overlap": "false",
    "normalize_log_probs": "true",
    "enable_chunked_context": "true",
    "gpu_device_ids": "",
    "participant_ids": "",
    "num_nodes": "1",
    "lora_cache_optimal_adapter_size": "8",
    "lora_cache_max_adapter_size": "64",
    "lora_cache_gpu_memory_fraction": "0.05",
    "lora_cache_host_memory_bytes": "1073741824",
    "lora_prefetch_dir": "",
    "decoding_mode": "top_k_top_p",
    "lookahead_window_size": "7",
    "lookahead_ngram_size": "7",
    "lookahead_verification_set_size": "7",
    "medusa_choices": "",
    "eagle_choices": "",
    "gpu_weights_percent": "1.0",
    "enable_context_fmha_fp32_acc": "false",
    "multi_block_mode": "true",
    "cuda_graph_mode": "false",
    "cuda_graph_cache_size": "0",
    "speculative_decoding_fast_logits": "false",
    "guided_decoding_backend": "xgrammar",
    "xgrammar_tokenizer_info_path": "",
}


def stock_config(decoupled):
    """The stock config.pbtxt, filled in, with another backend and another checkpoint."""
    text = STOCK.read_text().replace('backend: "${triton_backend}"', 'backend: "inflight"')
    values = {**FILLED, "decoupled_mode": decoupled, "engine_dir": str(STORIES), "tokenizer_dir": str(STORIES)}
    return re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], text)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("peers") / "repository"
    add_model(repository, "plain", checkpoint=STORIES)
    add_model(repository, "vllm_opt", {"client_compatibility": "vllm"}, checkpoint=STORIES)
    ensemble = {"client_compatibility": "tensorrtllm", "max_beam_width": 4}
    add_model(repository, "ensemble", ensemble, checkpoint=STORIES)
    add_model(repository, "tensorrt_llm_bls", ensemble, fields=FULL_ANSWER, checkpoint=STORIES)
    for name, decoupled in (("tensorrt_llm", "true"), ("tensorrt_llm_full", "false")):
        version = add_model(repository, name)
        config = stock_config(decoupled).replace('name: "tensorrt_llm"', f'name: "{name}"', 1)
        (version.parent / "config.pbtxt").write_text(config)
    for name, decoupled in (("tensorrt_llm_same", "true"), ("tensorrt_llm_same_full", "false")):
        version = add_model(repository, name)
        config = stock_config(decoupled).replace('name: "tensorrt_llm"', f'name: "{name}"', 1)
        compatible = 'parameters { key: "client_compatibility" value { string_value: "tensorrtllm" } }\n'
        (version.parent / "config.pbtxt").write_text(config + compatible)
    with Server(repository, "--model-control-mode=explicit", "--load-model=*") as server:
        yield server


def run(*arguments, python=sys.executable, folder=None):
    """Runs a client to its end; returns its output."""
    command = [str(python), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "error" not in done.stdout.lower(), done.stdout
    return done.stdout


def continuation(server, **options):
    return generate(server, "plain", PROMPT, exclude_input_in_output=True, **options)


# end_to_end_grpc_client.py compares its results with the expected ones.


def end_to_end(server, expected, *arguments, model="ensemble", num_tokens=20):
    check = ["--check-outputs", "--expected-outputs", json.dumps([expected])] if expected is not None else []
    return run(
        TENSORRT_LLM / "end_to_end_grpc_client.py",
        "--url",
        server.grpc_url,
        "--model-name",
        model,
        "--prompt",
        PROMPT,
        "--output-len",
        num_tokens,
        *check,
        *arguments,
    )


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("arguments", [(), ("--exclude-input-in-output",), ("--request-id", "7")], ids=str)
def test_the_end_to_end_client_gets_a_text(server, model, arguments):
    end_to_end(server, continuation(server, max_tokens=20).text, *arguments, model=model)


def test_the_end_to_end_client_gets_a_stream(server):
    end_to_end(server, continuation(server, max_tokens=20).text, "--streaming")


@pytest.mark.parametrize("arguments", [(), ("--streaming",)], ids=str)
def test_the_end_to_end_client_gets_several_sequences(server, arguments):
    end_to_end(server, continuation(server, max_tokens=20).text, "--num-return-sequences", 2, *arguments)


def test_the_end_to_end_client_sends_words(server):
    text = continuation(server, max_tokens=40).text
    word = text.split()[4]
    stopped = continuation(server, max_tokens=40, stop_words=word).text
    assert len(stopped) < len(text)
    end_to_end(server, stopped, "--stop-words", word, num_tokens=40)
    without = continuation(server, max_tokens=20, bad_words=word).text
    end_to_end(server, without, "--bad-words", word)


def test_the_end_to_end_client_gets_beams_and_all_outputs(server):
    out = end_to_end(server, None, "--beam-width", 3)
    assert PROMPT in out
    asked = ("--return-log-probs", "--return-context-logits", "--return-generation-logits", "--return-perf-metrics")
    out = end_to_end(server, continuation(server, max_tokens=20).text, *asked)
    assert "output_log_probs.shape: (1, 1, 20)" in out and "generation_logits.shape: (1, 1, 20, 1536)" in out
    assert re.search(r"kv_cache_alloc_total_blocks: [1-9]", out)


# The stock config.pbtxt, and the client of its model.


def test_the_stock_config_loads_and_names_parameters_without_effect(server):
    log = server.log()
    for key in ("gpu_weights_percent", "executor_worker_path", "lookahead_window_size"):
        assert re.search(rf"tensorrt_llm: config.pbtxt: parameter '{key}' has no effect here", log), key
    for key in ("max_beam_width", "medusa_choices"):
        assert f"{key}' has no effect" not in log
    assert "dynamic_batching" in server.model_config("tensorrt_llm")


def inflight_client(server, model, *arguments):
    """inflight_batcher_llm_client.py makes its own token ids, with transformers."""
    if "AIPERF_PYTHON" not in os.environ:
        pytest.skip("AIPERF_PYTHON names no interpreter that has tritonclient and transformers, which this client imports")
    return run(
        TENSORRT_LLM / "inflight_batcher_llm_client.py",
        "--url",
        server.grpc_url,
        "--model-name",
        model,
        "--tokenizer-dir",
        STORIES,
        "--text",
        PROMPT,
        *arguments,
        python=os.environ["AIPERF_PYTHON"],
    )


@pytest.fixture
def csv(server, tmp_path):
    """Files with the prompt's ids and with a model's expected answer."""
    whole = generate(server, "plain", PROMPT, max_tokens=16)
    files = tmp_path / "input.csv", tmp_path / "output.csv"
    num_prompt = whole.last.num_input_tokens
    for file, ids in zip(files, (whole.ids[:num_prompt], whole.ids)):
        file.write_text(",".join(map(str, ids)) + "\n")
    return "--input-tokens-csv", files[0], "--output-tokens-csv", files[1], "--check-output"


@pytest.mark.parametrize("same", ["", "_same"], ids=["stock", "client_compatibility"])
def test_the_inflight_client_gets_ids(server, csv, same):
    assert "PASS!" in inflight_client(server, f"tensorrt_llm{same}_full", *csv)
    assert "PASS!" in inflight_client(server, f"tensorrt_llm{same}", "--streaming", *csv)


def test_the_inflight_client_reads_text(server):
    text = continuation(server, max_tokens=16).text
    out = inflight_client(server, "tensorrt_llm_same_full")
    assert f"Output beam 0: {text.strip()}" in out.replace("Output beam 0:  ", "Output beam 0: ")


def test_the_inflight_client_gets_all_outputs(server, csv):
    asked = ("--return-log-probs", "--return-context-logits", "--return-generation-logits", "--return-perf-metrics")
    for more in (asked, (*asked, "--streaming"), ("--num-return-sequences", 2), ("--lookahead_config", "[7,7,7]")):
        model = "tensorrt_llm_same" if {"--streaming", "--num-return-sequences"} & set(more) else "tensorrt_llm_same_full"
        assert "PASS!" in inflight_client(server, model, *csv, *more)
    outputs = ("--requested-outputs", "output_ids", "sequence_length")
    assert "PASS!" in inflight_client(server, "tensorrt_llm_same_full", *csv, *outputs)
    inflight_client(server, "tensorrt_llm_same_full", "--beam-width", 3, "--return-log-probs")


@pytest.mark.parametrize("how", [(), ("--stop-via-request-cancel",)], ids=["stop request", "cancellation"])
@pytest.mark.cancelling
def test_the_inflight_client_stops_its_request(server, how):
    options = ("--streaming", "--request-output-len", 400, "--request-id", "9", "--stop-after-ms", 20, "--end-id", -1)
    inflight_client(server, "tensorrt_llm_same", *options, *how)


# vLLM's clients.


@pytest.mark.parametrize("streams", [(), ("--streaming-mode",)], ids=["whole", "stream"])
def test_vllms_sample_client_gets_its_texts(server, tmp_path, streams):
    prompts = VLLM / "samples" / "prompts.txt"
    results = tmp_path / "results.txt"
    out = run(
        VLLM / "samples" / "client.py",
        *("--url", server.grpc_url, "--model", "vllm_opt"),
        *("--input-prompts", prompts, "--results-file", results, "--exclude-inputs-in-outputs", *streams),
    )
    assert "PASS" in out
    found = [text.removesuffix("\n") for text in results.read_text().split("\n=========\n\n")][:-1]
    options = {"temperature": 0.1, "top_p": 0.95, "max_tokens": 100}
    lines = prompts.read_text().splitlines(keepends=True)
    assert found == [generate_stream(server, "plain", prompt, **options).text for prompt in lines]


def test_vllms_tests_of_additional_outputs_pass(server, tmp_path):
    """Their test class, with our address: every eleventh of its 1458 combinations, so that each value of each
    parameter occurs together with each value of every other one; PEER_CLIENTS_ALL=1 runs all of them."""
    source = VLLM / "ci" / "L0_additional_outputs_vllm" / "additional_outputs_test.py"
    every = 1 if os.environ.get("PEER_CLIENTS_ALL") else 11
    (tmp_path / "conftest.py").write_text(
        f"def pytest_collection_modifyitems(items):\n    items[:] = items[::{every}]\n"
    )
    (tmp_path / "test_here.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(source.parent)!r})\n"
        "from additional_outputs_test import TestAdditionalOutputs as Theirs\n"
        "class TestHere(Theirs):\n"
        f"    _grpc_url = {server.grpc_url!r}\n"
        "del Theirs\n"
    )
    out = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "test_here.py", folder=tmp_path)
    assert re.search(rf"\b{-(-1458 // every)} passed", out), out[-500:]
