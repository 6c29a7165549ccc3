"""A headless Chromium that tests look at pages with, driven over a pair of pipes by its debugging protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE_S = 60.0


class Browser:
    """One page of a running Chromium."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._number, self._session = to, back, b"", 0, ""
        self.said: list[str] = []
        """What the page and the browser wrote to the console, and scripts' errors."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of that size and wait until it is there."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url="about:blank")  # an address that differs behind the # alone loads nothing
        self._call("Page.navigate", url=address)
        while not self.run(f"document.readyState === 'complete' && location.href === {json.dumps(address)}"):
            time.sleep(0.01)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page, a promise's once it is kept."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press a key: Tab or Enter."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._take()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _take(self) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], until - time.monotonic())
            read = os.read(self._back, 1 << 20) if ready else b""
            assert read, "Chromium has ended, or says nothing"
            self._rest += read
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        kind, said = message.get("method", ""), message.get("params", {})
        if kind == "Runtime.consoleAPICalled":
            self.said.append(str([argument.get("value") for argument in said["args"]]))
        elif kind == "Runtime.exceptionThrown":
            self.said.append(str(said["exceptionDetails"]))
        elif kind == "Log.entryAdded":
            self.said.append(said["entry"]["text"])
        return message


@contextmanager
def browsing(program: str, folder: Path) -> Iterator[Browser]:
    """Start Chromium with a profile in that folder; it ends with the block."""
    there, to = os.pipe()
    back, here = os.pipe()

    def wire() -> None:  # Chromium reads from descriptor 3 and writes to 4
        for kept, wanted in ((os.dup(there), 3), (os.dup(here), 4)):
            os.dup2(kept, wanted)

    started = subprocess.Popen(
        [program, *_FLAGS, f"--user-data-dir={folder}"], preexec_fn=wire, close_fds=False,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(there)
    os.close(here)
    try:
        yield Browser(to, back)
    finally:
        started.kill()
        started.wait()
        os.close(to)
        os.close(back)
