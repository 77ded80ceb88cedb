"""The quality lost by quantised weights: ours compared with llama.cpp's formats of the same checkpoint.

Our kernels read all of them on the same text, so that only the formats differ. A row names the format of the
projections. The output layer always has 8 bits. The embedding is not rounded in ours and has 8 bits in the others.
llama.cpp's own figures of its formats are printed as well.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import rows
from engines import llama_cpp, setup

ROOT = pathlib.Path(__file__).resolve().parents[2]
STORIES = "stories"
# Seed of training text that the demo model has not seen (tools/stories/train.py).
STORIES_SEED, NUM_STORIES = 4, 40
FORMATS = {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_K": "q4_k_m"}
# Elements per block of Q4_K: llama.cpp uses a larger format for rows that are not whole blocks.
Q4_K_BLOCK = 256


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help=f"a checkpoint folder, or {STORIES} for the demo model")
    parser.add_argument("--text", help="comma-separated text files [default: prose of this repository]")
    parser.add_argument("--context", type=int, default=512, help="tokens per piece of the text")
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = folder(options.model)
    programs = llama_cpp.Programs()
    forms = setup.converted(model, "quality", lambda folder: convert(programs, model, folder))
    with tempfile.TemporaryDirectory() as scratch:
        text = pathlib.Path(scratch) / "text.txt"
        text.write_text(words(options))
        for row in ours(options, model, text, forms):
            rows.show(row, options.json)
        for row in llama_cpps(options, programs, model, text, forms, pathlib.Path(scratch)):
            rows.show(row, options.json)


def folder(model):
    """The folder of a checkpoint."""
    if model == STORIES:
        return ROOT / "model_repository/stories/1"
    named = pathlib.Path(model).resolve()
    if not (named / "config.json").is_file():
        raise SystemExit(f"error: {named} has no config.json; give a checkpoint folder, or {STORIES}")
    return named


def words(options):
    """The text."""
    if options.text:
        return "".join(pathlib.Path(file).read_text() for file in options.text.split(","))
    if options.model == STORIES:
        sys.path.insert(0, str(ROOT / "tools/stories"))
        from grammar import Teller

        teller = Teller(STORIES_SEED)
        return "\n\n".join(teller.story(1)[0] for _ in range(NUM_STORIES))
    files = [ROOT / "README.md", *sorted((ROOT / "docs/src").glob("*.md"))]
    return "\n".join(prose(file.read_text()) for file in files)


def prose(markdown):
    """The sentences of a page, without code and tables."""
    parts = re.split(r"^```.*$", markdown, flags=re.MULTILINE)
    lines = "".join(parts[::2]).splitlines()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line for line in lines if not line.startswith(("|", "<!--"))))


def convert(programs, model, folder):
    """Makes a folder for each format, and one with bf16."""
    bf16 = folder / "bf16/model.gguf"
    bf16.parent.mkdir()
    programs.convert(model, bf16)
    config = json.loads((model / "config.json").read_text())
    for name, quantised in FORMATS.items():
        others = narrow(config) if name == "Q4_K" else []
        others = [word for tensor in others for word in ("--tensor-type", f"{tensor}=q4_0")]
        eight = ["--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0"]
        (folder / name).mkdir()
        programs.run("llama-quantize", "--pure", *eight, *others, bf16, folder / name / "model.gguf", quantised)


def narrow(config):
    """llama.cpp's names of the projections whose rows are not whole blocks of Q4_K."""
    heads = config["num_attention_heads"] * config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    widths = {("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"): config["hidden_size"]}
    widths |= {("attn_output",): heads, ("ffn_down",): config["intermediate_size"]}
    return [tensor for tensors, width in widths.items() for tensor in tensors if width % Q4_K_BLOCK]


def called(name, model):
    """The name of a format in a row."""
    others = narrow(json.loads((model / "config.json").read_text())) if name == "Q4_K" else []
    return f"{name}, but Q4_0 of {', '.join(others)}" if others else name


def ours(options, model, text, forms):
    """The rows of our kernels."""
    program = [os.environ["INFLIGHT_MEASURE"], "quality", "--json", f"--model={model}", f"--text={text}"]
    program += [f"--context={options.context}", f"--pieces={options.pieces}"]
    program += [f"--beside={called(name, model)}={forms / name}" for name in FORMATS]
    done = subprocess.run(program, stdout=subprocess.PIPE, check=True)
    return map(json.loads, done.stdout.splitlines())


def llama_cpps(options, programs, model, text, forms, scratch):
    """The rows of llama.cpp's kernels, on the same text with its own tokenizer."""
    threads = len(os.sched_getaffinity(0))
    base = ["-f", text, "-c", options.context, "-b", options.context, "--chunks", options.pieces, "-t", threads]
    base += ["--kl-divergence-base", scratch / "logits"]
    programs.run("llama-perplexity", "-m", forms / "bf16/model.gguf", *base)
    for name in FORMATS:
        printed = programs.run("llama-perplexity", "-m", forms / name / "model.gguf", "--kl-divergence", *base)
        yield {"row": "llama.cpp", "weights": called(name, model), **figures(printed)}


def figures(printed):
    """The figures printed by `llama-perplexity --kl-divergence`."""
    found = {}
    for name, text in {
        "perplexity": "Mean PPL(Q)",
        "bf16_perplexity": "Mean PPL(base)",
        "kl_mean": "Mean    KLD",
        "kl_largest": "Maximum KLD",
        "same_top_share": "Same top p",
    }.items():
        figure = re.search(rf"^{re.escape(text)} *: *([0-9.]+)", printed, re.MULTILINE)
        if not figure:
            raise setup.Unavailable(f"llama-perplexity did not print '{text}'")
        found[name] = float(figure[1])
    return found | {"same_top_share": round(found["same_top_share"] / 100, 5)}


if __name__ == "__main__":
    main()
