"""A headless Chromium, driven over the DevTools protocol: for pictures of pages, and for their tests."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from relaygr.runtime.errors import RelayError

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 30.0
_COMPLAINTS = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    """One tab. Collects what a page writes to the console, and every address that it asks for."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._loop.run_until_complete(self._connect(port))
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(self._call(method, params))

    def show(self, url: str, width: int, scheme: str = "light", motion: str = "no-preference") -> None:
        """Opens the page in a window of this width."""
        self.resize(width)
        features = [("prefers-color-scheme", scheme), ("prefers-reduced-motion", motion)]
        self.call("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in features])
        self.call("Page.navigate", url=url)

    def resize(self, width: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises RuntimeError if it fails."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str, within_s: float = 20.0) -> None:
        """Waits until the expression is true. Raises TimeoutError, with what the page complained about."""
        ends_s = time.monotonic() + within_s
        while not self.ask(expression):
            if time.monotonic() > ends_s:
                raise TimeoutError(f"{expression}: {self.complaints}")
            time.sleep(0.05)

    def picture(self, path: Path, element: str = "body") -> None:
        """A picture of the whole element, given by a selector, also of the parts outside the window."""
        box = self.ask(
            f"(({{left, top, width, height}}) => ({{x: left + scrollX, y: top + scrollY, width, height, scale: 1}}))"
            f"(document.querySelector({json.dumps(element)}).getBoundingClientRect())"
        )
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=box)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self._loop.run_until_complete(self._session.close())
        self._loop.close()

    async def _connect(self, port: int) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            tabs = await answer.json()
        (url,) = (tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        self._socket = await self._session.ws_connect(url, max_msg_size=0)

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            said = json.loads((await self._socket.receive(START_S)).data)
            if said.get("id") == self._number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']}")
                result: dict[str, Any] = said["result"]
                return result
            if said.get("method") in _COMPLAINTS:
                self.complaints.append(json.dumps(said["params"])[:500])
            elif said.get("method") == "Network.requestWillBeSent":
                self.asked.append(said["params"]["request"]["url"])


def find_browser() -> str | None:
    """The program of an installed browser."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browser(program: str, folder: Path) -> Iterator[Browser]:
    """A browser that runs, with its profile in `folder`. Raises RelayError if it does not start."""
    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--no-first-run", "--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={folder}",
        "about:blank",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            tab = Browser(_port(folder / "DevToolsActivePort", process))
            try:
                yield tab
            finally:
                tab.close()
        finally:
            process.terminate()


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    ends_s = time.monotonic() + START_S
    while not (file.exists() and len(file.read_text(encoding="utf-8").split()) == 2):
        if process.poll() is not None or time.monotonic() > ends_s:
            raise RelayError("the browser did not start")
        time.sleep(0.05)
    return int(file.read_text(encoding="utf-8").split()[0])
