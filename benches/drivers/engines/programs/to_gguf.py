"""llama.cpp's own conversion, for checkpoints with a tokenizer that it does not know: to_gguf.py TREE ARGUMENTS...

The tokenizer is treated as GPT-2's. The benchmarks send token ids, so it does not matter.
"""

import sys

tree = sys.argv.pop(1)
sys.path[:0] = [tree, f"{tree}/gguf-py"]

import conversion.base  # noqa: E402  it is part of the tree

for kind in vars(conversion.base).values():
    if isinstance(kind, type) and hasattr(kind, "get_vocab_base_pre"):
        kind.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"

import convert_hf_to_gguf  # noqa: E402  it uses the patched classes

convert_hf_to_gguf.main()
