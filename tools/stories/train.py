"""Trains the demo model `model_repository/stories` from scratch, on text made by grammar.py.

    python tools/stories/train.py OUT [--steps N] [--threads N]

Needs torch, transformers, tokenizers and safetensors. Writes the tokenizer, the weights and the Hugging Face
configuration files of a small Llama to the folder OUT, and prints the loss during training. Everything is seeded:
the same versions on the same kind of machine give the same files. It is run by hand, not in CI.
"""

import argparse
import json
import math
import pathlib
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from grammar import Teller

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
BOS, EOS, USER, ASSISTANT = range(4)
VOCAB_SIZE = 1536
MAX_LEN = 1024
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('this model knows the roles user and assistant, not ' + message['role']) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(folder):
    """A byte-level BPE trained on the grammar's texts: encodes any text without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    teller = Teller(seed=1)
    tokenizer.train_from_iterator(("\n".join(teller.document()) for _ in range(8000)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "model_max_length": MAX_LEN,
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=2,
        )
        + "\n"
    )
    return tokenizer


def encode(tokenizer, turns):
    """One document in the format of the chat template; a story alone has no roles."""
    ids = [BOS]
    for n, turn in enumerate(turns):
        if len(turns) > 1:
            ids.append(ASSISTANT if n % 2 else USER)
        ids += tokenizer.encode(turn, add_special_tokens=False).ids
        if n % 2 or len(turns) == 1:
            ids.append(EOS)
    return ids


def windows(tokenizer, seed):
    """An endless stream of rows of a given length; each starts with a document, as a request's prompt
    does."""
    teller = Teller(seed)
    row = []
    length = yield
    while True:
        while len(row) < length + 1:
            row += encode(tokenizer, teller.document())
        length, row = (yield row[: length + 1]), []


def main():
    args = argparse.ArgumentParser()
    args.add_argument("out", type=pathlib.Path)
    args.add_argument("--steps", type=int, default=2600)
    args.add_argument("--threads", type=int, default=1)
    args = args.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    torch.set_num_threads(args.threads)

    tokenizer = make_tokenizer(args.out)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=640,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LEN,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=BOS,
            eos_token_id=EOS,
            attn_implementation="sdpa",
        )
    )
    num_params = sum(p.numel() for p in model.parameters())
    print(f"{num_params / 1e6:.2f} M parameters", flush=True)

    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    rows = windows(tokenizer, seed=2)
    next(rows)
    started, num_tokens, mean = time.time(), 0, None
    for step in range(args.steps):
        # Most steps train short rows, which are cheap; every eighth step, and the last tenth, trains all
        # positions.
        last = step >= args.steps * 0.9
        length = MAX_LEN if last or step % 8 == 7 else 256 if step < args.steps // 2 else 512
        batch = torch.tensor([rows.send(length) for _ in range(4096 // length)])
        lr = 2e-3 * min(1.0, (step + 1) / 60) * (0.5 + 0.5 * math.cos(math.pi * step / args.steps)) + 2e-5
        for group in optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        num_tokens += batch[:, 1:].numel()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 49 or step == args.steps - 1:
            seconds = time.time() - started
            print(f"step {step + 1}  loss {mean:.3f}  {num_tokens / 1e6:.2f} M tokens  {seconds:.0f} s", flush=True)

    model.eval()
    test = windows(tokenizer, seed=3)
    next(test)
    held_out = torch.tensor([test.send(MAX_LEN) for _ in range(16)])
    model.to(torch.bfloat16)
    with torch.no_grad():
        logits = model(held_out[:, :-1]).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten())
    print(f"held-out loss, bf16 weights: {loss.item():.3f}")
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
