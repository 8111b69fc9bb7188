"""Headless Chromium, driven over its DevTools protocol as somebody with a keyboard would."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

HANGS_AFTER_S = 60.0
"""Far more than anything here needs."""

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
_KEYS = {"Enter": 13, "Tab": 9, "ArrowDown": 40}


def find_chromium() -> str | None:
    """The command of an installed Chromium."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def chromium(command: str, profile: Path) -> Iterator[str]:
    """The address at which a Chromium takes commands while it runs."""
    flags = [*_FLAGS, "--no-proxy-server", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    with subprocess.Popen(
        [command, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            found = next(filter(None, (re.search(r"DevTools listening on (\S+)", line) for line in lines)))
            drain = threading.Thread(target=process.stderr.read)
            drain.start()
            yield found[1]
        finally:
            process.terminate()
            process.wait()
        drain.join()


@contextmanager
def tab(address: str) -> Iterator[Browser]:
    """A new tab of the Chromium at `address`."""
    with connect(address, max_size=None, proxy=None) as connection:
        yield Browser(connection)


class Browser:
    """One tab of a running Chromium, and what it reported."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._last = 0
        self._session: str | None = None
        self.requested: list[str] = []
        """Addresses that the page asked for."""
        self.problems: list[str] = []
        """Exceptions, refusals by the page's policy, and errors in the console."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command; events that come meanwhile are noted."""
        self._last += 1
        command = {"id": self._last, "method": method, "params": params}
        self._connection.send(json.dumps(command | ({"sessionId": self._session} if self._session else {})))
        while True:
            message = json.loads(self._connection.recv(timeout=HANGS_AFTER_S))
            if message.get("id") == self._last:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + HANGS_AFTER_S
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}; {self.problems}; {self.text('#status')!r}"
            time.sleep(0.01)

    def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")
        self.until("document.querySelector('#models').textContent !== ''")

    def press(self, key: str, *, control: bool = False) -> None:
        text = {"Enter": "\r"}.get(key, "") if not control else ""
        event = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": _KEYS[key],
            "modifiers": 2 if control else 0,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def texts(self, selector: str) -> list[str]:
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")

    @property
    def focus(self) -> str:
        return self.run("document.activeElement.id || document.activeElement.textContent")

    def ask(self, prompt: str) -> None:
        """Send a prompt as somebody with a keyboard does, and wait for the end of it."""
        self.run("document.querySelector('#prompt').select()")
        self.type(prompt)
        self.press("Enter", control=True)
        self.until("document.querySelector('#form').getAttribute('aria-busy') === 'false'")
