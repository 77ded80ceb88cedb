"""Trains the demo model with images, `model_repository/shapes`, from scratch, on drawings made by scenes.py.

    python tools/shapes/train.py OUT [--steps N] [--threads N]

Needs torch, torchvision, transformers, tokenizers, pillow and safetensors. Writes the tokenizer, the weights and the
Hugging Face configuration files of a small SmolVLM to the folder OUT, and prints the loss during training and the share
of right answers at the end. Everything is seeded: equal versions on equal machines give equal files. It is run by hand,
not in CI.
"""

import argparse
import json
import math
import pathlib
import random
import time

import numpy
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from scenes import Scene, of_two

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<image>", "<fake_token_around_image>", "<global-img>"]
BOS, EOS, USER, ASSISTANT, IMAGE, AROUND, WHOLE = range(7)
VOCAB_SIZE = 384
SIDE, PATCH, MERGE = 64, 8, 2
TOKENS_PER_IMAGE = (SIDE // PATCH // MERGE) ** 2
MAX_LEN = 512
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% else %}{{ raise_exception('this model knows the roles user and assistant, not ' + message['role']) }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(folder):
    """A byte-level BPE trained on questions and answers: encodes any text without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = random.Random(1)
    tokenizer.train_from_iterator((" ".join(Scene(texts).question()) for _ in range(4000)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "model_max_length": MAX_LEN,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }
    image_processor = {
        "image_processor_type": "SmolVLMImageProcessor", "do_convert_rgb": True, "do_image_splitting": False, "do_normalize": True,
        "do_pad": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "max_image_size": {"longest_edge": SIDE}, "resample": 1, "rescale_factor": 1 / 255, "size": {"longest_edge": SIDE},
    }
    processor = {"image_seq_len": TOKENS_PER_IMAGE, "processor_class": "SmolVLMProcessor"}
    files = {"tokenizer_config": settings, "preprocessor_config": image_processor, "processor_config": processor}
    for name, fields in files.items():
        (folder / f"{name}.json").write_text(json.dumps(fields, indent=2) + "\n")
    return tokenizer


def example(tokenizer, rng, num_images, num_turns):
    """The tokens of a conversation, whether each is of an answer, and the pixels of its images."""
    scenes = [Scene(rng) for _ in range(num_images)]
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    ids = [BOS, USER, *[AROUND, WHOLE, *[IMAGE] * TOKENS_PER_IMAGE, AROUND] * num_images]
    is_answer = [False] * len(ids)
    for turn in range(num_turns):
        question, answer = scenes[0].question() if num_images == 1 else of_two(scenes, rng)
        asked = [USER] * (turn > 0) + [*encode(question), ASSISTANT]
        answered = [*encode(answer), EOS]
        ids += asked + answered
        is_answer += [False] * len(asked) + [True] * len(answered)
    pixels = [numpy.asarray(scene.draw(SIDE), dtype=numpy.float32) / 127.5 - 1 for scene in scenes]
    return ids, is_answer, numpy.stack(pixels).transpose(0, 3, 1, 2)


def batch_of(examples):
    """Token ids, targets (-100 where there is none), and pixels."""
    length = max(len(ids) for ids, *_ in examples)
    rows, targets = torch.full((len(examples), length), EOS), torch.full((len(examples), length), -100)
    for row, (ids, is_answer, _) in enumerate(examples):
        rows[row, : len(ids)] = torch.tensor(ids)
        of_answers = [id if answer else -100 for id, answer in zip(ids[1:], is_answer[1:])]
        targets[row, : len(ids) - 1] = torch.tensor(of_answers)
    return rows, targets, torch.from_numpy(numpy.stack([pixels for *_, pixels in examples]))


def main():
    args = argparse.ArgumentParser()
    args.add_argument("out", type=pathlib.Path)
    args.add_argument("--steps", type=int, default=5000)
    args.add_argument("--threads", type=int, default=1)
    args = args.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    torch.set_num_threads(args.threads)
    tokenizer = make_tokenizer(args.out)
    vision = dict(
        hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=3, image_size=SIDE, patch_size=PATCH,
        hidden_act="gelu_pytorch_tanh",
    )
    text = dict(
        model_type="llama", vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=320, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=MAX_LEN, rms_norm_eps=1e-5, bos_token_id=BOS,
        eos_token_id=EOS, pad_token_id=None, tie_word_embeddings=True,
    )
    config = SmolVLMConfig(
        vision_config=vision, text_config=text, scale_factor=MERGE, image_token_id=IMAGE, tie_word_embeddings=True,
        pad_token_id=EOS, bos_token_id=BOS, eos_token_id=EOS,
    )
    model = SmolVLMForConditionalGeneration(config)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.02)
    rng = random.Random(2)
    started, mean = time.time(), None
    for step in range(args.steps):
        num_images = 2 if step % 6 == 5 else 1
        examples = [example(tokenizer, rng, num_images, 4 - num_images) for _ in range(40 // num_images)]
        ids, targets, pixels = batch_of(examples)
        lr = 2e-3 * min(1.0, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * step / args.steps)) + 1e-5
        for group in optimizer.param_groups:
            group["lr"] = lr
        logits = model(input_ids=ids, pixel_values=pixels, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 49 or step == args.steps - 1:
            print(f"step {step + 1}  loss {mean:.3f}  {time.time() - started:.0f} s", flush=True)

    model.to(torch.bfloat16).eval()
    model.save_pretrained(args.out)
    print(f"right answers: {right_answers(model, tokenizer, 200):.3f}")


@torch.no_grad()
def right_answers(model, tokenizer, num_questions):
    """The share of new questions whose greedy answer is the expected one."""
    rng, num_right = random.Random(3), 0
    for number in range(num_questions):
        ids, is_answer, pixels = example(tokenizer, rng, 1 + number % 2, 1)
        pixels = torch.from_numpy(pixels)[None].to(torch.bfloat16)
        # An answer is greedy if each of its tokens is the most likely one behind those before.
        logits = model(input_ids=torch.tensor([ids]), pixel_values=pixels, use_cache=False).logits[0]
        best = logits.argmax(-1).tolist()
        num_right += all(best[at - 1] == ids[at] for at in range(1, len(ids)) if is_answer[at])
    return num_right / num_questions


if __name__ == "__main__":
    main()
