"""The pictures of the walk-through in docs/, in a real browser."""

import pathlib

import pytest

from harness.painted import Painted

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs/src"
# A row per request: its stages in the steps from 1. A digit is a context of that many tokens.
WHOLE = {1: "5g", 2: "5gggg", 3: "w3gggg", 4: "w3gggg", 5: "ww4gggg"}
CHUNKED = {1: "5g", 2: "5gggg", 3: "21gggg", 4: "w3gggg", 5: "ww4gggg"}
STAGES = {"g": ("generation", 1), "w": ("waiting", 0)}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name, rows", [("walk-through.svg", WHOLE), ("walk-through-chunked.svg", CHUNKED)])
def test_the_picture_shows_the_walk_through(browser, name, rows, dark):
    picture = Painted(browser, DOCS / name, 800, dark=dark)
    expected = {
        (request, step): STAGES.get(letter) or ("context", int(letter))
        for request, letters in rows.items()
        for step, letter in enumerate(letters, 1)
    }
    assert {(cell.request, cell.first): (cell.stage, cell.tokens) for cell in picture.cells} == expected
    for cell in picture.cells:
        assert picture.color_of(cell.box) == picture.color_of(picture.swatches[cell.stage]), cell
    for text in picture.texts:
        assert picture.surface.holds(text), text
