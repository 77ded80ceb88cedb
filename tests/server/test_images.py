"""Images in prompts: what the demo model with images says about drawings whose contents are known."""

import base64
import concurrent.futures
import contextlib
import http.server
import io
import json
import pathlib
import random
import re
import struct
import subprocess
import threading
import zlib

import numpy
import pytest
from PIL import Image

from harness import node
from harness.clients import GrpcStream, Refused, generate, grpc, run, tensor
from harness.front import Front, counts, named_events_of
from harness.repository import QUEUED, ROOT, SHAPES, STORIES, add_model
from harness.server import Server
from shapes import scenes

QUESTION = "What is in the picture?"
# Encoded images and pixels come in tensors of their own, or in the text of an option.
TENSORS = (
    'input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },'
    ' { name: "images" data_type: TYPE_STRING dims: [ -1 ] optional: true },'
    ' { name: "image_pixels" data_type: TYPE_UINT8 dims: [ -1, -1, -1, 3 ] optional: true }] '
)
SMALL = {"max_images": 2, "max_image_bytes": 4000, "max_image_pixels": 64 * 64 + 100, "max_seq_len": 128}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("images") / "repository"
    add_model(repository, "shapes", checkpoint=SHAPES)
    add_model(repository, "queued", fields=QUEUED, checkpoint=SHAPES)
    add_model(repository, "tensors", fields=TENSORS + QUEUED, checkpoint=SHAPES)
    add_model(repository, "small", SMALL, checkpoint=SHAPES)
    add_model(repository, "tight", TIGHT, checkpoint=SHAPES)
    add_model(repository, "text_only", {"max_num_image_tokens": 0}, fields=TENSORS + QUEUED, checkpoint=SHAPES)
    add_model(repository, "stories", checkpoint=STORIES)
    cut_into_tiles(add_model(repository, "tiles", checkpoint=SHAPES))
    with Server(repository) as server:
        yield server


def cut_into_tiles(folder):
    """Images of the checkpoint in this folder become tiles, and a small copy of all of them."""
    file = folder / "preprocessor_config.json"
    fields = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps({**fields, "do_image_splitting": True, "size": {"longest_edge": 128}}))


# Sequences are paused, contexts are cut within images, and few rows of images are kept.
TIGHT = {
    "batch_scheduler_policy": "max_utilization",
    "max_num_tokens": 24,
    "max_num_requests": 8,
    "tokens_per_block": 4,
    "max_tokens_in_paged_kv_cache": 128,
    "max_seq_len": 128,
    "max_num_image_tokens": 16,
    "max_cached_image_tokens": 48,
}


def scene(seed, num_shapes=None):
    return scenes.Scene(random.Random(seed), num_shapes)


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def text_of(file):
    return base64.b64encode(file).decode()


def url_of(file, kind="png"):
    return f"data:image/{kind};base64,{text_of(file)}"


def user(question, *urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def asked(server, question, *urls, model="shapes", **options):
    messages = json.dumps([user(question, *urls)])
    return generate(server, model, "", messages=messages, max_tokens=60, exclude_input_in_output=True, **options)


def prompt_of(question, num_images=1):
    return "<s><|user|>" + "<image>" * num_images + question + "<|assistant|>"


@pytest.mark.parametrize("model", ["shapes", "queued"])
def test_drawings_are_described_as_they_are(server, model):
    for seed in range(12):
        drawn = scene(seed)
        answer = asked(server, QUESTION, url_of(png(drawn.draw())), model=model)
        assert answer.text == scenes.sentence(drawn.description()), seed
        assert answer.finish_reason == "end_id"


# Parameters that change how a model is computed or scheduled.
WAYS = {
    "beams": {"max_beam_width": 2},
    "lockstep": {"gpt_model_type": "V1"},
    "whole_prompts": {"enable_chunked_context": "false"},
    "int4": {"weight_only_precision": "int4"},
    "drafts": {"speculation": "prompt_lookup"},
    "overlap": {"enable_trt_overlap": "true"},
    "int8_cache": {"kv_cache_dtype": "int8"},
    "static": {"batch_scheduler_policy": "static_batch"},
    "no_reuse": {"enable_kv_cache_reuse": "false"},
}


def test_drawings_are_seen_however_a_model_is_computed(tmp_path):
    for name, parameters in WAYS.items():
        add_model(tmp_path / "repository", name, parameters, checkpoint=SHAPES)
    with Server(tmp_path / "repository") as server:
        for name in WAYS:
            options = {"beam_width": 2, "n": 1} if name == "beams" else {}
            for seed in range(3):
                drawn = scene(seed)
                answer = asked(server, QUESTION, url_of(png(drawn.draw())), model=name, **options)
                assert answer.text == scenes.sentence(drawn.description()), name


def test_images_of_a_prompt_are_told_apart(server):
    for seed in range(4):
        first, second = scene(100 + seed, 1), scene(200 + seed, 1)
        urls = [url_of(png(drawn.draw())) for drawn in (first, second)]
        for order, expected in ((urls, second), (urls[::-1], first), ([urls[0], urls[0]], first)):
            answer = asked(server, "What is in the second picture?", *order)
            assert answer.text == scenes.sentence(expected.description())


# By SmolVLMProcessor and SmolVLMForConditionalGeneration of transformers 5.24 in f32: no two tokens are nearly alike.
OF_TILES = {
    30: "A purple triangle at the bottom left.",
    31: "A yellow square at the bottom.",
    35: "A purple triangle at the bottom left and a yellow circle at the top right.",
}


@pytest.mark.parametrize("seed", OF_TILES)
def test_tiles_are_those_of_transformers(server, seed):
    image = scene(seed).draw(128).crop((0, 0, 128, 70))
    options = dict(max_tokens=60, images=text_of(png(image)))
    answer = generate(server, "tiles", prompt_of(QUESTION), exclude_input_in_output=True, **options)
    assert answer.text == OF_TILES[seed]
    assert answer.responses[0].num_input_tokens == 147
    # Two rows of two tiles, and the whole image.
    rows = "".join(
        "".join(f"<fake_token_around_image><row_{row}_col_{column}>" + "<image>" * 16 for column in (1, 2)) + "\n"
        for row in (1, 2)
    )
    whole = "<fake_token_around_image><global-img>" + "<image>" * 16 + "<fake_token_around_image>"
    expected = f"<s><|user|>{rows}\n{whole}{QUESTION}<|assistant|>"
    assert generate(server, "tiles", prompt_of(QUESTION), prompt_only=True, **options).text.startswith(expected)


def test_an_image_may_come_in_any_form(server):
    drawn = scene(3)
    file = png(drawn.draw())
    expected = scenes.sentence(drawn.description())
    prompt = prompt_of(QUESTION)
    options = dict(max_tokens=60, exclude_input_in_output=True)
    for images in (text_of(file), url_of(file), json.dumps([text_of(file)])):
        assert generate(server, "shapes", prompt, images=images, **options).text == expected
    # The part of a message has the next of the other images.
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    messages = json.dumps([{"role": "user", "content": parts}])
    assert generate(server, "shapes", "", messages=messages, images=text_of(file), **options).text == expected

    text = tensor("text_input", numpy.array([[prompt.encode()]], dtype=object), "BYTES")
    given = [
        ("images", numpy.array([[file]], dtype=object), "BYTES"),
        ("images", numpy.array([[text_of(file).encode()]], dtype=object), "BYTES"),
        ("image_pixels", numpy.asarray(Image.open(io.BytesIO(file)))[None, None], "UINT8"),
    ]

    async def main():
        async with grpc(server) as client:
            for image in given:
                stream = GrpcStream(client, "tensors", [text, tensor(*image)], **options)
                texts = [response.text async for response in stream]
                assert "".join(texts) == expected

    run(main())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_formats_that_lose_little_have_the_same_answer(server, kind):
    drawn = scene(5)
    file = io.BytesIO()
    drawn.draw().save(file, kind, **({"quality": 95} if kind in ("JPEG", "WEBP") else {}))
    answer = asked(server, QUESTION, url_of(file.getvalue(), kind.lower()))
    assert answer.text == scenes.sentence(drawn.description())


@pytest.mark.parametrize("model", ["shapes", "tight"])
def test_answers_are_the_same_beside_others(server, model):
    seeds = range(24)
    urls = [url_of(png(scene(seed).draw())) for seed in seeds]
    options = [dict(temperature=1.0, seed=seed) if seed % 3 == 0 else {} for seed in seeds]

    def answer(seed):
        # Some have two images, and some share one.
        images = [urls[seed % 10], urls[seed]] if seed % 4 == 0 and model == "shapes" else [urls[seed % 20]]
        return asked(server, QUESTION, *images, model=model, **options[seed]).text

    alone = [answer(seed) for seed in seeds]
    with concurrent.futures.ThreadPoolExecutor(len(seeds)) as threads:
        assert list(threads.map(answer, seeds)) == alone
    assert len(set(alone)) > 15


def test_an_image_that_is_asked_about_again_is_reused_and_another_one_is_not(server):
    with Front(server) as front:

        def cached(question, *urls):
            # A block is shared once it is full.
            fields = dict(model="shapes", max_tokens=24, min_tokens=24, messages=[user(question, *urls)])
            answer = front.post("/v1/chat/completions", **fields)
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        # Another background, so that no test has asked about it.
        first, second = (url_of(png(scene(seed).draw(80))) for seed in (300, 301))
        assert cached("Where is the circle?", first) <= 4
        assert cached("Where is the cross?", first) >= 16
        assert cached("Where is the cross?", second) <= 4


def damaged(file, at):
    return file[:at] + bytes([file[at] ^ 0x5A]) + file[at + 1 :]


def bomb(side):
    """A PNG of a few bytes, whose header promises side x side pixels."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_bad_images_are_named_and_harm_nobody(server):
    good = png(scene(1).draw())
    for files, words in [
        ([b"no image at all"], r"messages\[0\].content\[0\]|image 0: the format is unknown"),
        ([good, good[:60]], "image 1: the PNG data cannot be decoded"),
        ([damaged(good, 45)], "image 0: the PNG data cannot be decoded"),
        ([bomb(60000)], "image 0: 60000 x 60000 pixels are above the limit of 33554432 pixels"),
        ([b"\xff\xd8\xff" + bytes(40)], "image 0: the JPEG data cannot be decoded"),
        ([good] * 17, "17 images, and max_images is 16"),
    ]:
        with pytest.raises(Refused, match=words):
            asked(server, QUESTION, *map(url_of, files))
    for url, words in [
        ("http://127.0.0.1/a.png", r"messages\[0\].content\[0\]: a URL that is no data URL"),
        ("file:///etc/passwd", "downloads nothing"),
        ("data:image/png,abc", "without ';base64,'"),
        ("data:image/png;base64,%%%", "no image file and no base64"),
    ]:
        with pytest.raises(Refused, match=words):
            asked(server, QUESTION, url)
    drawn = scene(2)
    assert asked(server, QUESTION, url_of(png(drawn.draw()))).text == scenes.sentence(drawn.description())


PART = {"role": "user", "content": [{"type": "image"}]}


def test_images_and_their_places_have_to_agree(server):
    image = text_of(png(scene(1).draw()))
    for prompt, options, words in [
        (prompt_of(QUESTION, 0), dict(images=image), "'<image>' 0 times, and the request has 1 images"),
        (prompt_of(QUESTION, 3), dict(images=json.dumps([image, image])), "'<image>' 3 times"),
        (prompt_of(QUESTION), dict(images=image, truncate_prompt_tokens=5), "truncate_prompt_tokens"),
        ("", dict(images=image, prompt_token_ids="[0, 2, 4, 3]"), "prompt_token_ids"),
        ("", dict(images=image, messages=json.dumps([user("Hi")])), "'<image>' 0 times"),
        ("", dict(messages=json.dumps([user("<image>?", url_of(png(scene(1).draw())))])), "'<image>' 2 times"),
        ("", dict(messages=json.dumps([PART])), "'images' has only 0"),
        ("", dict(images=json.dumps([image, image]), messages=json.dumps([PART])), "1 of the 2 images in 'images' have no place"),
        (prompt_of(QUESTION), dict(images="7"), "image 0"),
    ]:
        with pytest.raises(Refused, match=words):
            generate(server, "shapes", prompt, max_tokens=2, **options)
    # Without images it is a token like others.
    assert generate(server, "shapes", prompt_of(QUESTION), max_tokens=2).text


def test_limits_are_those_of_the_configuration(server):
    drawn = [png(scene(seed).draw()) for seed in range(3)]
    ask = lambda *files: asked(server, QUESTION, *map(url_of, files), model="small")
    ask(drawn[0])
    with pytest.raises(Refused, match="3 images, and max_images is 2"):
        ask(*drawn)
    with pytest.raises(Refused, match="image 0: .* pixels are above the limit of 4196 pixels"):
        ask(png(scene(0).draw(100)))
    with pytest.raises(Refused, match="image 1: 64 x 64 pixels, and the images before it leave 100 of max_image_pixels = 4196"):
        ask(*drawn[1:])
    noise = Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=numpy.uint8))
    with pytest.raises(Refused, match="bytes, and max_image_bytes is 4000"):
        ask(png(noise))


@pytest.mark.parametrize("model", ["stories", "text_only"])
def test_a_model_without_a_tower_takes_no_images(server, model):
    image = text_of(png(scene(1).draw()))
    with pytest.raises(Refused, match=r"messages\[0\].content\[0\]: the model takes no images"):
        asked(server, QUESTION, url_of(png(scene(1).draw())), model=model)
    with pytest.raises(Refused, match="image 0: the model takes no images"):
        generate(server, model, "Hello", images=image)
    assert generate(server, model, "Hello", max_tokens=3).text


@pytest.mark.parametrize("name", ["images", "image_pixels"])
def test_tensors_of_images_are_refused_by_a_model_without_a_tower(server, name):
    text = tensor("text_input", numpy.array([[b"Hello"]], dtype=object), "BYTES")
    image = {
        "images": tensor("images", numpy.array([[png(scene(1).draw())]], dtype=object), "BYTES"),
        "image_pixels": tensor("image_pixels", numpy.zeros((1, 1, 8, 8, 3), numpy.uint8), "UINT8"),
    }[name]

    async def main():
        async with grpc(server) as client:
            with pytest.raises(Refused, match="image 0: the model takes no images"):
                async for _ in GrpcStream(client, "text_only", [text, image], max_tokens=3):
                    pass

    run(main())


def test_an_image_in_a_conversation_is_seen_in_later_turns(server):
    drawn = scene(7, 2)
    (colour, shape, place), other = drawn.items
    messages = [
        user(f"What colour is the {shape}?", url_of(png(drawn.draw()))),
        {"role": "assistant", "content": f"The {shape} is {colour}."},
        {"role": "user", "content": "How many shapes are there?"},
    ]
    answer = generate(server, "shapes", "", messages=json.dumps(messages), max_tokens=20, exclude_input_in_output=True)
    assert answer.text


# The server with OpenAI's API and Anthropic's.


@pytest.fixture(scope="module")
def front(server):
    with Front(server) as front:
        yield front


def test_chat_completions_see_images(front):
    drawn = scene(11)
    expected = scenes.sentence(drawn.description())
    messages = [user(QUESTION, url_of(png(drawn.draw())))]
    messages[0]["content"][0]["image_url"]["detail"] = "high"
    answer = front.post("/v1/chat/completions", model="shapes", messages=messages, max_tokens=60)
    assert answer["choices"][0]["message"]["content"] == expected
    # 16 rows, two marks, and a text before and behind them.
    assert counts(answer)["prompt_tokens"] > 20
    chunks = front.stream("/v1/chat/completions", model="shapes", messages=messages, max_tokens=60)
    texts = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == expected


def test_responses_see_images(front):
    drawn = scene(12)
    content = [
        {"type": "input_image", "image_url": url_of(png(drawn.draw())), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    answer = front.post("/v1/responses", model="shapes", input=[{"role": "user", "content": content}], max_output_tokens=60)
    assert answer["output"][0]["content"][0]["text"] == scenes.sentence(drawn.description())


def test_messages_see_images(front):
    drawn = scene(13)
    source = {"type": "base64", "media_type": "image/png", "data": text_of(png(drawn.draw()))}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    fields = dict(model="shapes", max_tokens=60, messages=[{"role": "user", "content": content}])
    expected = scenes.sentence(drawn.description())
    assert front.post("/v1/messages", **fields)["content"] == [{"type": "text", "text": expected}]
    with front.request("POST", "/v1/messages", {**fields, "stream": True}) as response:
        events = list(named_events_of(response))
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == expected


def test_images_that_are_refused_have_a_place_and_a_reason(front):
    for url, words in [
        ("https://host/a.png", "messages[0].content[0]': images at other URLs"),
        (url_of(b"nothing"), "image 0"),
        ("data:image/png;base64,@", "messages[0].content[0]"),
    ]:
        answer = front.call("POST", "/v1/chat/completions", dict(model="shapes", messages=[user("Hi", url)], max_tokens=1))
        assert answer.status == 400 and words in answer.json["error"]["message"], answer.json
    fields = dict(model="stories", messages=[user("Hi", url_of(png(scene(1).draw())))], max_tokens=1)
    answer = front.call("POST", "/v1/chat/completions", fields)
    assert answer.status == 400 and "takes no images" in answer.json["error"]["message"]


class Images(http.server.BaseHTTPRequestHandler):
    """Serves a drawing at /drawing.png, and all that a downloader should not take."""

    file = png(scene(15).draw())

    def do_GET(self):
        assert self.headers["Host"] == "127.0.0.1:%d" % self.server.server_port
        if self.path == "/drawing.png":
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.end_headers()
            self.wfile.write(self.file)
        elif self.path == "/elsewhere.png":
            self.send_response(302)
            self.send_header("Location", "/drawing.png")
            self.end_headers()
        elif self.path == "/promised.png":
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 40))
            self.end_headers()
        elif self.path == "/endless.png":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(200):
                    self.wfile.write(bytes(1 << 20))
        else:
            self.send_error(404)

    def log_message(self, *_):
        pass


def test_images_are_downloaded_from_named_hosts_alone(server):
    drawn = scene(15)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Images) as images:
        thread = threading.Thread(target=images.serve_forever)
        thread.start()
        host = f"127.0.0.1:{images.server_port}"
        url = f"http://{host}/drawing.png"
        try:
            with Front(server, f"--allow-image-host={host}", "--allow-image-host=localhost", "--max-request-bytes=1000000") as front:
                fields = dict(model="shapes", max_tokens=60)
                expected = scenes.sentence(drawn.description())
                chat = front.post("/v1/chat/completions", messages=[user(QUESTION, url)], **fields)
                assert chat["choices"][0]["message"]["content"] == expected
                source = {"type": "image", "source": {"type": "url", "url": url}}
                content = [source, {"type": "text", "text": QUESTION}]
                answer = front.post("/v1/messages", messages=[{"role": "user", "content": content}], **fields)
                assert answer["content"][0]["text"] == expected
                for refused, words in [
                    (f"http://{host}/elsewhere.png", "status 302, and redirects are not followed"),
                    (f"http://{host}/missing.png", "status 404"),
                    (f"http://{host}/promised.png", "it has more than"),
                    (f"http://{host}/endless.png", "it has more than"),
                    (f"http://127.0.0.1:{images.server_port + 1}/a.png", "downloads nothing from this host"),
                    (f"http://127.0.0.2:{images.server_port}/a.png", "downloads nothing from this host"),
                    ("https://example.com/a.png", "--allow-image-host"),
                    ("http://localhost/a.png", "the host's address is private"),
                ]:
                    body = dict(messages=[user(QUESTION, refused)], **fields)
                    answer = front.call("POST", "/v1/chat/completions", body)
                    assert answer.status == 400 and words in answer.json["error"]["message"], answer.json
                body = dict(messages=[user(QUESTION, *[url] * 17)], **fields)
                answer = front.call("POST", "/v1/chat/completions", body)
                assert answer.status == 400 and "at most 16 are downloaded" in answer.json["error"]["message"]
        finally:
            images.shutdown()
            thread.join()


def test_official_packages_send_images(front):
    openai = pytest.importorskip("openai")
    anthropic = pytest.importorskip("anthropic")
    drawn = scene(14)
    file = png(drawn.draw())
    expected = scenes.sentence(drawn.description())
    with openai.OpenAI(base_url=front.url + "/v1", api_key="any", max_retries=0) as client:
        answer = client.chat.completions.create(model="shapes", messages=[user(QUESTION, url_of(file))], max_tokens=60)
        assert answer.choices[0].message.content == expected
        content = [
            {"type": "input_text", "text": QUESTION},
            {"type": "input_image", "image_url": url_of(file), "detail": "low"},
        ]
        answer = client.responses.create(model="shapes", input=[{"role": "user", "content": content}], max_output_tokens=60)
        assert answer.output_text
    with anthropic.Anthropic(base_url=front.url, api_key="any", max_retries=0) as client:
        source = {"type": "base64", "media_type": "image/png", "data": text_of(file)}
        content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
        answer = client.messages.create(model="shapes", max_tokens=60, messages=[{"role": "user", "content": content}])
        assert answer.content[0].text == expected


@pytest.mark.parametrize("page", ["images.md", "quick-start.md"])
def test_the_example_of_the_documentation_sees_the_drawing(front, page):
    (command,) = (block for block in fenced(page) if '"model": "shapes"' in block)
    assert "localhost:9000" in command
    command = command.replace("localhost:9000", front.address)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert answer == "A yellow square at the top and a green cross at the bottom left."


def fenced(page):
    """The commands of a page of the book."""
    return re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs/src" / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.complete
def test_the_sdk_of_vercel_shows_images(front, tmp_path):
    drawn = scene(16)
    drawn.draw().save(tmp_path / "drawing.png")
    script = pathlib.Path(__file__).parent / "node" / "ai_sdk.mjs"
    expected = scenes.sentence(drawn.description())
    node.run_tests(script, FRONT=front.url, IMAGE=str(tmp_path / "drawing.png"), EXPECTED=expected)
