"""The page of the server with OpenAI's API, in a real browser: with the keyboard alone, and as a screen reader finds
it."""

import base64
import io
import json
import os
import random

import pytest

from harness.browser import Browser, BrowserError
from harness.conversations import REPLY, TOOLS, USER, add_calling_model
from harness.front import Front
from harness.repository import SHAPES, STORIES, add_model
from harness.server import Server, assert_blocks_come_back
from shapes import scenes

pytestmark = pytest.mark.complete

CHAT = "/v1/chat/completions"
WIDE, NARROW = 1280, 380
# Elements with text of their own whose contrast with what is behind them is too small (Web Content Accessibility
# Guidelines 2.2, 1.4.3).
FAINT = """(() => {
    const channels = color => color.match(/[\\d.]+/g).map(Number);
    const light = color => channels(color).slice(0, 3)
        .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0.05);
    const behind = element => {
        const color = getComputedStyle(element).backgroundColor;
        return channels(color)[3] === 0 ? behind(element.parentElement) : color;
    };
    return [...document.querySelectorAll('body *')].filter(element => element.checkVisibility()
        && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim())).map(element => {
            const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
            return [element.outerHTML.slice(0, 60), Math.max(a, b) / Math.min(a, b)];
        }).filter(([, contrast]) => contrast < 4.5);
})()"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_page") / "repository"
    add_calling_model(repository, "chat")
    add_model(repository, "stories", checkpoint=STORIES)
    add_model(repository, "shapes", checkpoint=SHAPES)
    with Server(repository) as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with Browser(os.environ["CHROMIUM"]) as browser:
        yield browser


@pytest.fixture
def page(browser, front):
    return opened(browser, front)


def opened(browser, front, width=WIDE, dark=False):
    """The page with its models."""
    browser.open(front.url, width, 800, dark=dark)
    browser.until("document.querySelectorAll('#model option').length === 3")
    return browser


def choose(page, model, **fields):
    """Sets the model, and the other fields of requests."""
    page.evaluate(f"document.getElementById('model').value = {json.dumps(model)}")
    page.evaluate(f"document.getElementById('fields').value = {json.dumps(json.dumps(fields))}")


def send(page, text):
    page.type(text)
    page.press("Enter")


def wait_for_end(page):
    page.until("document.getElementById('log').ariaBusy === 'false'")


def texts(page, kind):
    """The texts of the messages of this kind."""
    return page.evaluate(f"[...document.querySelectorAll('#log .{kind} > .text')].map(element => element.textContent)")


def focus(page):
    return page.evaluate("document.activeElement.id")


def label(page):
    """The label of what has the focus."""
    return page.evaluate("document.activeElement.labels?.[0].firstChild.textContent")


def test_a_conversation_needs_only_the_keyboard(page, front):
    choose(page, "stories", max_tokens=40)
    assert focus(page) == "message"
    messages = []
    for lines in (["Tell me a story", "about a fox."], ["And a bear?"]):
        for line in lines[:-1]:
            page.type(line)
            page.press("Enter", shift=True)
        send(page, lines[-1])
        wait_for_end(page)
        messages.append({"role": "user", "content": "\n".join(lines)})
        answer = front.post(CHAT, model="stories", messages=messages, max_tokens=40)
        messages.append(answer["choices"][0]["message"])
        assert texts(page, "assistant")[-1] == messages[-1]["content"]
    assert texts(page, "user") == [messages[0]["content"], messages[2]["content"]]
    figures = page.evaluate("document.querySelector('#log .assistant .figures').textContent")
    assert figures.startswith("40 tokens · first after ") and figures.endswith("cut off at the limit")
    # What is said aloud is the answer, once it is whole.
    assert messages[-1]["content"] in page.evaluate("document.getElementById('status').textContent")


def test_settings_are_those_of_the_request(page, front):
    choose(page, "chat", seed=5)
    for field, value in (("temperature", "0.9"), ("max-tokens", "9"), ("system", "You are a bear.")):
        page.evaluate(f"document.getElementById('{field}').value = '{value}'")
    send(page, "Hello")
    wait_for_end(page)
    messages = [{"role": "system", "content": "You are a bear."}, {"role": "user", "content": "Hello"}]
    answer = front.post(CHAT, model="chat", messages=messages, max_tokens=9, temperature=0.9, seed=5)
    assert texts(page, "assistant") == [answer["choices"][0]["message"]["content"]]


def test_escape_cancels_the_answer(page, server):
    choose(page, "stories", min_tokens=5000)
    send(page, "Tell me a story")
    page.until("document.querySelector('#log .assistant .text')?.textContent.length > 20")
    page.press("Escape")
    wait_for_end(page)
    assert page.evaluate("document.querySelector('#log .figures').textContent").endswith("stopped")
    assert_blocks_come_back(server, "stories")
    assert focus(page) == "message"


def test_the_stop_button_is_reached_with_the_tab_key(page):
    choose(page, "stories", min_tokens=5000)
    send(page, "Tell me a story")
    page.until("document.querySelector('#log .assistant .text')?.textContent.length > 20")
    page.press("Tab")
    assert focus(page) == "stop"
    page.press("Space")
    wait_for_end(page)
    assert page.evaluate("document.querySelector('#log .figures').textContent").endswith("stopped")


def test_thoughts_and_calls_have_places_of_their_own(page):
    choose(page, "chat", tools=TOOLS, guided_choice=[REPLY])
    send(page, "Tell me a story about a fox.")
    wait_for_end(page)
    assert page.evaluate("document.querySelector('.reasoning .text').textContent.trim()") == "A fox?"
    assert page.evaluate("document.querySelector('.reasoning').open") is False
    assert [text.strip() for text in texts(page, "assistant")] == ["Let me see."]
    calls = page.evaluate("[...document.querySelectorAll('.call')].map(call => [...call.querySelectorAll('h3, pre')].map(e => e.textContent))")
    assert [(name, json.loads(given)) for name, given in calls] == [
        ("Calls weather", {"city": "Oslo"}),
        ("Calls weather", {"city": "Rome"}),
    ]


def test_results_of_calls_are_written_with_the_keyboard(page, front):
    choose(page, "chat", guided_choice=[REPLY])
    page.evaluate("document.getElementById('settings').open = true")
    page.evaluate("document.getElementById('tools').focus()")
    page.type(json.dumps(TOOLS))
    page.evaluate("document.getElementById('message').focus()")
    send(page, "Is it warm?")
    wait_for_end(page)
    assert "Calls weather with" in page.evaluate("document.getElementById('status').textContent")
    assert page.evaluate("document.querySelector('#log .figures').textContent").endswith("waits for results")
    assert label(page) == "Result of call 1, weather"
    choose(page, "chat", max_tokens=12)
    page.type("Rain,")
    page.press("Enter", shift=True)
    page.type("4 degrees.")
    page.press("Enter")
    assert label(page) == "Result of call 2, weather"
    page.type("Sun.")
    page.press("Enter")
    wait_for_end(page)
    assert focus(page) == "message"
    assert page.evaluate("document.querySelectorAll('.result').length") == 0
    shown = page.evaluate("[...document.querySelectorAll('.call > .text')].map(element => element.textContent)")
    assert shown == ["Rain,\n4 degrees.", "Sun."]
    # The next message follows the results.
    send(page, "Thanks.")
    wait_for_end(page)
    messages = page.evaluate("messages")
    assert [message["role"] for message in messages] == "user assistant tool tool assistant user assistant".split()
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert len({*ids}) == 2
    assert messages[2:4] == [
        {"role": "tool", "tool_call_id": id, "content": content} for id, content in zip(ids, shown, strict=True)
    ]
    for end in (4, 6):
        answer = front.post(CHAT, model="chat", messages=messages[:end], tools=TOOLS, max_tokens=12)
        assert answer["choices"][0]["message"]["content"] == messages[end]["content"] == texts(page, "assistant")[end // 2 - 1]


def test_a_call_that_must_be_waits_for_its_result(page):
    choose(page, "chat", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=300)
    send(page, USER["content"])
    wait_for_end(page)
    found = page.accessible()
    for expected in (("textbox", "Result of weather"), ("button", "Send result"), ("heading", "Calls weather")):
        assert expected in found, f"{expected}\n{found}"
    # A refusal leaves everything to be sent again.
    page.type("Rain.")
    choose(page, "chat", tools=TOOLS, temperature=101)
    page.press("Tab")
    page.press("Space")
    wait_for_end(page)
    assert "'temperature'" in page.evaluate("document.getElementById('error').textContent")
    assert label(page) == "Result of weather"
    assert page.evaluate("[document.activeElement.value, document.activeElement.readOnly, messages.length]") == ["Rain.", False, 2]
    # Another message goes on without the result.
    page.evaluate("document.getElementById('message').focus()")
    choose(page, "chat", max_tokens=5)
    send(page, "Never mind.")
    wait_for_end(page)
    assert page.evaluate("messages.map(message => message.role)") == "user assistant user assistant".split()
    assert page.evaluate("document.querySelectorAll('.result, .call > .text').length") == 0


@pytest.mark.parametrize("text", ['{"type": "function"}', "[{]"])
def test_tools_that_are_no_list_are_named(page, text):
    page.evaluate(f"document.getElementById('tools').value = {json.dumps(text)}")
    send(page, "Hello")
    assert page.evaluate("document.getElementById('error').textContent").startswith("Tools: ")
    assert page.evaluate("document.getElementById('message').value") == "Hello"


def test_text_is_never_html(page):
    attack = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    choose(page, "chat", guided_choice=[attack])
    send(page, attack)
    wait_for_end(page)
    assert texts(page, "user") == texts(page, "assistant") == [attack]
    assert page.evaluate("document.querySelectorAll('img, script').length") == 1
    with pytest.raises(BrowserError, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b></b>'")
    with pytest.raises(BrowserError, match="fetch"):
        page.evaluate("fetch('http://127.0.0.1:1/').then(() => 0)")


@pytest.mark.parametrize("way", ["paste", "drop", "file"])
def test_images_come_by_paste_drop_and_file(page, way):
    scene = scenes.Scene(random.Random(21))
    file = io.BytesIO()
    scene.draw().save(file, "PNG")
    give = {
        "paste": "at('message').dispatchEvent(new ClipboardEvent('paste', {clipboardData: given, bubbles: true, cancelable: true}))",
        "drop": "at('scroll').dispatchEvent(new DragEvent('drop', {dataTransfer: given, bubbles: true, cancelable: true}))",
        "file": "(at('files').files = given.files, at('files').dispatchEvent(new Event('change')))",
    }[way]
    page.evaluate(f"""(() => {{
        const given = new DataTransfer();
        const bytes = Uint8Array.from(atob('{base64.b64encode(file.getvalue()).decode()}'), (c) => c.charCodeAt(0));
        given.items.add(new File([bytes], 'drawing.png', {{type: 'image/png'}}));
        given.items.add(new File(['text'], 'notes.txt', {{type: 'text/plain'}}));
        {give};
    }})()""")
    shown = "[...document.querySelectorAll('#attached img')].map(image => [image.alt, image.naturalWidth])"
    page.until(f"{shown}[0]?.[1] === 64")
    assert page.evaluate(shown) == [["drawing.png", 64]]
    assert ("button", "Remove drawing.png") in page.accessible()
    choose(page, "shapes", max_tokens=60)
    page.evaluate("document.getElementById('message').focus()")
    send(page, "What is in the picture?")
    wait_for_end(page)
    assert page.evaluate("document.getElementById('error').textContent") == ""
    assert texts(page, "assistant") == [scenes.sentence(scene.description())]
    assert page.evaluate("[document.querySelectorAll('#log .user img').length, document.querySelectorAll('#attached img').length]") == [1, 0]


def test_an_image_can_be_taken_out_again(page):
    page.evaluate("""(() => {
        const given = new DataTransfer();
        given.items.add(new File(['GIF89a'], 'a.gif', {type: 'image/gif'}));
        at('chat').dispatchEvent(new DragEvent('drop', {dataTransfer: given, bubbles: true, cancelable: true}));
    })()""")
    page.until("document.querySelectorAll('#attached img').length === 1")
    page.evaluate("document.querySelector('#attached button').click()")
    assert page.evaluate("document.querySelectorAll('#attached img').length") == 0
    assert focus(page) == "message"


def test_a_refusal_is_an_alert_and_keeps_the_message(page):
    choose(page, "stories", temperature=101)
    send(page, "Hello")
    wait_for_end(page)
    assert "'temperature'" in page.evaluate("document.getElementById('error').textContent")
    assert page.evaluate("document.getElementById('message').value") == "Hello"
    assert texts(page, "user") == []
    choose(page, "stories", max_tokens=3)
    page.press("Enter")
    wait_for_end(page)
    assert page.evaluate("document.getElementById('error').textContent") == ""
    assert len(texts(page, "assistant")) == 1


def test_a_server_with_keys_asks_for_one(browser, server, tmp_path):
    (tmp_path / "keys").write_text("sk-fox\n")
    with Front(server, f"--api-key-file={tmp_path / 'keys'}") as front:
        browser.open(front.url, WIDE, 800)
        browser.until("document.getElementById('error').textContent.includes('no key')")
        assert browser.evaluate("document.getElementById('key-row').checkVisibility()")
        browser.evaluate("document.getElementById('key').focus()")
        send(browser, "sk-fox")
        browser.until("document.querySelectorAll('#model option').length === 3")
        assert browser.evaluate("document.getElementById('error').textContent") == ""


def test_a_screen_reader_finds_everything(page):
    choose(page, "stories", max_tokens=5)
    send(page, "Hello")
    wait_for_end(page)
    page.evaluate("document.getElementById('settings').open = true")
    found = page.accessible()
    for expected in [
        ("main", ""),
        ("banner", ""),
        ("heading", "inflight"),
        ("combobox", "Model"),
        ("textbox", "Message"),
        ("button", "Send"),
        ("button", "New conversation"),
        ("spinbutton", "Temperature"),
        ("spinbutton", "Most tokens"),
        ("textbox", "System message"),
        ("textbox", "Tools, as a JSON list"),
        ("heading", "You"),
        ("heading", "stories"),
        ("alert", ""),
        ("status", ""),
    ]:
        assert expected in found, f"{expected}\n{found}"
    controls = [name for role, name in found if role in ("button", "textbox", "combobox", "spinbutton", "link")]
    assert all(controls) and len({*controls}) == len(controls), controls


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_texts_are_legible_and_nothing_leaves_the_window(browser, front, width, dark):
    page = opened(browser, front, width, dark)
    choose(page, "chat", guided_choice=[REPLY], tools=TOOLS)
    send(page, "a" * 300)
    wait_for_end(page)
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    page.evaluate("showError('Something is wrong.')")
    assert page.evaluate(FAINT) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    is_light, color = page.evaluate("[matchMedia('(prefers-color-scheme: light)').matches, getComputedStyle(document.body).backgroundColor]")
    assert (is_light, color) == ((False, "rgb(22, 25, 29)") if dark else (True, "rgb(255, 255, 255)"))
