"""The plots of inflight-sim in a real browser: nothing overlaps, and lines have the colours of the legend."""

import io
import itertools
import os
import subprocess

import pytest
from PIL import Image

CONFIG = """
max_batch_size: 16
parameters { key: "runner" value { string_value: "synthetic" } }
parameters { key: "synthetic_step_us" value { string_value: "2000" } }
parameters { key: "max_seq_len" value { string_value: "512" } }
parameters { key: "max_tokens_in_paged_kv_cache" value { string_value: "2048" } }
parameters { key: "batch_scheduler_policy" value { string_value: "max_utilization" } }
"""
OVER_TIME = {"kv-cache": 1, "requests": 2}
OVER_LOAD = ("time-to-first-token", "time-per-output-token")
SCRIPT = """[...document.querySelectorAll('svg > *')].map(element => {
    const box = element.getBoundingClientRect();
    return [element.tagName, element.getAttribute('class'), element.textContent,
            box.left, box.top, box.right, box.bottom];
})"""


@pytest.fixture(scope="module")
def plots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plots")
    (folder / "config.pbtxt").write_text(CONFIG)
    arguments = "--config config.pbtxt --rate 10,40,80 --num-requests 400 --output uniform:8..200 --plots ."
    subprocess.run([os.environ["INFLIGHT_SIM"], *arguments.split()], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def look(browser, path, dark):
    browser.open(path, 660, 340, dark=dark)
    pixels = Image.open(io.BytesIO(browser.screenshot(660, 340))).convert("RGB")
    elements = [(tag, kind, text, box) for tag, kind, text, *box in browser.evaluate(SCRIPT)]
    return elements, pixels


def center(box):
    left, top, right, bottom = box
    return int((left + right) / 2), int((top + bottom) / 2)


def meet(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", [*OVER_TIME, *OVER_LOAD])
def test_texts_are_inside_the_picture_and_do_not_overlap(browser, plots, name, dark):
    elements, _ = look(browser, plots / f"{name}.svg", dark)
    surface = next(box for _, kind, _, box in elements if kind == "surface")
    texts = [(text, box) for tag, _, text, box in elements if tag == "text"]
    for text, (left, top, right, bottom) in texts:
        assert surface[0] <= left and surface[1] <= top and right <= surface[2] and bottom <= surface[3], text
    for (a, box_a), (b, box_b) in itertools.combinations(texts, 2):
        assert not meet(box_a, box_b), (a, b)
    for tag, kind, _, box in elements:
        if kind and kind.startswith("series") and tag != "rect":
            assert not any(meet(box, other) for text, other in texts if text in ("s", "ms", "requests/s"))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", OVER_LOAD)
def test_every_load_has_a_dot_of_each_series_in_its_colour(browser, plots, name, dark):
    elements, pixels = look(browser, plots / f"{name}.svg", dark)
    legend = {kind: pixels.getpixel(center(box)) for tag, kind, _, box in elements if tag == "rect" and "series" in kind}
    assert len({*legend.values()}) == 4
    dots = [(kind, box) for tag, kind, _, box in elements if tag == "circle"]
    assert len(dots) == 3 * 4
    for number, (kind, box) in enumerate(dots):
        # A later dot may cover an earlier one.
        if not any(meet(box, other) for _, other in dots[number + 1 :]):
            assert pixels.getpixel(center(box)) == legend[kind], kind
    loads = sorted({center(box)[0] for _, box in dots})
    assert len(loads) == 3


@pytest.mark.parametrize("name, num_series", OVER_TIME.items())
def test_series_over_time_are_painted(browser, plots, name, num_series):
    elements, pixels = look(browser, plots / f"{name}.svg", False)
    shapes = [kind for tag, kind, _, _ in elements if tag in ("polygon", "polyline")]
    assert shapes == [f"series-{n}" for n in range(num_series)]
    colors = {color for _, color in pixels.getcolors(1 << 20)}
    assert (0x00, 0x72, 0xB2) in colors
    assert num_series == 1 or (0xD5, 0x5E, 0x00) in colors
