"""The contents of a page: its shapes and texts with their positions, and the painted pixels."""

import dataclasses
import io
import re

from PIL import Image

SCRIPT = """[...document.querySelectorAll('svg > rect, svg > text')].map(element => {
    const box = element.getBoundingClientRect();
    return {
        tag: element.tagName,
        classes: element.getAttribute('class').split(' '),
        title: element.querySelector('title')?.textContent ?? null,
        text: element.tagName === 'text' ? element.textContent : null,
        left: box.left, top: box.top, right: box.right, bottom: box.bottom,
    };
})"""
STAGES = ("context", "generation", "paused", "waiting")
TITLE = re.compile(r"request (\d+), steps? (\d+)(?: to (\d+))?: (\w+)(?:, (\d+) tokens?)?")


@dataclasses.dataclass(frozen=True)
class Box:
    """An element, with its position in the window."""

    classes: tuple
    title: str | None
    text: str | None
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, other, slack=0.5):
        return (
            self.left - slack <= other.left
            and other.right <= self.right + slack
            and self.top - slack <= other.top
            and other.bottom <= self.bottom + slack
        )

    def meets(self, other, slack=0.01):
        return (
            self.left + slack < other.right
            and other.left + slack < self.right
            and self.top + slack < other.bottom
            and other.top + slack < self.bottom
        )


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of the timeline, parsed from its title."""

    request: int
    first: int
    last: int
    stage: str
    tokens: int
    box: Box


class Painted:
    """A timeline opened in the browser."""

    def __init__(self, browser, path, width, *, dark=False):
        browser.open(path, width, 800, dark=dark)
        self.width = width
        self.scroll_width = browser.evaluate("document.documentElement.scrollWidth")
        self.words = browser.evaluate("document.body?.innerText ?? ''")
        self.num_elements = browser.evaluate("document.querySelectorAll('*').length")
        # A picture that is wider than the window scrolls in its own frame.
        self._right = browser.evaluate("document.querySelector('.picture')?.getBoundingClientRect().right ?? innerWidth")
        boxes = [
            Box(tuple(found.pop("classes")), **{k: v for k, v in found.items() if k != "tag"})
            for found in browser.evaluate(SCRIPT)
        ]
        self.surface = next(box for box in boxes if "surface" in box.classes)
        self.texts = [box for box in boxes if box.text is not None]
        self.swatches = {box.classes[0]: box for box in boxes if "swatch" in box.classes}
        self.targets = [box for box in boxes if "target" in box.classes]
        self.cells = [self._cell(box) for box in boxes if box.title and box.classes[0] in STAGES]
        height = int(browser.evaluate("document.documentElement.scrollHeight"))
        picture = browser.screenshot(width, height)
        self._pixels = Image.open(io.BytesIO(picture)).convert("RGB")

    def color(self, x, y):
        """The pixel at this position; None if it is scrolled out of sight."""
        if 0 <= x < self._right and 0 <= y < self._pixels.height:
            return self._pixels.getpixel((int(x), int(y)))
        return None

    def color_of(self, box):
        """A pixel of a box, left of its centre, where there is no text."""
        return self.color(box.left + min(2, (box.right - box.left) / 2), (box.top + box.bottom) / 2)

    @staticmethod
    def _cell(box):
        request, first, last, stage, tokens = TITLE.fullmatch(box.title).groups()
        assert box.classes == (stage,), box
        return Cell(int(request), int(first), int(last or first), stage, int(tokens or 0), box)
