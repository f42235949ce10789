"""Pictures of the live page from a real run of the demo: `python -m benchmarks.screenshot --broker kafka`.

    demo --- /state once a second ---> documents of the page --- served again ---> headless Chromium ---> PNG

The browser starts after the demo has ended, because it would take CPU time from the relay. It gets documents that the
demo served: that of the run with the relay on, a few seconds before its end (`ui.png`), and the last one, of which the
comparison of both runs is taken (`ui-comparison.png`). 1,280 pixels wide, light.

`--keep FOLDER` keeps the documents, and `--documents FOLDER` makes the pictures again without a run.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from relaygr.bench.browser import NAMES, browser, find_browser
from relaygr.devbroker.local import free_ports
from relaygr.runtime.direct_http import open_directly
from relaygr.runtime.errors import RelayError
from relaygr.ui.page import Page
from relaygr.ui.server import UiServer

WIDTH: Final = 1280
RELAY_ON: Final = "relay on"
ENDED: Final = "both runs have ended"
BEFORE_END_S: Final = 3
STOP_S: Final = 30.0
_SHOWN: Final = "document.getElementById('live')?.hidden === false"
_COMPARED: Final = "document.getElementById('comparison')?.hidden === false"


class RecordedPage(Page):
    """A page whose document does not change."""

    def __init__(self, document: str) -> None:
        super().__init__("RelayGR demo")
        self._recorded = document

    def document(self) -> str:
        return self._recorded


def main(
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    seconds: Annotated[
        float, typer.Option(min=10, help="Length of each run; the page shows the last two minutes.")
    ] = 125.0,
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path("docs/images"),
    keep: Annotated[Path | None, typer.Option(help="Keep the documents in this folder.")] = None,
    documents: Annotated[Path | None, typer.Option(help="Use these documents instead of a run.")] = None,
) -> None:
    """Run the demo and make pictures of its page."""
    program = find_browser()
    if program is None:
        raise RelayError(f"none of {', '.join(NAMES)} is installed")
    with tempfile.TemporaryDirectory(prefix="relaygr-bench-", ignore_cleanup_errors=True) as name:
        folder = documents or keep or Path(name)
        if documents is None:
            folder.mkdir(parents=True, exist_ok=True)
            record_demo(["--broker", broker, "--seconds", f"{seconds:g}"], folder)
        out.mkdir(parents=True, exist_ok=True)
        take_pictures(program, folder, out, Path(name) / "profile")
    typer.echo(f"{out / 'ui.png'} and {out / 'ui-comparison.png'}")


def record_demo(arguments: list[str], folder: Path) -> None:
    """Runs the demo, and writes `live.json` and `end.json`. Raises RelayError if the demo fails."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "relaygr", "demo", *arguments, "--stay", "--set", f"ui.http_port={port}"]
    last: deque[str] = deque(maxlen=BEFORE_END_S + 1)
    with subprocess.Popen(command) as demo:
        try:
            document: dict[str, Any] = {}
            while document.get("phase") != ENDED:
                if demo.poll() is not None:
                    raise RelayError(f"the demo ended with exit code {demo.returncode}")
                time.sleep(1.0)
                text = _read(port)
                document = json.loads(text) if text else {}
                if document.get("phase") == RELAY_ON and not document["ended"]:
                    last.append(text)
        finally:
            demo.send_signal(signal.SIGINT)
            try:
                demo.wait(STOP_S)
            except subprocess.TimeoutExpired:
                demo.kill()
    if not last:
        raise RelayError("the run with the relay on was too short for a picture")
    (folder / "live.json").write_text(last[0], encoding="utf-8")
    (folder / "end.json").write_text(text, encoding="utf-8")


def take_pictures(program: str, folder: Path, out: Path, profile: Path) -> None:
    """Makes both pictures from the documents in `folder`."""
    pictures = (("live.json", _SHOWN, "ui.png", "body"), ("end.json", _COMPARED, "ui-comparison.png", "#comparison"))
    profile.mkdir()
    with browser(program, profile) as tab:
        for name, shown, picture, element in pictures:
            page = RecordedPage((folder / name).read_text(encoding="utf-8"))
            with UiServer(page, "127.0.0.1", 0) as server:
                tab.show(server.address, WIDTH)
                tab.until(shown)
                time.sleep(1.0)  # Charts are drawn again when the layout has settled.
                tab.picture(out / picture, element)
    shutil.rmtree(profile, ignore_errors=True)


def _read(port: int) -> str:
    """The document of the page; nothing while the page is not served."""
    try:
        with open_directly(f"http://127.0.0.1:{port}/state", timeout_s=2) as answer:
            return answer.read().decode()
    except OSError:
        return ""


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
