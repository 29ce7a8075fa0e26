"""A headless Chromium of the tests, spoken to over two pipes: real keys, real widths, light and
dark, pictures."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
#: What continuous integration must not do without, as ``.ci/run`` says: there a test fails and does
#: not skip.
REQUIRED = {n for n in ("BROWSER", "AXE") if os.environ.get(f"HEADPRUNE_{n}") == "required"}
#: Far above what a page takes on a slow machine with other work.
_PATIENCE = 120.0
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--hide-scrollbars", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-dev-shm-usage"),
)
_KEYS = {"Enter": ("\r", 13), " ": (" ", 32), "Tab": ("", 9), "Escape": ("", 27)}
_KEYS |= {"Home": ("", 36), "End": ("", 35)}
_KEYS |= {f"Arrow{way}": ("", code) for code, way in enumerate(("Left", "Up", "Right", "Down"), 37)}


class Browser:
    """One page at a time, in a browser with a profile of its own; a context manager.

    ``messages`` collects what the page wrote into the console, its uncaught errors and what its
    policy refused.
    """

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(
            prefix="headprune-chromium-", ignore_cleanup_errors=True
        )
        to_read, self.write_end = os.pipe()
        self.read_end, to_write = os.pipe()

        def place():  # Chromium reads commands from 3 and writes answers to 4
            os.dup2(to_read, 63)
            os.dup2(to_write, 64)
            os.dup2(63, 3)
            os.dup2(64, 4)

        command = [
            CHROMIUM,
            *_FLAGS,
            "--remote-debugging-pipe",
            f"--user-data-dir={self.profile.name}",
            "about:blank",
        ]
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.process = subprocess.Popen(command, preexec_fn=place, close_fds=False, **quiet)
        os.close(to_read)
        os.close(to_write)
        self.number, self.held, self.session = 0, b"", None
        self.messages = []
        self.loaded = False
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.process.terminate()
        self.process.wait(_PATIENCE)
        os.close(self.read_end)
        os.close(self.write_end)
        self.profile.cleanup()

    def call(self, method, **arguments):
        """One command of the DevTools protocol, and its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": arguments}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self):
        """The next message; events are noted on the way."""
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self.held:
            ready, _, _ = select.select([self.read_end], [], [], max(end - time.monotonic(), 0))
            assert ready, "Chromium does not answer"
            part = os.read(self.read_end, 1 << 16)
            assert part, "Chromium is gone"
            self.held += part
        line, _, self.held = self.held.partition(b"\0")
        message = json.loads(line)
        method, values = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.messages.append(
                " ".join(str(a.get("value", a.get("description"))) for a in values["args"])
            )
        elif method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(values["exceptionDetails"])[:2000])
        elif method == "Log.entryAdded":
            self.messages.append(values["entry"]["text"])
        elif method == "Page.loadEventFired":
            self.loaded = True
        return message

    def open(self, path, width=1280, height=900, dark=False):
        """Opens a file at a width, in light or dark, and waits until it is there."""
        self.messages.clear()
        self.size(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self.loaded:
            self._next()

    def size(self, width, height=900):
        """The window's size in CSS pixels."""
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **shape)

    def run(self, expression):
        """The value of a JavaScript expression in the page; a promise is waited for."""
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def press(self, *keys):
        """Real key strokes, one after the other, to whatever has the focus."""
        for key in keys:
            text, code = _KEYS[key]
            pressed = {"key": key, "code": "Space" if key == " " else key}
            pressed["windowsVirtualKeyCode"] = code
            down = "keyDown" if text else "rawKeyDown"
            self.call("Input.dispatchKeyEvent", type=down, text=text, **pressed)
            self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)
            self._settle()

    def click(self, selector):
        """A real click on the middle of the first element of a selector, scrolled into view."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{place}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y = self.run(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])({place}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self._settle()

    def _settle(self):
        """Waits until the page has drawn what a key or a click brought: the events that it queued
        are over."""
        frame = "requestAnimationFrame(() => setTimeout(done))"
        self.run(
            f"new Promise(seen => {{ const done = () => {frame.replace('done', 'seen')};"
            f" {frame} }})"
        )

    def picture(self, path, whole=True):
        """A PNG of the whole page, or of what the window shows."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path
