"""`cargo xtask timeline` in a real browser: the painted page matches the records."""

import collections
import itertools
import json
import re

import pytest

from conftest import xtask
from harness.painted import STAGES, Painted
from runs import make_run, write


def draw(folder, records, *options, out="page.html"):
    status, errors = xtask("timeline", write(folder / "run.jsonl", records), folder / out, *options)
    assert status == 0, errors
    return folder / out


def shares(records):
    """Every share of every step: (request, step, stage, tokens)."""
    return [
        (share["id"], record["Iteration Counter"], share["stage"], share["tokens"])
        for record in records
        for share in record["Requests"]
    ]


@pytest.fixture(scope="module")
def small():
    return make_run(5, 20)


@pytest.fixture(scope="module")
def large():
    return make_run(500, 5000)


@pytest.fixture(scope="module", params=["page.html", "picture.svg"])
def small_file(request, tmp_path_factory, small):
    return draw(tmp_path_factory.mktemp("small"), small, out=request.param)


@pytest.fixture(scope="module")
def large_file(tmp_path_factory, large):
    return draw(tmp_path_factory.mktemp("large"), large)


@pytest.fixture(params=[(1300, False), (1300, True), (560, False)], ids=["wide", "dark", "narrow"])
def page(request, browser, small_file):
    width, dark = request.param
    return Painted(browser, small_file, width, dark=dark)


def assert_colors_are_the_legends(page, cells):
    legend = {name: page.color_of(box) for name, box in page.swatches.items()}
    assert len({*legend.values()}) == len(legend), f"two stages have the same colour: {legend}"
    seen = collections.Counter()
    for cell in cells:
        color = page.color_of(cell.box)
        if color is not None:
            seen[cell.stage] += 1
            assert color == legend[cell.stage], cell
    assert {*seen} == {*STAGES}, f"a stage is not in the window: {seen}"


def assert_apart(boxes):
    """No two boxes overlap. Only neighbours in a row are compared, from left to right."""
    rows = collections.defaultdict(list)
    for box in boxes:
        rows[round((box.top + box.bottom) / 2)].append(box)
    for row in rows.values():
        for before, after in itertools.pairwise(sorted(row, key=lambda box: box.left)):
            assert not before.meets(after), (before, after)


def test_there_is_a_cell_for_every_share_of_every_step(page, small):
    cells = [(cell.request, cell.first, cell.stage, cell.tokens) for cell in page.cells]
    assert sorted(cells) == sorted(shares(small))
    assert all(cell.first == cell.last for cell in page.cells)


def test_cells_have_the_colours_of_the_legend(page):
    assert_colors_are_the_legends(page, page.cells)


def test_rows_are_requests_and_columns_are_steps(page):
    assert_apart(cell.box for cell in page.cells)
    for a, b in itertools.combinations(page.cells, 2):
        same_row = abs((a.box.top + a.box.bottom) - (b.box.top + b.box.bottom)) <= 2
        assert same_row == (a.request == b.request), (a, b)
        assert (a.box.left == b.box.left) == (a.first == b.first), (a, b)
        assert (a.box.left < b.box.left) == (a.first < b.first), (a, b)


def test_cells_with_room_show_their_tokens_and_no_text_overflows(page):
    labels = [text for text in page.texts if text.classes[0].startswith("on-")]
    working = [cell for cell in page.cells if cell.tokens]
    assert len(labels) == len(working)
    for label in labels:
        (cell,) = [cell for cell in working if cell.box.meets(label)]
        assert label.text == str(cell.tokens) and cell.box.holds(label), (cell, label)
    for text in page.texts:
        assert page.surface.holds(text), text
    for a, b in itertools.combinations(page.texts, 2):
        assert not a.meets(b), (a, b)
    for text in page.texts:
        assert text in labels or not any(cell.box.meets(text) for cell in page.cells), text


def test_the_kv_cache_is_painted_with_its_usage(page, small):
    kv, empty = page.color_of(page.swatches["kv"]), page.color(*upper_left(page.surface))
    assert len(page.targets) == len(small)
    seen = 0
    for target, record in zip(page.targets, small):
        used, blocks = record["Used KV cache blocks"], record["Max KV cache blocks"]
        step = record["Iteration Counter"]
        assert target.title.startswith(f"step {step}: {used} of {blocks} blocks in use"), target
        x = (target.left + target.right) / 2
        edge = target.bottom - (target.bottom - target.top) * used / blocks
        if page.color(x, edge) is not None and used:
            seen += 1
            assert page.color(x, edge + 2) == kv, target
            assert used == blocks or page.color(x, edge - 3) == empty, target
    assert seen > 5


def upper_left(box):
    return box.left + 2, box.top + 2


def test_the_page_itself_never_scrolls_sideways(page, small_file):
    if small_file.suffix == ".html":
        assert page.scroll_width <= page.width


def test_the_file_has_no_external_resources(small_file):
    text = small_file.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|https?:|@import", text)


@pytest.mark.parametrize("width, dark", [(1300, False), (1300, True), (700, False)])
def test_a_long_run_is_aggregated_and_says_so(browser, large, large_file, width, dark):
    page = Painted(browser, large_file, width, dark=dark)
    assert "500 requests, steps 1 to 5000" in page.words
    assert "One column is 9 steps" in page.words
    assert page.num_elements < 30_000
    assert sum(cell.tokens for cell in page.cells) == sum(tokens for *_, tokens in shares(large))
    assert {cell.request for cell in page.cells} == {*range(500)}
    assert_apart(cell.box for cell in page.cells)
    assert_colors_are_the_legends(page, page.cells)
    assert page.scroll_width <= width
    for text in page.texts:
        assert page.surface.holds(text), text
        assert not any(cell.box.meets(text) for cell in page.cells[::50]), text
    for a, b in itertools.combinations(page.texts, 2):
        assert not a.meets(b), (a, b)


def test_a_range_of_steps_is_drawn_step_by_step(browser, large, tmp_path):
    path = draw(tmp_path, large, "--steps", "2000..2039")
    page = Painted(browser, path, 1500)
    assert "steps 2000 to 2039" in page.words and "One column" not in page.words
    expected = [share for share in shares(large) if 2000 <= share[1] <= 2039]
    assert sorted((c.request, c.first, c.stage, c.tokens) for c in page.cells) == sorted(expected)


def test_the_number_of_columns_can_be_limited(browser, small, tmp_path):
    page = Painted(browser, draw(tmp_path, small, "--max-columns", 7), 900)
    assert "One column is 3 steps" in page.words
    assert len(page.targets) == 7
    assert page.targets[0].title.startswith("steps 1 to 3: up to")


def test_a_cache_without_blocks_is_not_drawn(browser, small, tmp_path):
    records = [{name: value for name, value in record.items() if "KV" not in name} for record in small]
    page = Painted(browser, draw(tmp_path, records), 900)
    assert len(page.cells) == len(shares(small))
    assert page.targets == [] and "kv" not in page.swatches
    assert_colors_are_the_legends(page, page.cells)


def test_slots_and_snapshots_of_recurrent_states_are_drawn_below_the_kv_cache(browser, small, tmp_path):
    kinds = {"state slots": "state slots", "state snapshots": "state snapshots", "host state snapshots": "state snapshots in host memory"}
    records = []
    for record in small:
        states = {f"Max {kind}": 9 + place for place, kind in enumerate(kinds)}
        used = {f"Used {kind}": (record["Iteration Counter"] + place) % 9 for place, kind in enumerate(kinds)}
        records.append({**record, **states, **used})
    page = Painted(browser, draw(tmp_path, records), 900)
    assert len(page.targets) == 4 * len(records)
    for place, (kind, name) in enumerate(kinds.items(), 1):
        assert name in page.words
        lane = page.targets[place * len(records) : (place + 1) * len(records)]
        for target, record in zip(lane, records, strict=True):
            used, most = record[f"Used {kind}"], record[f"Max {kind}"]
            assert target.title.startswith(f"step {record['Iteration Counter']}: {used} of {most} {name} in use"), target
    for text in page.texts:
        assert page.surface.holds(text), text
    for a, b in itertools.combinations(page.texts, 2):
        assert not a.meets(b), (a, b)


def test_the_last_run_of_a_file_is_drawn(browser, small, tmp_path):
    page = Painted(browser, draw(tmp_path, small + small[:4]), 900)
    assert "steps 1 to 4" in page.words


def refusal(folder, text, *options, out="page.html"):
    path = folder / "bad.jsonl"
    path.write_text(text)
    status, errors = xtask("timeline", path, folder / out, *options)
    assert status == 1 and not (folder / out).exists()
    return errors


def test_errors_name_the_line_and_the_field(small, tmp_path):
    good = json.dumps(small[0]) + "\n"
    bad = good.replace('"Iteration Counter"', '"Counter"')
    assert "line 2: missing field `Iteration Counter`" in refusal(tmp_path, good + bad)
    bad = good.replace('"context"', '"asleep"').replace('"waiting"', '"asleep"')
    assert "line 1: field 'Requests[0].stage': unknown variant `asleep`" in refusal(tmp_path, bad)
    assert "no steps from 7 to 9: the file has steps 1 to 1" in refusal(tmp_path, good, "--steps", "7..9")
    assert "the file has no records" in refusal(tmp_path, "")
    assert "must end in .html or .svg" in refusal(tmp_path, good, out="page.png")
