"""A real headless Chromium for tests: opens a local page and tells what a reader would see.

Speaks the DevTools protocol over the browser's own pipe (``--remote-debugging-pipe``), so no client library is needed.
Source: https://chromedevtools.github.io/devtools-protocol (domains Page, Runtime, Log, Network, Emulation).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_CHROMIUM = "no chromium on PATH: install the package `chromium`"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
_TIMEOUT_S = 60.0


@dataclass
class Page:
    """One loaded page. ``messages``: console output, exceptions and log entries; ``requests``: URLs it asked for."""

    browser: Browser
    session: str
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def evaluate(self, script: str) -> Any:
        """The JSON value of a JavaScript expression in the page; raises AssertionError where it throws."""
        answer = self.browser.call("Runtime.evaluate", self.session, expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> Path:
        """The whole page, below the fold too, as PNG."""
        shot = self.browser.call("Page.captureScreenshot", self.session, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path


class Browser:
    """A context manager: starts Chromium with a fresh profile, ends it (and only it) at the end."""

    def __init__(self, profile: Path) -> None:
        self._profile, self._number, self._buffer = profile, 0, b""
        self._pages: dict[str, Page] = {}
        self._loaded: set[str] = set()

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None, NO_CHROMIUM
        # far above 3 and 4, the numbers that the browser expects its two ends at
        (read, self._out), (self._in, write) = (_pipe_above_10() for _ in range(2))
        arguments = [CHROMIUM, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", *arguments]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(shell, pass_fds=(read, write), stdin=quiet, stdout=quiet, stderr=quiet)
        os.close(read)
        os.close(write)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # gone already
            self.call("Browser.close")
        os.close(self._in)
        os.close(self._out)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(self, path: Path, width: int, *, dark: bool = False) -> Page:
        """Load a local file in a window ``width`` CSS pixels wide and wait until it is drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, features=[scheme])
        self.call("Page.navigate", session, url=path.resolve().as_uri())
        while session not in self._loaded:
            self._handle(self._receive())
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that arrive meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._handle(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"chromium has not answered for {_TIMEOUT_S:g} s"
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise BrokenPipeError("chromium has ended")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _handle(self, event: dict[str, Any]) -> None:
        page, told = self._pages.get(event.get("sessionId", "")), event.get("params", {})
        if page is None:
            return
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded.add(page.session)
            case "Network.requestWillBeSent":
                page.requests.append(told["request"]["url"])
            case "Runtime.consoleAPICalled":
                page.messages.append(f"{told['type']}: {[one.get('value') for one in told['args']]}")
            case "Runtime.exceptionThrown":
                page.messages.append(f"exception: {told['exceptionDetails']['text']}")
            case "Log.entryAdded":
                page.messages.append(f"{told['entry']['level']}: {told['entry']['text']}")


def _pipe_above_10() -> tuple[int, int]:
    """A pipe (read end, write end) whose descriptors are at least 10."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return high[0], high[1]
