"""The server of the live page: who may see it, and that it needs nothing from elsewhere."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from relaygr.runtime.errors import RelayError
from relaygr.ui import server as server_module
from relaygr.ui.page import GateView, Page, RunView
from relaygr.ui.server import ASSETS, UiServer
from tests.waiting import until
from tests.worlds.ui import UiWorld, served

STATIC = Path(server_module.__file__).parent / "static"
TOKEN = "a token of 20 chars!"


@pytest.fixture
def page() -> Page:
    page = Page("RelayGR")
    page.follow(UiWorld(), "relay on")
    return page


@pytest.fixture
def local(page: Page) -> Iterator[UiServer]:
    with served(page) as server:
        yield server


@pytest.fixture
def guarded(page: Page) -> Iterator[UiServer]:
    with served(page, token=TOKEN) as server:
        yield server


def ask(
    server: UiServer, path: str, headers: dict[str, str] | None = None, form: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    """The answer; its body is `answer.body`."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.address).netloc, timeout=10)
    body = urllib.parse.urlencode(form) if form is not None else None
    connection.request("GET" if form is None else "POST", path, body, headers or {})
    answer = connection.getresponse()
    if path != "/events" or answer.status != 200:
        answer.body = answer.read()  # type: ignore[attr-defined]
        connection.close()
    return answer


def status(server: UiServer, path: str, headers: dict[str, str] | None = None) -> int:
    return ask(server, path, headers).status


def test_on_a_loopback_address_the_page_needs_no_token(local: UiServer) -> None:
    assert local.token is None
    assert [status(local, path) for path in ("/", "/state", *(f"/assets/{name}" for name in ASSETS))] == [200] * 6
    state = json.loads(ask(local, "/state").body)  # type: ignore[attr-defined]
    assert (state["phase"], state["live"]["prefix"], state["runs"]) == ("relay on", "relaygr", [])


@pytest.mark.parametrize("host", ["::", "0.0.0.0"])
def test_a_page_on_every_address_names_one_that_a_browser_here_can_open(page: Page, host: str) -> None:
    with UiServer(page, host, 0, TOKEN) as server:
        assert server.address.startswith("http://127.0.0.1:")
        assert status(server, "/state", {"authorization": f"Bearer {TOKEN}"}) == 200


def test_a_name_that_leads_here_from_elsewhere_is_refused(local: UiServer) -> None:
    """Else a web page could read the figures, with a name of its own that leads to 127.0.0.1."""
    assert status(local, "/state", {"host": "evil.example"}) == 421
    assert status(local, "/state", {"host": "localhost:9310"}) == 200
    for invalid in ("", "[", "localhost/x", "evil example", "127.0.0.1@evil.example"):
        assert status(local, "/state", {"host": invalid}) == 421


def test_an_unknown_file_is_not_served(local: UiServer) -> None:
    for path in ("/assets/server.py", "/assets/..%2fserver.py", "/assets/login.html"):
        assert status(local, path) == 404


def test_with_a_token_nothing_of_the_figures_is_seen_without_it(guarded: UiServer) -> None:
    assert [status(guarded, path) for path in ("/", "/state", "/events")] == [401] * 3
    assert b'name="token"' in ask(guarded, "/").body  # type: ignore[attr-defined]
    assert status(guarded, "/state", {"authorization": "Bearer wrong"}) == 401
    assert status(guarded, "/state", {"authorization": f"Bearer {TOKEN}"}) == 200
    assert [status(guarded, path) for path in ("/healthz", "/readyz")] == [200] * 2, "of a container"


def test_requests_are_searched_by_post_so_that_no_address_names_a_user(guarded: UiServer, page: Page) -> None:
    world = UiWorld()
    world.impression("g.1.1.secrettoken")
    page.follow(world, "")
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/x-www-form-urlencoded"}
    answer = ask(guarded, "/search", headers, form={"text": " ann "}).body  # type: ignore[attr-defined]
    assert [each["request"] for each in json.loads(answer)] == ["g.1.1"] and b"secrettoken" not in answer
    assert ask(guarded, "/search", form={"text": "ann"}).status == 401
    assert ask(guarded, "/search", headers, form={"text": "x" * 10_000}).status == 413
    assert status(guarded, "/search?text=ann", headers) == 405


def test_the_token_in_the_form_gives_a_cookie_that_is_not_the_token(guarded: UiServer) -> None:
    answer = ask(guarded, "/login", form={"token": TOKEN})
    cookie = answer.headers["set-cookie"]
    assert answer.status == 303
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in urllib.parse.unquote(cookie)
    assert status(guarded, "/state", {"cookie": cookie.partition(";")[0]}) == 200
    assert status(guarded, "/state", {"cookie": "relaygr_ui_1=x"}) == 401


def test_a_wrong_token_is_refused_slowly_and_a_long_form_at_once(
    guarded: UiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REFUSAL_S", 0.2)
    started_s = time.monotonic()
    assert ask(guarded, "/login", form={"token": "wrong"}).status == 403
    assert time.monotonic() - started_s >= 0.2
    assert ask(guarded, "/login", form={"token": "x" * 10_000}).status == 413
    for path in ("/", "/state"):
        started_s = time.monotonic()
        assert status(guarded, path, {"authorization": "Bearer wrong"}) == 401
        assert time.monotonic() - started_s >= 0.2


def test_on_another_address_a_token_is_made(page: Page) -> None:
    server = UiServer(page, "0.0.0.0", 0)
    assert server.token is not None and len(server.token) >= 32
    assert UiServer(page, "::1", 0).token is None
    assert UiServer(page, "localhost", 0).token is None
    assert UiServer(page, "metrics.example", 0).token is not None


def test_a_port_in_use_is_said_with_a_remedy(page: Page) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RelayError, match=rf"Port {port} of 127.0.0.1 is in use.*--port"):
            UiServer(page, "127.0.0.1", port).start()


def watch(server: UiServer) -> http.client.HTTPResponse:
    """A stream of events whose first one has come."""
    answer = ask(server, "/events")
    assert answer.readline() == b"retry: 1000\n" and answer.readline() == b"\n"
    assert json.loads(answer.readline().removeprefix(b"data: "))["title"] == "RelayGR"
    return answer


def test_one_browser_more_takes_the_place_of_the_one_that_watched_longest(
    local: UiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused, so whoever held the places kept the operator out."""
    monkeypatch.setattr(server_module, "MAX_WATCHERS", 2)
    first, second = watch(local), watch(local)
    third = watch(local)
    assert b"event: taken" in first.read(), "its stream has ended"
    for _ in range(3):
        assert second.readline() and third.readline()
    assert len(local._watchers) == 2
    local.stop()
    assert b"event: end" in second.read() and b"event: end" in third.read()


FOREIGN = [
    ("of another site", {"sec-fetch-site": "cross-site"}),
    ("of another site without CORS", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}),
    ("of another server on this machine", {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:3000"}),
    ("in a browser that sends only the origin", {"origin": "http://news.example"}),
    ("of another port, by its origin", {"origin": "http://localhost:3000"}),
    ("without an origin of its own, such as a file", {"origin": "null"}),
]


@pytest.mark.parametrize(("name", "headers"), FOREIGN, ids=[name for name, _ in FOREIGN])
def test_a_page_gets_nothing(local: UiServer, name: str, headers: dict[str, str]) -> None:
    """A page of another site took all places of the events: nobody else could watch."""
    for path in ("/events", "/state"):
        assert status(local, path, headers) == 403, name
    for path in ("/search", "/login"):
        assert ask(local, path, headers, form={"text": "ann"}).status == 403
    assert not local._watchers


def test_the_page_s_own_requests_and_links_from_elsewhere_are_served(local: UiServer, guarded: UiServer) -> None:
    netloc = urllib.parse.urlsplit(local.address).netloc
    for headers in ({"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}, {"origin": f"http://{netloc}"}):
        assert status(local, "/state", headers) == 200
        assert ask(local, "/search", headers, form={"text": "ann"}).status == 200
    assert status(local, "/", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}) == 200
    proxied = {"authorization": f"Bearer {TOKEN}", "origin": "https://relay.example"}
    assert status(guarded, "/state", proxied) == 200, "a proxy may replace the Host header"
    assert status(guarded, "/state", proxied | {"sec-fetch-site": "cross-site"}) == 403


@pytest.mark.slow
def test_a_browser_that_never_reads_holds_its_place_for_a_bounded_time(
    local: UiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers of the connection took minutes of events, and the place was kept meanwhile."""
    monkeypatch.setattr(server_module, "WATCH_S", 0.2)
    with socket.create_connection(("127.0.0.1", local._server.port), timeout=60) as silent:
        silent.sendall(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        until(lambda: local._watchers, "it watches")
        until(lambda: not local._watchers, "its place is free")
        received = b""
        while part := silent.recv(65536):
            received += part
    assert b"data: " in received and b"event: " not in received, "a browser then connects again"


@pytest.mark.parametrize("path", ["/", "/state", "/assets/app.js", "/nothing-here"])
def test_answers_forbid_resources_from_elsewhere(local: UiServer, path: str) -> None:
    headers = ask(local, path).headers
    if path != "/nothing-here":
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_no_file_of_the_page_names_another_host() -> None:
    found = {
        (path.name, address)
        for path in STATIC.iterdir()
        for address in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*|url\([^)]*\)", path.read_text(encoding="utf-8"))
    }
    # The name of the SVG format, which no browser asks for.
    assert found == {(name, "http://www.w3.org/2000/svg") for name in ("icon.svg", "charts.js")}
    assert {path.name for path in STATIC.iterdir()} == {*ASSETS, "index.html", "login.html"}


def test_a_proxy_may_serve_the_page_below_a_path(guarded: UiServer) -> None:
    """Every reference leads to where the page itself is, so that of `/ops/relay/` the proxy gets them all."""
    login, page = ask(guarded, "/"), ask(guarded, "/", {"authorization": f"Bearer {TOKEN}"})
    assert (login.status, page.status) == (401, 200)
    texts = [each.body.decode() for each in (login, page)]  # type: ignore[attr-defined]
    found = {each for text in texts for each in re.findall(r'(?:href|src|action)="([^"#]+)"', text)}
    script = (STATIC / "app.js").read_text(encoding="utf-8")
    found |= set(re.findall(r'(?:fetch|EventSource)\("([^"]+)"', script))
    found |= {ask(guarded, "/login", form={"token": TOKEN}).headers["location"]}
    assert {"login", "events", "search", "assets/app.js"} <= found
    paths = {urllib.parse.urljoin("https://shop.example/ops/relay/", each) for each in found}
    assert all(each.startswith("https://shop.example/ops/relay/") for each in paths), paths


def test_a_proxy_passes_events_on_at_once(local: UiServer) -> None:
    answer = ask(local, "/events")
    assert answer.headers["x-accel-buffering"] == "no"
    answer.close()


def test_infinite_and_undefined_figures_are_null_in_the_document() -> None:
    page = Page("x")
    page.add_run(RunView("off", 1, 0, 1, 0, float("nan"), 2.0, float("inf"), 0, 1.0, {"full": 1}, [], []), 50)
    page.judge([GateView("no request lost", "0", True, True)])
    state = json.loads(page.document())
    assert (state["runs"][0]["p50_ms"], state["runs"][0]["offered_p99_ms"], state["deadline_ms"]) == (None, None, 50)
    assert state["live"] is None and state["gates"][0]["passed"]
