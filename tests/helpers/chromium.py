"""A headless Chromium, driven by its DevTools protocol through two pipes, without a package."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATH = shutil.which("chromium") or shutil.which("google-chrome") or ""


class Page:
    """A page of a browser. Messages are JSON, and each ends with a zero byte."""

    def __init__(self, send: int, receive: int) -> None:
        self.send, self.receive = send, os.fdopen(receive, "rb")
        self.numbers = itertools.count(1)
        self.session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": found["sessionId"]}

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol -> its result. Events are left out."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params, **self.session}
        os.write(self.send, json.dumps(message).encode() + b"\0")
        while True:
            answer: dict[str, Any] = json.loads(b"".join(iter(self._byte, b"\0")))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _byte(self) -> bytes:
        byte = self.receive.read(1)
        assert byte, "the browser has ended"
        return byte

    def evaluate(self, code: str) -> Any:
        """Return the value of a JavaScript expression. A promise is awaited."""
        options = {"awaitPromise": True, "returnByValue": True}
        found = self.call("Runtime.evaluate", expression=code, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str, seconds: int = 120) -> None:
        """Wait until a JavaScript expression is true."""
        for _ in range(10 * seconds):
            if self.evaluate(condition):
                return
            self.evaluate("new Promise(resolve => setTimeout(resolve, 100))")
        raise AssertionError(f"{condition} is false after {seconds} seconds")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, path: Path, width: int, height: int) -> None:
        self.resize(width, height)
        self.evaluate("new Promise(resolve => setTimeout(resolve, 500))")
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def open_page(url: str, width: int = 1200, height: int = 1400) -> Iterator[Page]:
    """Open an address in a new browser, which ends with the block."""
    (read, send), (receive, write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = f"--headless --no-sandbox --disable-gpu --user-data-dir={profile}"
        command = f"exec {PATH} {options} --remote-debugging-pipe 3<&{read} 4>&{write}"
        quiet = subprocess.DEVNULL
        with subprocess.Popen(
            ["bash", "-c", command], pass_fds=(read, write), stdout=quiet, stderr=quiet
        ) as browser:
            os.close(read)
            os.close(write)
            page = Page(send, receive)
            page.resize(width, height)
            page.call("Page.navigate", url=url)
            try:
                yield page
            finally:
                browser.terminate()
                os.close(send)
                page.receive.close()
