"""llama.cpp's own conversion, for checkpoints whose tokenizer it does not know: to_gguf.py TREE ARGUMENTS...

The tokenizer is taken for GPT-2's. The benchmarks feed token ids, so it does not matter.
"""

import sys

tree = sys.argv.pop(1)
sys.path[:0] = [tree, f"{tree}/gguf-py"]

import conversion.base  # noqa: E402  it lies in the tree

for kind in vars(conversion.base).values():
    if isinstance(kind, type) and hasattr(kind, "get_vocab_base_pre"):
        kind.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"

import convert_hf_to_gguf  # noqa: E402  it takes the classes as they are now

convert_hf_to_gguf.main()
