"""Checkpoints that were quantised before they were saved, in a real server."""

import json
import struct

import gguf
import numpy
import pytest

from harness.clients import Refused, described, generate, streams
from harness.repository import ROOT, STORIES, add_model
from harness.server import Server

FIXTURES = ROOT / "tests" / "fixtures" / "quantised"
NAMES = ["gptq", "gptq-act-order", "awq", "compressed-w8a8", "gguf-q4_0-split", "gguf-q4_k"]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    repository = tmp_path_factory.mktemp("checkpoints") / "repository"
    for name in NAMES:
        add_model(repository, name, {"gpt_model_path": FIXTURES / name})
    text = 'input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]'
    add_model(repository, "text", {"gpt_model_path": FIXTURES / "gguf-q4_k"}, fields=text)
    add_model(repository, "stories", checkpoint=STORIES)
    for file in list(add_model(repository, "marked", checkpoint=STORIES).iterdir()):
        if file.suffix == ".json":
            marked = b"\xef\xbb\xbf" + file.read_bytes()
            file.unlink()
            file.write_bytes(marked)
    loads = [f"--load-model={name}" for name in [*NAMES, "stories", "marked"]]
    with Server(repository, "--model-control-mode=explicit", *loads) as server:
        yield server


@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_checkpoint_generates_what_transformers_does(quantised, name):
    expected = json.loads((FIXTURES / name / "expected.json").read_text())["prompts"]
    requests = [(prompt["prompt"], {"max_tokens": len(prompt["greedy"])}) for prompt in expected]
    answers = streams(quantised, name, requests)
    assert [answer.ids for answer in answers] == [prompt["greedy"] for prompt in expected]


def test_files_with_a_byte_order_mark_are_read_as_without(quantised):
    messages = json.dumps([{"role": "user", "content": "Tell me a story about a fox."}])
    for prompt, options in (("Once upon a time", {}), ("", {"messages": messages})):
        answers = [generate(quantised, model, prompt, max_tokens=40, **options) for model in ("stories", "marked")]
        assert answers[0].text == answers[1].text != "", prompt


def test_a_gguf_file_without_a_tokenizer_takes_no_text(quantised):
    reason = quantised.load("text")
    assert "gguf-q4_k.gguf" in reason and "tokenizer.ggml.merges" in reason and "tokenizer.json" in reason
    assert generate(quantised, "stories", "Once", max_tokens=1).text


def write_gguf(path, pre="gpt-2"):
    """The demo model, its tokenizer and its chat template in one file, as llama.cpp's converter writes them."""
    config, tokenizer, tokenizer_config = (
        json.loads((STORIES / name).read_text()) for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(tokenizer_config["chat_template"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for key, (shape, values) in bf16_tensors(STORIES / "model.safetensors").items():
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in key:
                # The converter writes the two halves of a head's rows in turn.
                values = values.reshape(config[heads], 2, -1, shape[1]).swapaxes(1, 2).reshape(shape)
        if len(shape) == 1:
            values = (values.astype(numpy.uint32) << 16).view(numpy.float32)
            writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), values)
        else:
            bytes = values.reshape(shape).view(numpy.uint8)
            writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), bytes, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bf16_tensors(path):
    """Shapes and bits of the tensors of a safetensors file."""
    data = path.read_bytes()
    (len_header,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + len_header])
    tensors = {}
    for name, info in header.items():
        if name != "__metadata__":
            assert info["dtype"] == "BF16"
            start, end = (8 + len_header + offset for offset in info["data_offsets"])
            tensors[name] = info["shape"], numpy.frombuffer(data[start:end], numpy.uint16)
    return tensors


def test_a_single_gguf_file_serves_text_and_conversations(tmp_path):
    """It gives the answers of the folder that it was made from."""
    repository = tmp_path / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    add_model(repository, "single")
    folder = repository / "single" / "1"
    write_gguf(folder / "model.gguf")
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]
    with Server(repository) as server:
        messages = json.dumps([{"role": "user", "content": "Tell me a story about a fox."}])
        for prompt, options in (
            ("Once upon a time, in 1234 little houses", {}),
            ("\u00dcber 10 F\u00fcchse", {"temperature": 0.9, "seed": 3}),
            ("", {"messages": messages}),
            ("Once", {"guided_regex": "[a-z ]{20}"}),
        ):
            answers = [generate(server, model, prompt, max_tokens=40, **options) for model in ("stories", "single")]
            assert answers[0].text and described(answers[0]) == described(answers[1])


@pytest.mark.parametrize("pre, reason", [(None, "has no tokenizer.ggml.pre"), ("of-tomorrow", "'of-tomorrow' is not supported")])
def test_a_gguf_file_whose_words_cannot_be_split_says_so_once_and_takes_ids(tmp_path, pre, reason):
    repository = tmp_path / "repository"
    write_gguf(add_model(repository, "unsplit") / "model.gguf", pre)
    with Server(repository) as server:
        ids = generate(server, "unsplit", [1, 44, 464], max_tokens=3).ids
        assert ids[:3] == [1, 44, 464] and len(ids) == 6
        with pytest.raises(Refused, match="expected 1 inputs but got 0"):
            generate(server, "unsplit", "Once", max_tokens=3)
        lines = [line for line in server.log().splitlines() if reason in line]
        assert len(lines) == 1 and "takes input_ids only" in lines[0] and "tokenizer.json" in lines[0], lines
