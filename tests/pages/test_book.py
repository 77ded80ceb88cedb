"""The book in a real browser, at the width of a desk and of a telephone."""

import os
import pathlib

import pytest

BOOK = pathlib.Path(os.environ["BOOK"])
NOT_PAGES = {"404.html", "print.html", "toc.html"}
PAGES = sorted(path.name for path in BOOK.glob("*.html") if path.name not in NOT_PAGES)
WIDE, NARROW = 1280, 375
HEIGHT = 800
# Elements wider than the window, except inside boxes that scroll, as tables and code do.
STICKING_OUT = """[...document.querySelectorAll('main *')].filter(element => {
    const { left, right, width } = element.getBoundingClientRect();
    if (width === 0 || (right <= window.innerWidth + 1 && left >= -1)) return false;
    for (let box = element.parentElement; box.tagName !== 'BODY'; box = box.parentElement) {
        const scrolls = ['auto', 'scroll'].includes(getComputedStyle(box).overflowX);
        if (scrolls && box.getBoundingClientRect().right <= window.innerWidth + 1) return false;
    }
    const scrolls = ['auto', 'scroll', 'hidden'].includes(getComputedStyle(element).overflowX);
    return !scrolls || right > window.innerWidth + 1;
}).map(element => element.tagName + ': ' + element.textContent.trim().slice(0, 60))"""
MISSING_PICTURES = "[...document.images].filter(image => image.naturalWidth === 0).map(image => image.src)"


def test_the_pages_are_found():
    names = {page.removesuffix(".html") for page in PAGES}
    assert {"introduction", "configuration", "limitations", "results", "results-peers"} <= names
    assert len(names) > 40


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("page", PAGES)
def test_nothing_sticks_out_of_the_window(browser, page, width):
    browser.open(BOOK / page, width, HEIGHT)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(STICKING_OUT) == []
    assert browser.evaluate(MISSING_PICTURES) == []


def test_what_sticks_out_is_found(browser, tmp_path):
    page = tmp_path / "wide.html"
    wide = '<div style="width: 2000px">wide</div>'
    scrolls = f'<div style="overflow-x: auto">{wide}</div>'
    page.write_text(f"<!doctype html><main>{scrolls}</main>")
    browser.open(page, NARROW, HEIGHT)
    assert browser.evaluate(STICKING_OUT) == []
    page.write_text(f'<!doctype html><main>{wide}<img src="gone.png"></main>')
    browser.open(page, NARROW, HEIGHT)
    assert browser.evaluate(STICKING_OUT) == ["DIV: wide"]
    assert len(browser.evaluate(MISSING_PICTURES)) == 1
