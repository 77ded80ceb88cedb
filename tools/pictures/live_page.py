"""live_page.py FILE: a picture of the page of `inflight-openai` while a real server answers, as a PNG file.

`cargo xtask pictures --live-page` runs it.
"""

import concurrent.futures
import os
import pathlib
import sys
import tempfile

from harness.browser import Browser
from harness.front import Front
from harness.repository import STORIES, add_model
from harness.server import Server

WIDTH, HEIGHT = 1280, 640
QUESTION = "Tell me a story about a fox."
# Few at a time, so that some wait, and without prefixes, so that contexts are seen.
PARAMETERS = {"max_num_requests": 6, "enable_kv_cache_reuse": "false"}
HEROES = ["dog", "cat", "bear", "bird", "frog", "mouse", "rabbit", "duck", "lion", "fish"]


def tell(front, hero, max_tokens):
    """A story that somebody else asks for."""
    messages = [{"role": "user", "content": f"Tell me a story about a {hero}."}]
    front.post("/v1/chat/completions", model="stories", messages=messages, max_tokens=max_tokens)


def main(file):
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor() as pool:
        repository, stats = pathlib.Path(folder) / "repository", pathlib.Path(folder) / "steps.jsonl"
        add_model(repository, "stories", {**PARAMETERS, "stats_file": stats}, checkpoint=STORIES)
        with Server(repository) as server, Front(server, f"--stats-file=stories={stats}") as front:
            with Browser(os.environ["CHROMIUM"]) as page:
                page.open(front.url, WIDTH, HEIGHT)
                page.until("document.body.classList.contains('fed')")
                # The feed begins with the first record after the page has come.
                tell(front, "fox", 20)
                page.until("shownRun().steps.length > 0")
                page.evaluate("document.getElementById('message').focus()")
                page.type(QUESTION)
                page.press("Enter")
                stories = [pool.submit(tell, front, hero, 60 + 12 * i) for i, hero in enumerate(HEROES)]
                page.until("document.querySelectorAll('#requests tbody tr').length > 8 && shownRun().steps.length > 60")
                page.evaluate("document.getElementById('hold').click()")
                page.evaluate("document.activeElement.blur()")
                pathlib.Path(file).write_bytes(page.screenshot(WIDTH, HEIGHT))
                for story in stories:
                    story.result()


main(sys.argv[1])
