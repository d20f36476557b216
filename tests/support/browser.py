"""A real browser for tests of pages: Chromium without a window, driven by its own protocol over two pipes.

No package and no network is needed.  What a test asks is evaluated beside the page's own scripts, and so also where the
page's content security policy lets nothing else run.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.skips import not_installed

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=not_installed("Chromium"))
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE_S = 120.0  # a machine may be busy


class Browser:
    """One Chromium; made by ``browser``.  events: what the pages told since they were opened, by method."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer, self._number, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._number:
                assert "error" not in heard, heard["error"]
                return dict(heard["result"])
            self.events.append(heard)

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        """A fresh page of ``width`` CSS pixels, once it has loaded."""
        if self._session is not None:
            self.call("Target.closeTarget", targetId=self._target)
            self._session = None
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it is."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """The value of ``expression`` once it is true."""
        end = time.monotonic() + PATIENCE_S
        while not (value := self.ask(expression)):
            assert time.monotonic() < end, f"never came true: {expression}"
            time.sleep(0.05)
        return value

    def move(self, x: float, y: float) -> None:
        """The mouse to a point of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def click(self, selector: str) -> None:
        """The left button in the middle of the first element of ``selector``, scrolled to."""
        self.ask(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        x, y = self.ask(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """The window, or the whole page, as a PNG file."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **({} if not whole else self._all()))
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """What the page's console has: errors, refused scripts, dialogs."""
        told = []
        for event in self.events:
            match event.get("method"), event.get("params"):
                case "Log.entryAdded", {"entry": entry}:
                    told.append(str(entry["text"]))
                case "Runtime.exceptionThrown", {"exceptionDetails": details}:
                    told.append(str(details))
                case "Page.javascriptDialogOpening", {"message": message}:
                    told.append(f"a dialog: {message}")
        return told

    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def _all(self) -> dict[str, Any]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium that ends with the block, and its profile with it."""
    assert CHROMIUM is not None, "the test is marked with needs_chromium"
    with tempfile.TemporaryDirectory(prefix="browser") as profile:
        their_read, write = os.pipe()
        read, their_write = os.pipe()
        started = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=_at_three_and_four(their_read, their_write), close_fds=False, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(their_read)
        os.close(their_write)
        try:
            yield Browser(read, write)
        finally:
            os.close(write)
            os.close(read)
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def _at_three_and_four(read: int, write: int) -> Callable[[], None]:
    """Where Chromium looks for its pipes."""

    def place() -> None:
        copies = os.dup(read), os.dup(write)
        os.dup2(copies[0], 3)
        os.dup2(copies[1], 4)

    return place
