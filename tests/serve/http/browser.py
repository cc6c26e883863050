"""Drives a headless Chromium over its debugging pipe: enough to type, press keys, evaluate and take pictures.

Source: https://chromedevtools.github.io/devtools-protocol/; messages are JSON, each ended by a zero byte, on file
descriptors 3 (to the browser) and 4 (from it).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-extensions", "--remote-debugging-pipe")  # fmt: skip


class Page:
    """One page; ``close`` ends the browser."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        from_us, self._to = os.pipe()
        self._from, to_us = os.pipe()
        # the browser wants them as 3 and 4; a shell puts them there
        command = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._rest = b""
        self._num_sent = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        self.ask("Browser.close")
        self._process.wait(20)
        os.close(self._to)
        os.close(self._from)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (got := self._next()).get("id") != self._num_sent:
            self._note(got)
        assert "error" not in got, got
        return dict(got["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 16)
            assert data, "the browser is gone"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        """What the page's console would show in red."""
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str, seconds: float = 15.0) -> None:
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, f"never true: {expression}; {self.value('document.body.innerText')}"
            time.sleep(0.05)

    def press(self, key: str, text: str = "") -> None:
        codes = {"Enter": 13, "Tab": 9, "ArrowRight": 39, "ArrowDown": 40}
        down = {"type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        self.ask("Input.dispatchKeyEvent", **down, **({"text": text} if text else {}))
        self.ask("Input.dispatchKeyEvent", **{**down, "type": "keyUp"})

    def write(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    def prefer(self, scheme: str) -> None:
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, width: int = 1200, height: int = 1100) -> bytes:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
