"""A headless Chromium, driven over a pipe: opens a page at a width, light or dark, and tells what it says and shows."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S, until

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


def chromium() -> str:
    """Return the browser's path; the test skips where there is none, which conftest.py does not allow under CI."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no chromium here: tests/run.sh installs it as root on Debian and Ubuntu")
    return found


class Page:
    """One page of a browser; it keeps what the page complained about and asked the network for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session)

    def open(self, file: Path, width: int, height: int, dark: bool) -> None:
        """Show a file; returns once its script has drawn it, or has failed."""
        self.complaints.clear()
        self.requests.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=file.as_uri())
        drawn = "document.readyState === 'complete' && (document.documentElement.dataset.ready || 'no')"
        until(lambda: self.value(drawn) not in ("", False, "no") or self.complaints, f"the drawing of {file}", 0.05)

    def value(self, expression: str) -> Any:
        """Return the value of an expression, as JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def heard(self, method: str, stated: dict[str, Any]) -> None:
        """Note an event."""
        if method == "Runtime.exceptionThrown":
            details = stated["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        if method == "Runtime.consoleAPICalled" and stated["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([each.get("value") for each in stated["args"]]))
        if method == "Log.entryAdded" and stated["entry"]["level"] in ("error", "warning"):
            self.complaints.append(stated["entry"]["text"])
        if method == "Network.requestWillBeSent":
            self.requests.append(stated["request"]["url"][:200])
        if method == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialog: {stated['message']}")
            self._browser.send("Page.handleJavaScriptDialog", {"accept": True}, self._session)


class Browser:
    """The process, and the messages to and from it: JSON ended by a null byte (`--remote-debugging-pipe`)."""

    def __init__(self, profile: Path) -> None:
        self._in, answers = os.pipe()
        questions, self._out = os.pipe()
        # Chromium's ends are 3 and 4 there: first beyond both, so that neither takes the other's place.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (questions, answers)]
        wired = 'exec 3<&{0} 4>&{1} {0}<&- {1}>&-; exec "$@"'.format(*theirs)
        command = ["bash", "-c", wired, "-", chromium(), *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile)},
            start_new_session=True,
        )
        for end in (questions, answers, *theirs):
            os.close(end)
        self._text = b""
        self._last = 0
        self._pages: dict[str, Page] = {}

    def page(self) -> Page:
        """A new page."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        return page

    def send(self, method: str, parameters: dict[str, Any], session: str = "") -> int:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        return self._last

    def call(
        self, method: str, parameters: dict[str, Any], session: str = "", limit_s: float = HANG_S
    ) -> dict[str, Any]:
        """Call a method and return its answer; AssertionError when it fails or takes longer."""
        number, end = self.send(method, parameters, session), time.monotonic() + limit_s
        while True:
            message = self._receive(end, method)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            if (page := self._pages.get(message.get("sessionId", ""))) and "method" in message:
                page.heard(message["method"], message["params"])

    def _receive(self, end: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._text:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"chromium did not answer {method}"
            data = os.read(self._in, 1 << 20)
            assert data, "chromium has ended"
            self._text += data
        text, _, self._text = self._text.partition(b"\0")
        return dict(json.loads(text))

    def close(self) -> None:
        """End it, with all of its processes."""
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close", {}, limit_s=10)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(HANG_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)


@contextlib.contextmanager
def open_page(profile: Path) -> Iterator[Page]:
    """A page of a browser that ends with the block."""
    browser = Browser(profile)
    try:
        yield browser.page()
    finally:
        browser.close()
