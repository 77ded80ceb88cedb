"""The pictures in docs/, in a real browser: named, legible in both themes, and inside their frames."""

import pathlib

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs/src"
PICTURES = sorted(path.name for path in DOCS.glob("*.svg"))
# Texts that leave the picture, or the smallest box around their centre.
SPILLED = """(() => {
    const whole = document.documentElement.getBoundingClientRect();
    const boxes = [...document.querySelectorAll('rect')].map(rect => rect.getBoundingClientRect());
    const holds = (box, text) => text.left >= box.left - 1 && text.right <= box.right + 1
        && text.top >= box.top - 1 && text.bottom <= box.bottom + 1;
    return [...document.querySelectorAll('text')].filter(element => {
        const text = element.getBoundingClientRect();
        const [x, y] = [(text.left + text.right) / 2, (text.top + text.bottom) / 2];
        const around = boxes.filter(box => x >= box.left && x <= box.right && y >= box.top && y <= box.bottom)
            .sort((a, b) => a.width * a.height - b.width * b.height);
        return !holds(whole, text) || (around.length > 0 && !holds(around[0], text));
    }).map(element => element.textContent);
})()"""
# The contrast of each text's colour with what is painted first behind all (Web Content Accessibility Guidelines 2.2).
FAINT = """(() => {
    const luminance = color => {
        const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(value => {
            const share = value / 255;
            return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const fill = element => luminance(getComputedStyle(element).fill);
    const contrast = (a, b) => Math.max(a, b) / Math.min(a, b);
    const surface = fill(document.querySelector('rect.surface'));
    const boxes = [...document.querySelectorAll('rect.box, rect.hot, rect.kv')].map(fill);
    const behind = [surface, ...(document.querySelector('desc') ? boxes : [])];
    const texts = [...document.querySelectorAll('text.ink, text.muted, text:not([class]), text.note')];
    return texts.filter(text => behind.some(color => contrast(fill(text), color) < 4.5)).map(text => text.textContent);
})()"""


def test_the_pictures_are_found():
    drawn_by_hand = {"rooms", "request-life", "block-sharing", "rank-tiles", "deployment"}
    assert {f"{name}.svg" for name in drawn_by_hand} <= set(PICTURES)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_legible(browser, name, dark):
    browser.open(DOCS / name, 800, 900, dark=dark)
    assert browser.evaluate("document.documentElement.getAttribute('role')") == "img"
    assert browser.evaluate(SPILLED) == []
    assert browser.evaluate(FAINT) == []


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_a_name_for_who_cannot_see_it(browser, name):
    browser.open(DOCS / name, 800, 900)
    label = browser.evaluate(
        "document.documentElement.getAttribute('aria-label') || document.querySelector('title').textContent"
    )
    assert len(label) > 5


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_shows_the_picture(name):
    pages = [*DOCS.glob("*.md"), DOCS.parents[1] / "README.md"]
    assert any(f"{name})" in page.read_text() for page in pages)
