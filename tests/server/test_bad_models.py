"""Checkpoints and configurations that cannot be served: the load fails with the reason, and the server
survives."""

import json
import shutil
import struct

import pytest

from harness.clients import Refused, generate
from harness.repository import ALLOW_OLDEST, SHAPES, STORIES, add_model, add_synthetic
from harness.server import Server
from harness.synthetic import continuation


@pytest.fixture(scope="module")
def explicit(tmp_path_factory):
    """A server that loads models on request, and that must survive every test."""
    repository = tmp_path_factory.mktemp("models") / "repository"
    add_synthetic(repository, "good")
    with Server(repository, "--model-control-mode=explicit", "--load-model=good") as server:
        yield server


def assert_load_fails(server, model, *words):
    reason = server.load(model)
    assert reason is not None, "the model was loaded"
    for word in words:
        assert word in reason
    assert server.is_alive()
    assert generate(server, "good", [1], max_tokens=5).ids[-5:] == continuation([1], 5)


def edit_json(change):
    def edit(path):
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit


def set_key(key, value):
    return edit_json(lambda content: content.__setitem__(key, value))


def remove_key(key):
    return edit_json(lambda content: content.pop(key))


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def unlink(path):
    path.unlink()


def write(content):
    return lambda path: path.write_bytes(content)


def header(path):
    """A safetensors file's header, and where its data starts."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


def poison(path):
    """One bf16 NaN among the weights."""
    tensors, start = header(path)
    data = bytearray(path.read_bytes())
    offset = start + tensors["model.layers.2.mlp.up_proj.weight"]["data_offsets"][0] + 2000
    data[offset : offset + 2] = b"\xc0\x7f"
    path.write_bytes(data)


def rename_tensor(path):
    data = path.read_bytes()
    name = b"model.layers.1.self_attn.k_proj.weight"
    assert data.count(name) == 1
    path.write_bytes(data.replace(name, name.replace(b"k_proj", b"x_proj")))


BAD_CHECKPOINTS = {
    "no config": ("config.json", unlink, ["config.json"]),
    "no weights": ("model.safetensors", unlink, ["safetensors"]),
    "half of the weights": ("model.safetensors", truncate, ["model.safetensors"]),
    "no safetensors at all": ("model.safetensors", write(b"PK\x03\x04 not safetensors"), ["model.safetensors"]),
    "an empty file": ("model.safetensors", write(b""), ["model.safetensors"]),
    "a NaN": ("model.safetensors", poison, ["model.layers.2.mlp.up_proj.weight"]),
    "a tensor missing": ("model.safetensors", rename_tensor, ["model.layers.1.self_attn.k_proj.weight"]),
    "another hidden size": ("config.json", set_key("hidden_size", 128), ["shape"]),
    "another vocabulary": ("config.json", set_key("vocab_size", 1000), ["embed_tokens"]),
    "one layer more": ("config.json", set_key("num_hidden_layers", 6), ["model.layers.5"]),
    "an unknown architecture": (
        "config.json",
        set_key("architectures", ["MptForMaskedLM"]),
        ["MptForMaskedLM", "LlamaForCausalLM"],
    ),
    "heads that do not divide": ("config.json", set_key("num_key_value_heads", 3), ["num_key_value_heads"]),
    "no hidden size": ("config.json", remove_key("hidden_size"), ["hidden_size"]),
    "absurd sizes": ("config.json", set_key("num_hidden_layers", 10**12), ["num_hidden_layers"]),
    "a negative size": ("config.json", set_key("intermediate_size", -640), ["intermediate_size"]),
    "no JSON": ("config.json", write(b"{ hidden"), ["config.json"]),
    "an adapter": (
        "adapter_config.json",
        lambda path: path.write_text("{}"),
        ["adapter_config.json", "no model by itself", "merge"],
    ),
    "half of the tokenizer": ("tokenizer.json", truncate, ["tokenizer.json"]),
    "another tokenizer": ("tokenizer.json", write(b"{}"), ["tokenizer.json"]),
}


@pytest.mark.parametrize("file, harm, words", BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS.keys())
def test_a_bad_checkpoint_fails_to_load_with_its_reason(explicit, request, file, harm, words):
    name = "bad_" + "".join(c if c.isalnum() else "_" for c in request.node.callspec.id)
    version = add_model(explicit.repository, name)
    shutil.copytree(STORIES, version, dirs_exist_ok=True)
    harm(version / file)
    assert_load_fails(explicit, name, *words)


def test_a_broken_chat_template_refuses_conversations_only(explicit):
    version = add_model(explicit.repository, "broken_template")
    shutil.copytree(STORIES, version, dirs_exist_ok=True)
    set_key("chat_template", "{% for m in messages %}{{ m }")(version / "tokenizer_config.json")
    assert explicit.load("broken_template") is None
    warnings = [line for line in explicit.log().splitlines() if line.startswith("W") and "broken_template" in line]
    assert any("chat template" in line and "line 1" in line for line in warnings)
    assert generate(explicit, "broken_template", "Once", max_tokens=4).text.startswith("Once")
    with pytest.raises(Refused) as refused:
        generate(explicit, "broken_template", "", messages='[{"role": "user", "content": "Hello"}]')
    for word in ["option 'messages'", "tokenizer_config.json", "line 1", "text_input"]:
        assert word in str(refused.value)


BAD_CONFIGS = {
    "an unknown parameter": ({"max_num_token": 8}, "", ["max_num_token", "max_num_tokens"]),
    "a value out of range": ({"tokens_per_block": 0}, "", ["tokens_per_block", "1 to 1024"]),
    "a value of another type": ({"enable_chunked_context": "maybe"}, "", ["enable_chunked_context", "true"]),
    "a number above its limit": ({"max_num_tokens": 10**12}, "", ["max_num_tokens", "from 1 to 2147483647"]),
    "a name of the Batch Manager's": ({"maxTokens": 100}, "", ["maxTokens", "max_tokens_in_paged_kv_cache"]),
    "a value of the Batch Manager's": (
        {"gpt_model_type": "InflightFusedBatching"},
        "",
        ["did you mean 'inflight_fused_batching'?"],
    ),
    "several errors": (
        {"max_num_token": 8, "enableBlockReuse": "true", "max_seq_len": 1},
        "",
        ["3 errors", "max_num_token'", "enable_kv_cache_reuse", "'1' is not an integer from 2"],
    ),
    "chunks with V1": (
        {"gpt_model_type": "V1", "enable_chunked_context": "true"},
        "",
        ["V1", "leave enable_chunked_context out"],
    ),
    "a folder that is not there": (
        {"runner": "huggingface", "gpt_model_path": "/nowhere/at/all"},
        "",
        ["/nowhere/at/all: is not a folder", "config.json", "gpt_model_path"],
    ),
    "several at once": (
        {"gpu_weight_percent": "0.5", "tokens_per_block": 0},
        'output [{ name: "txt" data_type: TYPE_STRING dims: [ -1 ] }]',
        ["3 errors: (1)", "gpu_weight_percent", "tokens_per_block", "unknown output 'txt'"],
    ),
    "dynamic batching without a batch dimension": (
        {"client_compatibility": "vllm"},
        "dynamic_batching {}",
        ["max_batch_size is 0", "max_batch_size: 64"],
    ),
    "implicit state": (
        {},
        'sequence_batching { direct {} state [{ input_name: "IN" output_name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }] }',
        ["sequence_batching has state", "KV cache blocks, which the backend keeps"],
    ),
    "an idle limit of one second": (
        {},
        "sequence_batching { iterative_sequence: true max_sequence_idle_microseconds: 1000000 }",
        ["max_sequence_idle_microseconds", "3600000000"],
    ),
    "a strategy that loses slots": (
        {},
        "sequence_batching { iterative_sequence: true max_sequence_idle_microseconds: 3600000000 "
        "oldest { max_candidate_sequences: 8 } }",
        ["oldest", "write direct { }", "allow_iterative_oldest: true accepts the risk"],
    ),
    "streams held back": (
        {},
        "sequence_batching { iterative_sequence: true max_sequence_idle_microseconds: 3600000000 "
        "oldest { max_candidate_sequences: 8 preserve_ordering: true } }",
        ["preserve_ordering"],
    ),
    "an input of another name": ({}, 'input { name: "prompt" data_type: TYPE_STRING dims: [1] }', ["prompt", "input_ids"]),
    "an input of another type": (
        {},
        'input { name: "input_ids" data_type: TYPE_INT64 dims: [-1] allow_ragged_batch: true }',
        ["TYPE_INT64", "TYPE_INT32"],
    ),
    "an input that is not ragged": (
        {},
        'input { name: "input_ids" data_type: TYPE_INT32 dims: [-1] }',
        ["allow_ragged_batch: true"],
    ),
    "an output of another name": ({}, 'output { name: "txt" data_type: TYPE_STRING dims: [1] }', ["txt", "output_ids"]),
    "a budget that no prompt fits": (
        {"enable_chunked_context": "false", "max_num_tokens": 1, "max_num_requests": 8},
        "",
        ["max_num_tokens"],
    ),
    "a cache that no sequence fits": ({"max_tokens_in_paged_kv_cache": 8}, "", ["max_tokens_in_paged_kv_cache"]),
}


@pytest.mark.parametrize("parameters, fields, words", BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_a_bad_config_fails_to_load_and_says_what_to_write(explicit, request, parameters, fields, words):
    name = "config_" + "".join(c if c.isalnum() else "_" for c in request.node.callspec.id)
    add_synthetic(explicit.repository, name, parameters, fields=fields)
    assert_load_fails(explicit, name, *words)


IMAGE_CONFIGS = {
    "images of several ranks": (SHAPES, {"tensor_parallel_size": 2}, ["2 ranks", "set max_num_image_tokens to 0"]),
    "images of a text model": (STORIES, {}, ["images are taken by models of", "LlamaForCausalLM"]),
    "images of an embedder": (SHAPES, {"task": "embed"}, ["max_num_image_tokens is set, and task is embed"]),
}


@pytest.mark.parametrize("checkpoint, parameters, words", IMAGE_CONFIGS.values(), ids=IMAGE_CONFIGS.keys())
def test_a_model_that_is_to_take_images_and_cannot_fails_to_load(explicit, request, checkpoint, parameters, words):
    name = request.node.callspec.id.replace(" ", "_")
    add_model(explicit.repository, name, {**parameters, "max_num_image_tokens": 64}, checkpoint=checkpoint)
    assert_load_fails(explicit, name, *words)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_a_model_without_its_processor_takes_text_and_says_why(explicit, file):
    name = f"without_{file.partition('.')[0]}"
    version = add_model(explicit.repository, name)
    shutil.copytree(SHAPES, version, dirs_exist_ok=True)
    (version / file).write_text("{")
    assert explicit.load(name) is None
    (warning,) = (line for line in explicit.log().splitlines() if f"{name}: takes no images" in line)
    assert file in warning and "set max_num_image_tokens to 0" in warning
    assert generate(explicit, name, "What", max_tokens=2).text
    with pytest.raises(Refused, match="takes no images"):
        generate(explicit, name, "<image>", images="AAAA")


DELAYS = {
    "direct": "minimum_slot_utilization: 0.5 max_queue_delay_microseconds: 700",
    "oldest": "max_candidate_sequences: 8 max_queue_delay_microseconds: 700",
}


@pytest.mark.parametrize("strategy, limits", DELAYS.items(), ids=DELAYS)
def test_a_config_that_delays_every_token_is_served_with_a_warning(explicit, strategy, limits):
    fields = (
        "max_batch_size: 8 sequence_batching { iterative_sequence: true "
        f"max_sequence_idle_microseconds: 3600000000 {strategy} {{ {limits} }} }}"
    )
    add_synthetic(explicit.repository, f"delayed_{strategy}", fields=f"{ALLOW_OLDEST} {fields}")
    assert explicit.load(f"delayed_{strategy}") is None
    warnings = [line for line in explicit.log().splitlines() if f"delayed_{strategy}: config.pbtxt" in line]
    assert len(warnings) == 1 and warnings[0].startswith("W"), warnings
    assert "every token, by up to 700 us" in warnings[0]
    assert generate(explicit, f"delayed_{strategy}", [1], max_tokens=5).ids[-5:] == continuation([1], 5)


WARNINGS = {
    "sinks without a window": ({"sink_token_length": 4}, "max_batch_size: 8", "sink_token_length is 4 and has no effect"),
    "overlap of one request": (
        {"enable_trt_overlap": "true", "max_num_requests": 1},
        "max_batch_size: 8",
        "enable_trt_overlap is true and max_num_requests is 1",
    ),
    "more threads than cores": ({"num_threads": 1024}, "max_batch_size: 8", "num_threads is 1024"),
    "no max_batch_size": ({}, "", "config.pbtxt has no max_batch_size, so it is 64"),
    "nothing": ({"sink_token_length": 4, "max_attention_window_size": 64}, "max_batch_size: 8", None),
}


@pytest.mark.parametrize("parameters, fields, words", WARNINGS.values(), ids=WARNINGS.keys())
def test_an_unlikely_config_is_served_with_a_warning(explicit, request, parameters, fields, words):
    name = "warned_" + "".join(c if c.isalnum() else "_" for c in request.node.callspec.id)
    add_synthetic(explicit.repository, name, parameters, fields=fields)
    assert explicit.load(name) is None
    warnings = [line for line in explicit.log().splitlines() if line.startswith("W") and name in line]
    assert len(warnings) == (words is not None), warnings
    assert all(words in warning for warning in warnings)
    assert generate(explicit, name, [1], max_tokens=5).ids[-5:] == continuation([1], 5)


def test_a_strict_server_asks_for_the_values_instead_of_their_omission(tmp_path):
    add_synthetic(tmp_path / "repository", "minimal")
    arguments = ["--disable-auto-complete-config", "--model-control-mode=explicit"]
    with Server(tmp_path / "repository", *arguments) as server:
        reason = server.load("minimal")
        assert "max_batch_size: 64; nothing is filled in, because auto-complete is disabled" in reason


def test_a_minimal_config_is_completed(explicit):
    add_model(explicit.repository, "minimal", checkpoint=STORIES)
    assert explicit.load("minimal") is None
    config = explicit.model_config("minimal")
    assert [i["name"] for i in config["input"]] == ["text_input"]
    assert "text_output" in [o["name"] for o in config["output"]]
    assert config["max_batch_size"] == 64
    assert config["model_transaction_policy"]["decoupled"] is True
    assert config["sequence_batching"]["iterative_sequence"] is True
    assert "direct" in config["sequence_batching"]


def test_a_checkpoint_elsewhere_is_found_by_its_path(explicit):
    add_model(explicit.repository, "elsewhere", {"gpt_model_path": STORIES})
    assert explicit.load("elsewhere") is None
    assert generate(explicit, "elsewhere", "Once", max_tokens=5).last.num_output_tokens == 5
