"""The live page of the demo: without it, on another port, and after the runs until Ctrl-C. The runs are left out."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from relaygr.demo import run as run_module
from relaygr.demo.plan import PlanOverrides
from relaygr.demo.run import DemoOptions, run_demo
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings
from relaygr.ui.page import Page
from relaygr.ui.settings import UiSettings
from tests.waiting import until

RESULT = cast(Any, SimpleNamespace(gates=()))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[Page | None]:
    """The page that each demo gave its runs."""
    found: list[Page | None] = []

    def runs(console: object, settings: object, options: object, prefix: object, page: Page | None) -> Any:
        found.append(page)
        return RESULT

    monkeypatch.setattr(run_module, "_run", runs)
    return found


def demo(ui: UiSettings, *, serve_page: bool = True, stay: bool = False, out: io.StringIO | None = None) -> str:
    """What a demo without runs prints."""
    said = out or io.StringIO()
    options = DemoOptions("embedded", PlanOverrides(), cast(Path, None), None, True, serve_page, stay)
    result = run_demo(Console(file=said, highlight=False), Settings(ui=ui), options)
    assert result is RESULT
    return said.getvalue()


def port_of(text: str) -> int:
    return int(text.partition("http://127.0.0.1:")[2].partition("/")[0])


def test_without_a_page_nothing_is_served_and_nothing_is_waited_for(pages: list[Page | None]) -> None:
    assert demo(UiSettings(), serve_page=False, stay=True) == ""
    assert pages == [None]


def test_the_demo_of_the_pool_has_a_page_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Page | None] = []

    def runs(console: object, settings: object, options: object, prefix: object, page: Page | None) -> Any:
        found.append(page)
        return RESULT

    monkeypatch.setattr(run_module, "_run_pool", runs)
    monkeypatch.setattr(run_module, "require_pool", lambda: None)
    out = io.StringIO()
    options = DemoOptions("embedded", PlanOverrides(), None, None, True, serve_page=True, stay=False, pool=True)
    settings = Settings(ui=UiSettings(http_port=0))
    assert run_demo(Console(file=out, highlight=False), settings, options) is RESULT
    run_demo(Console(file=out, highlight=False), settings, replace(options, serve_page=False))
    [page, none] = found
    assert "http://127.0.0.1:" in out.getvalue() and page is not None and none is None
    assert '"comparison":"Workers that fill the pool, and new workers"' in page.document()


def test_a_default_port_that_is_taken_is_replaced_and_a_chosen_one_is_refused(
    pages: list[Page | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        default = UiSettings.model_construct(_fields_set=set(), **(UiSettings().model_dump() | {"http_port": port}))
        monkeypatch.setattr(
            run_module, "_print_address", lambda console, server, more="": console.print(server.address)
        )
        with run_module._server(Page("demo"), default) as server:
            assert server.address != f"http://127.0.0.1:{port}/"
            assert urllib.request.urlopen(server.address, timeout=10).status == 200
        with pytest.raises(RelayError, match=f"Port {port} of 127.0.0.1 is in use"):
            demo(UiSettings(http_port=port))
    assert pages == []


def test_the_page_stays_until_ctrl_c_and_the_result_is_returned(pages: list[Page | None]) -> None:
    out = io.StringIO()
    seen: list[int] = []

    def look_and_interrupt() -> None:
        try:
            until(lambda: "until Ctrl-C" in out.getvalue(), "the page stays")
            address = f"http://127.0.0.1:{port_of(out.getvalue())}/state"
            seen.append(urllib.request.urlopen(address, timeout=10).status)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=look_and_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        said = demo(UiSettings(http_port=0), stay=True, out=out)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert seen == [200] and len(pages) == 1
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port_of(said)), timeout=1)
