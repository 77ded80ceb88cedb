"""Drawings of coloured shapes, and what is said about them: the world of the demo model with images.

A seed determines drawings and texts.
"""

from PIL import Image, ImageDraw

COLOURS = {
    "red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 80, 200), "yellow": (240, 200, 20), "purple": (140, 60, 180),
    "black": (20, 20, 20),
}
SHAPES = ["circle", "square", "triangle", "cross"]
# Rows and columns of a grid.
PLACES = [
    "at the top left", "at the top", "at the top right", "on the left", "in the middle", "on the right", "at the bottom left",
    "at the bottom", "at the bottom right",
]
NUMBERS = ["zero", "one", "two"]
# Drawings are made larger, so that their edges are smooth.
SCALE = 4


class Scene:
    """One or two shapes of different kinds at different places."""

    def __init__(self, random, num_shapes=None):
        num_shapes = num_shapes or random.choice([1, 2, 2])
        shapes, places = random.sample(SHAPES, num_shapes), sorted(random.sample(range(9), num_shapes))
        self.items = [(random.choice(list(COLOURS)), shape, place) for shape, place in zip(shapes, places)]
        self.background = tuple(random.randint(225, 255) for _ in range(3))
        self.random = random

    def draw(self, side=64):
        """The drawing, `side` x `side`."""
        image = Image.new("RGB", (side * SCALE, side * SCALE), self.background)
        canvas = ImageDraw.Draw(image)
        cell = side * SCALE / 3
        for colour, shape, place in self.items:
            radius = cell * self.random.uniform(0.36, 0.46)
            shift = lambda: self.random.uniform(-0.04, 0.04) * cell
            x, y = (place % 3 + 0.5) * cell + shift(), (place // 3 + 0.5) * cell + shift()
            fill = tuple(max(0, min(255, value + self.random.randint(-14, 14))) for value in COLOURS[colour])
            outline = {
                "circle": None,
                "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
                "triangle": [(0, -1), (1, 0.9), (-1, 0.9)],
                "cross": [(-0.35, -1), (0.35, -1), (0.35, -0.35), (1, -0.35), (1, 0.35), (0.35, 0.35), (0.35, 1), (-0.35, 1),
                          (-0.35, 0.35), (-1, 0.35), (-1, -0.35), (-0.35, -0.35)],
            }[shape]
            if outline is None:
                canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
            else:
                size = radius * (0.88 if shape == "square" else 1)
                canvas.polygon([(x + dx * size, y + dy * size) for dx, dy in outline], fill=fill)
        return image.resize((side, side), Image.Resampling.BOX)

    def description(self):
        """All shapes, in the order of their places."""
        items = [f"{article(colour)} {colour} {shape} {PLACES[place]}" for colour, shape, place in self.items]
        return joined(items)

    def question(self):
        """A question about the drawing, and its answer."""
        colour, shape, place = self.random.choice(self.items)
        missing = [shape for shape in SHAPES if shape not in [item[1] for item in self.items]]
        other = self.random.choice(missing)
        number = NUMBERS[len(self.items)]
        return self.random.choice([
            ("What is in the picture?", sentence(self.description())),
            ("Describe the picture.", sentence(self.description())),
            (f"What colour is the {shape}?", sentence(f"the {shape} is {colour}")),
            (f"Where is the {shape}?", sentence(f"the {shape} is {PLACES[place]}")),
            ("How many shapes are there?", sentence(f"there {'is' if number == 'one' else 'are'} {number}")),
            (f"Is there a {shape}?", sentence(f"yes, {PLACES[place]}")),
            (f"Is there a {other}?", "No."),
        ])


def of_two(scenes, random):
    """A question about two drawings, and its answer."""
    first, second = scenes
    return random.choice([
        ("What is in the pictures?", sentence(f"first {first.description()}; second {second.description()}")),
        ("What is in the second picture?", sentence(second.description())),
        ("What is in the first picture?", sentence(first.description())),
    ])


def article(word):
    return "an" if word[0] in "aeiou" else "a"


def joined(items):
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def sentence(text):
    return text[0].upper() + text[1:] + "."
