"""A headless Chromium, controlled over its debugging pipe: loads, inspects and reads pages.

The protocol (https://chromedevtools.github.io/devtools-protocol/) is JSON messages, each terminated by a zero
byte, on two file descriptors that the browser inherits. No port is opened.
"""

import base64
import fcntl
import json
import os
import pathlib
import select
import subprocess
import tempfile
import time

from harness.server import die_with_parent

ANSWER_TIMEOUT_S = 60
# No GPU, no sandbox (it requires a user other than root), no network access.
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--no-zygote",
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
    "about:blank",
)
TO_BROWSER, FROM_BROWSER = 3, 4


class BrowserError(Exception):
    """The browser returned an error, did not answer, or a script in the page threw."""


class Browser:
    """A running Chromium with one page; a context manager. `folder` is where `setup::browser` unpacked it."""

    def __init__(self, folder):
        folder = pathlib.Path(folder)
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._commands = os.pipe()
        self._messages, messages = os.pipe()
        environment = {
            "PATH": os.defpath,
            "HOME": self._profile.name,
            "LD_LIBRARY_PATH": str(folder / "lib"),
            "FONTCONFIG_FILE": str(folder / "fonts.conf"),
        }
        self._log = open(pathlib.Path(self._profile.name) / "log", "w+b")
        self._process = subprocess.Popen(
            [folder / "chromium", *ARGUMENTS, f"--user-data-dir={self._profile.name}"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            close_fds=False,
            preexec_fn=lambda: (die_with_parent(), _place(commands, messages)),
        )
        os.close(commands)
        os.close(messages)
        self._buffer = b""
        self._last_id = 0
        self._session = None
        target = self._call("Target.getTargets")["targetInfos"][0]["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._messages)
        self._log.close()
        self._profile.cleanup()

    def open(self, path, width, height, *, dark=False):
        """Loads a file, or a URL, into a window of this size, in the light or the dark theme."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[theme])
        url = path if str(path).startswith("http") else pathlib.Path(path).resolve().as_uri()
        error = self._call("Page.navigate", url=url).get("errorText")
        if error:
            raise BrowserError(f"{path}: {error}")
        self._until("Page.loadEventFired")

    def evaluate(self, script):
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def until(self, script):
        """Waits until a JavaScript expression in the page is true."""
        waits = f"""new Promise((found, failed) => {{
            const last = performance.now() + {(ANSWER_TIMEOUT_S - 5) * 1000};
            const look = () => {{
                if ({script}) found(true);
                else if (performance.now() > last) failed(new Error({json.dumps("never true: " + script)}));
                else setTimeout(look, 10);
            }};
            look();
        }})"""
        self.evaluate(waits)

    def type(self, text):
        """Types a text where the focus is."""
        self._call("Input.insertText", text=text)

    def press(self, key, *, shift=False):
        """Presses a key, and lets it go: `Tab`, `Enter`, `Escape`, `Space`."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, ""), "Space": (32, " ")}[key]
        pressed = {"key": text if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
        pressed["modifiers"] = 8 if shift else 0
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self._call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def accessible(self):
        """What a screen reader finds: (role, name) of every node that it does not skip."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        seen = [node for node in nodes if not node["ignored"]]
        return [(node["role"]["value"], node.get("name", {}).get("value", "").strip()) for node in seen]

    def screenshot(self, width, height):
        """The page's upper left `width` x `height` pixels as painted, as the bytes of a PNG file."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def _call(self, method, **parameters):
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        answer = self._next(lambda message: message.get("id") == self._last_id)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _until(self, event):
        self._next(lambda message: message.get("method") == event)

    def _next(self, wanted):
        """The next wanted message; messages before it are dropped."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            *messages, self._buffer = self._buffer.split(b"\0")
            for i, message in enumerate(map(json.loads, messages)):
                if wanted(message):
                    self._buffer = b"".join(m + b"\0" for m in messages[i + 1 :]) + self._buffer
                    return message
            ready, _, _ = select.select([self._messages], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._messages, 1 << 20) if ready else b""
            if not data:
                raise BrowserError(f"no answer from the browser\n{self._log_tail()}")
            self._buffer += data

    def _log_tail(self):
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]


def _place(commands, messages):
    """In the child: moves the two pipes to the descriptors that the browser expects."""
    # To free descriptors first: either may have the number that the other needs.
    commands = fcntl.fcntl(commands, fcntl.F_DUPFD, FROM_BROWSER + 1)
    messages = fcntl.fcntl(messages, fcntl.F_DUPFD, FROM_BROWSER + 1)
    os.dup2(commands, TO_BROWSER)
    os.dup2(messages, FROM_BROWSER)
