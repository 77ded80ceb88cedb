"""The steps of a model as they happen, at `/live` and on the page, compared with the statistics file that they come
from."""

import concurrent.futures
import itertools
import json
import os

import pytest

from harness.browser import Browser
from harness.clients import streams
from harness.front import Front, events_of
from harness.repository import ROOT, STORIES, TIGHT, add_model
from harness.server import Server
from test_openai_page import FAINT, NARROW, WIDE

pytestmark = pytest.mark.complete

PROMPT = "Once upon a time, there was a brave fox named Finn."
# The colours that the row of each request has from left to right, without repetitions.
COLOURS = """[...document.querySelectorAll('#requests tbody tr')].map(row => {
    const canvas = row.querySelector('canvas');
    const pixels = canvas.getContext('2d').getImageData(0, canvas.height / 2, canvas.width, 1).data;
    const colors = [];
    for (let x = 0; x < canvas.width; x++) {
        const [r, g, b, a] = pixels.slice(4 * x, 4 * x + 4);
        const color = '#' + [r, g, b].map(c => c.toString(16).padStart(2, '0')).join('');
        if (a && colors.at(-1) !== color) colors.push(color);
    }
    return colors;
})"""
VISITS = itertools.count()
STAGES = {"context": "#56b4e9", "generation": "#0072b2", "paused": "#e69f00", "waiting": "#9aa1a9"}


@pytest.fixture(scope="module")
def stats(tmp_path_factory):
    return tmp_path_factory.mktemp("openai_live") / "steps.jsonl"


@pytest.fixture(scope="module")
def server(stats):
    parameters = {"stats_file": stats, "max_num_requests": 2, "enable_kv_cache_reuse": "false"}
    add_model(stats.parent / "repository", "stories", parameters, checkpoint=STORIES)
    with Server(stats.parent / "repository") as server:
        yield server


@pytest.fixture(scope="module")
def front(server, stats):
    with Front(server, f"--stats-file=stories={stats}") as front:
        yield front


@pytest.fixture(scope="module")
def browser():
    with Browser(os.environ["CHROMIUM"]) as browser:
        yield browser


def complete(front, max_tokens, model="stories", **fields):
    return front.post("/v1/completions", model=model, prompt=PROMPT, max_tokens=max_tokens, **fields)


def records(stats):
    """The records that are written so far."""
    lines = stats.read_text().splitlines() if stats.exists() else []
    return [json.loads(line) for line in lines]


def steps_of(events, num_steps):
    """The first steps of a feed, whose beginning has been read."""
    steps = []
    while len(steps) < num_steps:
        event = json.loads(next(events))
        assert event["model"] == "stories"
        steps += event["steps"]
    return steps


def test_all_who_look_see_the_steps_of_the_file(front, stats):
    before = len(records(stats))
    with front.request("GET", "/live") as one, front.request("GET", "/live") as two:
        feeds = [events_of(one), events_of(two)]
        for feed in feeds:
            assert json.loads(next(feed)) == {"models": ["stories"]}
        # Steps that were over before the file was first read are not sent.
        complete(front, 200)
        first = [steps_of(feed, 1) for feed in feeds]
        complete(front, 20)
        for feed, seen in zip(feeds, first):
            written = [record for record in records(stats) if record["Iteration Counter"] >= seen[0]["step"]]
            seen += steps_of(feed, len(written) - len(seen))
            for step, record in zip(seen, written, strict=True):
                assert step["step"] == record["Iteration Counter"]
                assert step["requests"] == [[share["id"], share["stage"], share["tokens"]] for share in record["Requests"]]
                used, most = record["Used KV cache blocks"], record["Max KV cache blocks"]
                assert (step["used_blocks"], step["max_blocks"]) == (used, most)
                assert step["states"] == 3 * [[0, 0]]
                assert step["start"] == pytest.approx(record["Step Start (us)"] / 1e3)
                assert step["tokens"][1] == sum(s["tokens"] for s in record["Requests"] if s["stage"] == "generation")


def test_without_a_file_there_is_nothing_to_see(server):
    with Front(server) as front:
        answer = front.call("GET", "/live")
        assert answer.status == 404 and "--stats-file" in answer.json["error"]["message"]


def test_steps_need_a_key_where_requests_do(server, stats, tmp_path):
    (tmp_path / "keys").write_text("sk-fox\n")
    with Front(server, f"--api-key-file={tmp_path / 'keys'}", f"--stats-file={stats}") as front:
        assert front.call("GET", "/live").status == 401
        with front.request("GET", "/live", headers={"Authorization": "Bearer sk-fox"}) as response:
            assert json.loads(next(events_of(response))) == {"models": ["steps"]}


def test_a_server_that_stops_ends_the_streams(server, stats):
    with Front(server, f"--stats-file={stats}") as front:
        with front.request("GET", "/live") as response:
            next(events_of(response))
            assert front.stop() == 0
            # The rest of the first event.
            assert response.read() == b"\n"


def opened(browser, front, width=WIDE, dark=False):
    # A URL that differs in what is behind `#` alone would not be loaded again.
    browser.open(f"{front.url}/?{next(VISITS)}#live", width, 800, dark=dark)
    browser.until("document.body.classList.contains('fed')")
    return browser


def run_three(page, front):
    """Three requests, of which two run at a time. Waits until the page shows that they have ended."""
    # The feed begins with the first record after the page has come.
    complete(front, 200)
    page.until("shownRun().steps.length > 0")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda max_tokens: complete(front, max_tokens), [20, 21, 22]))
    page.until("shownRun().isIdle && document.getElementById('state').textContent.startsWith('idle')")


def test_rows_are_the_requests_of_the_file(browser, front, stats):
    page = opened(browser, front)
    run_three(page, front)
    rows = page.evaluate(
        "[...document.querySelectorAll('#requests tbody tr')].map(row => [...row.children].map(cell => cell.textContent))"
    )
    colors = page.evaluate(COLOURS)
    shares = {}
    for record in records(stats):
        for share in record["Requests"]:
            shares.setdefault(share["id"], []).append(share)
    assert len(rows) >= 3
    for (request, stage, context, generated, *_), seen in list(zip(rows, colors))[-3:]:
        own = shares[int(request)]
        assert stage == "ended"
        for name, value in (("context", context), ("generation", generated)):
            assert int(value) == sum(share["tokens"] for share in own if share["stage"] == name)
        # The newest columns have room for all of these steps; a row ends with generation.
        assert seen[-1] == STAGES["generation"] and set(seen) <= {*STAGES.values()}
    assert any(STAGES["context"] in seen for seen in colors)
    assert STAGES["waiting"] in colors[-1]
    figures = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#figures div')].map(e => [...e.children].map(c => c.textContent)))"
    )
    assert figures["Running"] == figures["Waiting"] == "0" and figures["First token"].endswith(" ms")
    blocks = records(stats)[-1]["Max KV cache blocks"]
    assert figures["KV blocks"] == f"0 of {blocks}"


def test_the_picture_can_be_held_with_the_keyboard(browser, front):
    page = opened(browser, front)
    run_three(page, front)
    page.evaluate("document.getElementById('hold').focus()")
    page.press("Enter")
    assert page.evaluate("document.getElementById('hold').ariaPressed") == "true"
    state = page.evaluate("document.getElementById('state').textContent")
    step = page.evaluate("shownRun().last.step")
    complete(front, 40)
    page.until(f"shownRun().last.step > {step} && shownRun().isIdle")
    assert page.evaluate("document.getElementById('state').textContent") == state
    page.press("Space")
    page.until(f"document.getElementById('state').textContent !== {json.dumps(state)}")


@pytest.mark.parametrize("width, dark", [(WIDE, False), (WIDE, True), (NARROW, False)])
def test_what_is_live_is_legible_and_has_names(browser, front, width, dark):
    page = opened(browser, front, width, dark)
    run_three(page, front)
    assert page.evaluate(FAINT) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = page.accessible()
    for expected in [
        ("region", "Live"),
        ("table", "0 requests in flight"),
        ("columnheader", "Request"),
        ("rowheader", "KV cache"),
        ("button", "Hold the picture"),
        ("combobox", "Steps of"),
        ("list", "Colours"),
    ]:
        assert expected in found, f"{expected}\n{found}"
    # In a narrow window one of the two views is there, and the links lead to the other.
    assert page.evaluate("document.getElementById('chat').checkVisibility()") == (width == WIDE)
    if width == NARROW:
        page.evaluate("document.querySelector('nav a').focus()")
        page.press("Enter")
        page.until("document.getElementById('chat').checkVisibility()")
        assert not page.evaluate("document.getElementById('live').checkVisibility()")


def test_slots_and_snapshots_of_recurrent_states_have_rows_below_the_kv_cache(browser, tmp_path):
    file = tmp_path / "hybrid.jsonl"
    checkpoint = {"gpt_model_path": ROOT / "tests" / "fixtures" / "qwen3-5", "max_seq_len": 128, "tokens_per_block": 8}
    few = {"max_state_snapshots": 2, "kv_cache_host_memory_bytes": 1 << 20, "stats_file": file}
    add_model(tmp_path / "repository", "hybrid", {**checkpoint, **few})
    options = {"max_tokens": 20, "ignore_eos": True}
    with Server(tmp_path / "repository") as server, Front(server, f"--stats-file=hybrid={file}") as front:
        page = opened(browser, front)
        for index in range(4):
            streams(server, "hybrid", [([(7 * at + 5 * index) % 100 + 3 for at in range(20)], options)])
            page.until("shownRun()?.steps.length > 0")
        page.until("shownRun().isIdle && document.getElementById('state').textContent.startsWith('idle')")
        page.evaluate("paint()")
        rows = page.evaluate(
            "[...document.querySelectorAll('#requests tfoot tr')].filter(row => !row.hidden)"
            ".map(row => [...row.children].slice(0, 2).map(cell => cell.textContent))"
        )
        last = records(file)[-1]
    kinds = ["KV cache blocks", "state slots", "state snapshots", "host state snapshots"]
    assert [name for name, _ in rows] == ["KV cache", "State slots", "State snapshots", "Snapshots in host memory"]
    for kind, (_, share) in zip(kinds, rows, strict=True):
        expected = 100 * last[f"Used {kind}"] / last[f"Max {kind}"]
        assert expected > 0 and float(share.removesuffix(" %")) == pytest.approx(expected, abs=0.06), kind


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    """A server with two models, and the statistics file of each. In `tight`, three requests of 230 tokens find no room
    beside each other, and the third one waits in pause until another has ended."""
    folder = tmp_path_factory.mktemp("openai_live_two")
    files = {name: folder / f"{name}.jsonl" for name in ("stories", "tight")}
    parameters = {"stories": {}, "tight": {**TIGHT, "enable_kv_cache_reuse": "false"}}
    for name, file in files.items():
        add_model(folder / "repository", name, {**parameters[name], "stats_file": file}, checkpoint=STORIES)
    arguments = [f"--stats-file={name}={file}" for name, file in files.items()]
    with Server(folder / "repository") as server, Front(server, *arguments) as front:
        yield front, files


def choose_run(page, model):
    page.evaluate(f"document.getElementById('run').value = {json.dumps(model)}")
    page.evaluate("document.getElementById('run').dispatchEvent(new Event('change'))")
    page.until("shownRun().isIdle && document.getElementById('state').textContent.startsWith('idle')")
    page.evaluate("paint()")


def test_each_model_has_its_steps_and_paused_requests_are_seen(browser, two_models):
    front, files = two_models
    page = opened(browser, front)
    assert page.evaluate("[...document.querySelectorAll('#run option')].map(option => option.value)") == ["stories", "tight"]
    for model in files:
        complete(front, 2, model)
        page.until(f"runs.get({json.dumps(model)}).steps.length > 0")
    jobs = [("tight", 214), ("tight", 215), ("tight", 216), ("stories", 30), ("stories", 31)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: complete(front, job[1], job[0], ignore_eos=True), jobs))
    seen_paused = {}
    for model, file in files.items():
        choose_run(page, model)
        # The last steps that have a column, and in them the stages of each request.
        heading = page.evaluate("document.querySelector('#requests thead .steps').textContent")
        steps = records(file)[-int(heading.split()[2]) :]
        stages = {}
        for share in itertools.chain.from_iterable(step["Requests"] for step in steps):
            stages.setdefault(str(share["id"]), []).append(share["stage"])
        expected = {id: [STAGES[stage] for stage, _ in itertools.groupby(seen)] for id, seen in stages.items()}
        ids = page.evaluate("[...document.querySelectorAll('#requests tbody tr')].map(row => row.children[0].textContent)")
        assert dict(zip(ids, page.evaluate(COLOURS), strict=True)) == expected
        seen_paused[model] = any("paused" in seen for seen in stages.values())
        counts = page.evaluate("shownRun().steps.map(step => [step.step, step.counts[2]])")
        written = {record["Iteration Counter"]: record["Requests"] for record in records(file)}
        for step, num_paused in counts:
            assert num_paused == sum(share["stage"] == "paused" for share in written[step])
    assert seen_paused == {"stories": False, "tight": True}
