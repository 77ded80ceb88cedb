"""`bench quality`: reading of pages, of a model's widths, and of llama.cpp's output."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benches/drivers"))

import quality  # noqa: E402  it is in that folder
from engines import setup  # noqa: E402

pytestmark = pytest.mark.complete


def test_the_prose_of_a_page_is_its_sentences():
    page = "# A page\n\nSays this.\n\n```bash\nrun it\n```\n\n| a | b |\n|---|---|\n<!-- begin -->\nAnd `that`.\n"
    assert quality.prose(page) == "# A page\n\nSays this.\n\nAnd `that`."


def test_a_model_is_the_demo_model_or_a_checkpoint_folder(tmp_path):
    demo = quality.folder("stories")
    assert (demo / "config.json").is_file()
    assert quality.folder(str(demo)) == demo
    for name in ("smollm2", str(tmp_path)):
        with pytest.raises(SystemExit, match="has no config.json; give a checkpoint folder, or stories"):
            quality.folder(name)


def test_projections_without_whole_blocks_of_q4_k_are_named():
    config = {"hidden_size": 576, "num_attention_heads": 9, "head_dim": 64, "intermediate_size": 1536}
    assert quality.narrow(config) == ["attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "attn_output"]
    config = {"hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 8192}
    assert quality.narrow(config) == []


def test_llama_cpps_figures_are_read():
    printed = """
Mean PPL(Q)                   :  12.345678 ±   0.123456
Mean PPL(base)                :  12.000000 ±   0.123456
Mean    KLD:   0.012345 ±   0.000100
Maximum KLD:   1.500000
Same top p: 93.210 ± 0.500 %
"""
    assert quality.figures(printed) == {
        "perplexity": 12.345678,
        "bf16_perplexity": 12.0,
        "kl_mean": 0.012345,
        "kl_largest": 1.5,
        "same_top_share": 0.9321,
    }
    with pytest.raises(setup.Unavailable, match="Mean PPL"):
        quality.figures("")
