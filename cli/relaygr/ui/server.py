"""The HTTP server of the page. It only reads, and all that it serves is in this package.

    /              the page                    /assets/...   its style and script
    /events        server-sent events          /login        takes the token, and gives a cookie
    /search        requests of a user or an id, by POST, since addresses are logged
    /state         one document, as JSON      /healthz, /readyz  whether it serves

On a loopback address anyone on this machine may look. Then only requests for this machine's names are answered, so that
a web page elsewhere cannot read it by a name of its own that leads here. On any other address a request needs the
token: in the header `Authorization: Bearer TOKEN`, or a cookie. Figures, events and actions are refused to the pages of
other sites, whose requests a browser marks. At most `MAX_WATCHERS` browsers get events: the oldest goes when another
comes. Each stream ends after `WATCH_S`, and a browser opens the next, so that one who never reads holds no place.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from relaygr.runtime.direct_http import address_here, http_address, is_loopback
from relaygr.runtime.errors import RelayError
from relaygr.runtime.http_server import ConnectionLimits, HttpServer, host_name
from relaygr.ui.page import REFRESH_S, Page

MAX_WATCHERS: Final = 16
WATCH_S: Final = 60.0
LIMITS: Final = ConnectionLimits(max_connections=256, wait_s=60.0)
ASSETS: Final = {
    "app.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
MAX_FORM_BYTES: Final = 4096
REFUSAL_S: Final = 0.5
"""Delay of the answer to a wrong token."""
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_PAGE: Final = "./"
"""The page, from any other address of the server. No reference is absolute: a proxy may serve it below a path."""
_Handler = Callable[[Request], Awaitable[Response]]


class UiServer:
    """Serves a page from `start` to `stop`; also a context manager."""

    def __init__(self, page: Page, host: str, port: int, token: str | None = None) -> None:
        """`token`: what a browser must give. None: nothing on a loopback address, else a token is made."""
        self._page = page
        self._is_local = is_loopback(host)
        self.token = token or (None if self._is_local else secrets.token_urlsafe(24))
        # A cookie of one port is sent to the others of the host, so it does not hold the token.
        self._session = secrets.token_urlsafe(24)
        self._watchers: dict[asyncio.Event, None] = {}
        """Set once another browser takes the place. The oldest comes first."""
        self._refused = asyncio.Lock()
        self._is_ending = False
        routes = [
            # A link on another site may lead to it. It has no figures.
            Route("/", self._guarded(self._serve_page, of_any_site=True)),
            Route("/assets/{name}", self._serve_asset),
            Route("/state", self._guarded(self._serve_state)),
            Route("/events", self._guarded(self._serve_events)),
            Route("/search", self._guarded(self._search), methods=["POST"]),
            Route("/login", self._login, methods=["POST"]),
            Route("/healthz", self._serve_health),
            Route("/readyz", self._serve_health),
        ]
        self._server = HttpServer("ui-server", host, port, Starlette(routes=routes), LIMITS)

    @property
    def address(self) -> str:
        """Where a browser on this machine finds the page."""
        return f"{http_address(address_here(self._server.host), self._server.port)}/"

    def start(self) -> None:
        """Raises RelayError if the address cannot be bound."""
        try:
            self._server.start()
        except RelayError as error:
            raise RelayError(f"{error} (--port, or the setting ui.http_port.)") from error

    def stop(self) -> None:
        """Ends the events, and then the server."""
        self._is_ending = True
        self._server.stop()

    def __enter__(self) -> UiServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- access ------------------------------------------------------------------------------------

    def _guarded(self, handler: _Handler, *, of_any_site: bool = False) -> _Handler:
        async def answer(request: Request) -> Response:
            if not self._is_for_this_host(request):
                return _plain("This name does not belong to the page. Use the address that `relaygr ui` printed.", 421)
            if not of_any_site and self._is_of_another_site(request):
                return _refuse_site()
            if not self._may_see(request):
                if request.scope["path"] == "/" and "authorization" not in request.headers:
                    return _html("login.html", 401)
                if "authorization" in request.headers:
                    await self._delay_refusal()
                return _plain("A token is needed: Authorization: Bearer TOKEN, or log in on the page.", 401)
            return await handler(request)

        return answer

    def _is_for_this_host(self, request: Request) -> bool:
        return self.token is not None or is_loopback(host_name(request.headers.get("host", "")))

    def _is_of_another_site(self, request: Request) -> bool:
        """Whether another site's page in a browser sends it. A page of this machine at another port is one, too."""
        site = request.headers.get("sec-fetch-site")
        if site is not None:
            return site not in ("same-origin", "none")
        # Browsers send no `Sec-Fetch-Site` to plain HTTP, but on a loopback address. Elsewhere the cookie, which they
        # send for no other site, decides, since a proxy may replace the Host header.
        origin = request.headers.get("origin")
        if origin is None or self.token is not None:
            return False
        return origin.partition("://")[2].lower() != request.headers.get("host", "").lower()

    def _may_see(self, request: Request) -> bool:
        if self.token is None:
            return True
        cookie = request.cookies.get(self._cookie, "")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        by_header = scheme.lower() == "bearer" and _is_same(given.strip(), self.token)
        return _is_same(cookie, self._session) or by_header

    async def _delay_refusal(self) -> None:
        """One wrong token after the other, so that more connections give no more guesses."""
        async with self._refused:
            await asyncio.sleep(REFUSAL_S)

    @property
    def _cookie(self) -> str:
        return f"relaygr_ui_{self._server.port}"

    async def _login(self, request: Request) -> Response:
        if self._is_of_another_site(request):
            return _refuse_site()
        given = await _field(request, "token")
        if given is None:
            return _plain("The form is too long.", 413)
        if self.token is None:
            return RedirectResponse(_PAGE, 303, _HEADERS)
        if not _is_same(given, self.token):
            await self._delay_refusal()
            return _html("login.html", 403)
        answer = RedirectResponse(_PAGE, 303, _HEADERS)
        answer.set_cookie(self._cookie, self._session, httponly=True, samesite="strict")
        return answer

    # -- what is served ----------------------------------------------------------------------------

    async def _serve_health(self, _: Request) -> Response:
        return _plain("ok", 200)

    async def _serve_page(self, _: Request) -> Response:
        return _html("index.html", 200)

    async def _serve_asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return _plain("There is no such file.", 404)
        return Response(_static(name), media_type=ASSETS[name], headers=_HEADERS)

    async def _serve_state(self, _: Request) -> Response:
        document = await asyncio.to_thread(self._page.document)
        return Response(document, media_type="application/json", headers=_HEADERS)

    async def _search(self, request: Request) -> Response:
        text = await _field(request, "text")
        if text is None:
            return _plain("The form is too long.", 413)
        found = await asyncio.to_thread(self._page.found, text.strip())
        return Response(found, media_type="application/json", headers=_HEADERS)

    async def _serve_events(self, _: Request) -> Response:
        # nginx keeps an answer until 8 to 16 KiB are there, and so shows figures late. The header tells it not to.
        headers = {**_HEADERS, "connection": "close", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=headers)

    async def _events(self) -> AsyncIterator[str]:
        taken = asyncio.Event()
        if len(self._watchers) >= MAX_WATCHERS:
            oldest = next(iter(self._watchers))
            del self._watchers[oldest]
            oldest.set()
        self._watchers[taken] = None
        ends_s = time.monotonic() + WATCH_S
        try:
            yield "retry: 1000\n\n"
            while not self._is_ending and not taken.is_set() and time.monotonic() < ends_s:
                yield f"data: {await asyncio.to_thread(self._page.document)}\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(taken.wait(), REFRESH_S)
            if self._is_ending:
                yield f"data: {await asyncio.to_thread(self._page.document)}\n\nevent: end\ndata: \n\n"
            elif taken.is_set():
                yield "event: taken\ndata: \n\n"
        finally:
            self._watchers.pop(taken, None)


async def _field(request: Request, name: str) -> str | None:
    """A field of the form, "" without it; None if the form is longer than `MAX_FORM_BYTES`."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_FORM_BYTES:
            return None
    return urllib.parse.parse_qs(body.decode("latin-1")).get(name, [""])[0]


def _static(name: str) -> bytes:
    return resources.files("relaygr.ui").joinpath("static", name).read_bytes()


def _html(name: str, status: int) -> Response:
    return HTMLResponse(_static(name), status, _HEADERS)


def _plain(text: str, status: int) -> Response:
    return PlainTextResponse(text + "\n", status, _HEADERS)


def _refuse_site() -> Response:
    return _plain("A page of another site asks for this. Open this page itself.", 403)


def _is_same(given: str, wanted: str) -> bool:
    """In constant time."""
    return hmac.compare_digest(given.encode(), wanted.encode())
