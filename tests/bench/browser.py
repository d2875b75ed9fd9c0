"""Chromium without a window, driven through its DevTools protocol: what a page shows, logs and asks the network for."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
_SECONDS = 60.0


def browser() -> str:
    """Where Chromium is. Where there is none, the test is skipped at home and fails in CI, which has to install it."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None and os.environ.get("CI"):
        pytest.fail("CI has no Chromium, so nobody looks at the pages: apt-get install -y chromium")
    if found is None:
        pytest.skip("Chromium is not installed (apt-get install chromium); CI has it and runs this test")
    return found


@dataclass
class Page:
    """A page that is open."""

    socket: aiohttp.ClientWebSocketResponse
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and exceptions."""
    asked: list[str] = field(default_factory=list)
    """What it asked the network, or the disk, for."""
    _number: int = 0
    _loaded: bool = False

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command of the protocol."""
        self._number += 1
        number = self._number
        await self.socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._next()
            if message.get("id") == number:
                assert "error" not in message, message
                answer: dict[str, Any] = message["result"]
                return answer

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        self._loaded = False
        await self.call("Page.navigate", url=url)
        while not self._loaded:
            await self._next()

    async def value(self, script: str) -> Any:
        """What an expression is in the page."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def width(self, pixels: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1, mobile=False
        )

    async def prefer(self, scheme: str) -> None:
        """Light or dark."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = await asyncio.wait_for(self.socket.receive_json(), _SECONDS)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(str(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        self._loaded = self._loaded or method == "Page.loadEventFired"
        return message


@asynccontextmanager
async def page() -> AsyncIterator[Page]:
    """An empty page in a Chromium of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [browser(), *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _port(Path(folder), process)
            async with aiohttp.ClientSession() as session:
                async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                    where = (await answer.json())["webSocketDebuggerUrl"]
                async with session.ws_connect(where, max_msg_size=0) as socket:
                    yield Page(socket)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _port(folder: Path, process: subprocess.Popen[bytes]) -> int:
    """Where the browser listens, as it writes it down."""
    for _ in range(int(_SECONDS / 0.1)):
        assert process.poll() is None, f"Chromium ended with status {process.returncode}"
        written = folder / "DevToolsActivePort"
        if written.exists() and (lines := written.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.1)
    raise AssertionError("Chromium does not listen")
