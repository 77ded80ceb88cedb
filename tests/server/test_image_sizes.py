"""Images of any size, by a model of random weights: Qwen3-VL's tower, whose images keep about their size and shape."""

import base64
import concurrent.futures
import io
import json
import random
import shutil

import pytest
from PIL import Image

from harness.clients import Refused, generate
from harness.repository import QUEUED, ROOT, add_model
from harness.server import Server

CHECKPOINT = ROOT / "tests/fixtures/images/qwen3-vl"
PLACEHOLDER = "<|image_pad|>"
# As the checkpoint has it.
IMAGE_TOKEN = 7
# Pixels of a token's side.
SIDE = 8
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4 * SIDE**2, "longest_edge": 100 * SIDE**2},
}
LIMITS = {"max_seq_len": 200, "max_image_tokens": 40, "max_num_tokens": 16, "max_num_requests": 8, "tokens_per_block": 4}
TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'image' %} " + PLACEHOLDER + " {% else %}{{ part.text }}"
    "{% endif %}{% endfor %}"
)
# Few rows of images are kept, sequences are paused, and an image is cut into chunks.
TIGHT = {
    **LIMITS,
    "batch_scheduler_policy": "max_utilization",
    "max_tokens_in_paged_kv_cache": 240,
    "max_cached_image_tokens": 60,
    "max_num_image_tokens": 8,
}


def words():
    """A word for each token, and the placeholder."""
    vocabulary = {f"w{token}": token for token in range(160) if token != IMAGE_TOKEN}
    special = {"content": PLACEHOLDER, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": IMAGE_TOKEN, **special}],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {**vocabulary, PLACEHOLDER: IMAGE_TOKEN}, "unk_token": "w0"},
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    checkpoint = folder / "checkpoint"
    shutil.copytree(CHECKPOINT, checkpoint)
    (checkpoint / "tokenizer.json").write_text(json.dumps(words()))
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    add_model(folder / "repository", "model", LIMITS, checkpoint=checkpoint)
    add_model(folder / "repository", "tight", TIGHT, fields=QUEUED, checkpoint=checkpoint)
    with Server(folder / "repository") as server:
        yield server


def noise(seed, width, height):
    return png(Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)))


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def asked(server, *images, model="model", text="w10 w11", **options):
    prompt = f"{text} " + " w12 ".join([PLACEHOLDER] * len(images)) + " w13 w14"
    images = json.dumps(list(images))
    return generate(server, model, prompt, images=images, max_tokens=12, exclude_input_in_output=True, ignore_eos=True, **options)


def num_image_tokens(answer, num_images=1):
    return answer.responses[0].num_input_tokens - 4 - (num_images - 1)


@pytest.mark.parametrize(
    ("width", "height", "num_tokens"),
    [(16, 16, 4), (40, 24, 15), (24, 40, 15), (3, 3, 4), (64, 64, 36), (800, 200, 36), (32, 8, 4)],
)
def test_an_image_has_the_tokens_of_its_size_up_to_a_limit(server, width, height, num_tokens):
    answer = asked(server, noise(1, width, height))
    assert num_image_tokens(answer) == num_tokens


def test_answers_about_images_of_all_sizes_are_the_same_beside_others(server):
    sizes = [(16, 16), (40, 24), (24, 40), (64, 64), (48, 8), (31, 57)]
    pictures = [noise(seed, *size) for seed, size in enumerate(sizes)]
    prompts = [*([picture] for picture in pictures), [pictures[1], pictures[2]], [pictures[2], pictures[1]], [pictures[0]] * 3]
    alone = [asked(server, *images).text for images in prompts]
    # The images and their order matter.
    assert len(set(alone)) > len(alone) - 2
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for model in ["model", "tight"]:
            beside = list(pool.map(lambda images: asked(server, *images, model=model).text, prompts * 3))
            assert beside == alone * 3, model


def test_an_image_of_low_detail_is_seen_as_if_it_had_512_pixels_a_side(server):
    image = Image.effect_mandelbrot((1024, 640), (-2, -1, 1, 1), 40).convert("RGB")

    def answer(image, detail):
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(image)}", "detail": detail}}
        content = [{"type": "text", "text": "w10 w11"}, image, {"type": "text", "text": "w13 w14"}]
        messages = json.dumps([{"role": "user", "content": content}])
        return generate(server, "model", "", messages=messages, max_tokens=12, exclude_input_in_output=True, ignore_eos=True).text

    small = image.resize((512, 320), Image.Resampling.BICUBIC)
    assert answer(image, "low") == answer(small, "high") == answer(small, "low")
    # Shrunk, it is less than 200 times as long as wide: 512 x 3.
    long = image.resize((1030, 5))
    assert answer(long, "low")
    for detail in ("high", "auto", "original"):
        with pytest.raises(Refused, match="image 0: .*more than 200 times as long as wide"):
            answer(long, detail)
    with pytest.raises(Refused, match=r"messages\[0\]\.content\[1\]: 'detail' is \"much\", and is not 'auto'"):
        answer(image, "much")


def test_an_image_that_is_much_longer_than_wide_is_refused_by_its_index(server):
    with pytest.raises(Refused, match="image 1: .*more than 200 times as long as wide"):
        asked(server, noise(1, 16, 16), noise(2, 2, 402))
    assert num_image_tokens(asked(server, noise(3, 16, 16))) == 4
