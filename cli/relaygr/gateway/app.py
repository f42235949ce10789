"""The HTTP application: it checks a call, passes it to the client, and answers.

A call is checked in this order: token, bound on requests, content type, body, bound on requests, fields. It counts as
served once its body is there, so that slow bodies keep no other call out. All bodies under way take at most the bytes
of `max_requests` of the largest; beyond it, the oldest is refused. The budget of a ranking request counts from the
receipt of its head, so that the time that its body takes is part of it.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, TypeVar

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from relaygr.client import AsyncRelayClient, ClientError
from relaygr.client.requests import HISTORY_AND_SCENARIO
from relaygr.gateway.answers import (
    Answer,
    Refusal,
    accepted,
    outcome_answer,
    refused_by_client,
    retry_later,
)
from relaygr.gateway.bodies import MEDIA_TYPES, BadBody, Encoding, RankBody, RetrievalBody, read_body, write_body
from relaygr.gateway.openapi import document, page
from relaygr.gateway.settings import GatewaySettings
from relaygr.runtime.clock import LATENCY_BUCKETS_S
from relaygr.runtime.http_server import host_name
from relaygr.schemas.codec import EncodeError
from relaygr.schemas.messages import MAX_BUDGET_MS
from relaygr.schemas.trace_context import TRACEPARENT

BUDGET_HEADER: Final = "x-relaygr-budget-ms"
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")

B = TypeVar("B")
log = structlog.get_logger()


class HttpMetrics:
    """The metrics `relaygr_http_*`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.answers = Counter(
            "relaygr_http_requests_total", "HTTP requests by path and status", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "relaygr_http_request_seconds",
            "Time from the head of an HTTP request to its answer",
            ["path"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )


class GatewayApp:
    """The application, around a started client. `asgi` is what a server runs."""

    def __init__(
        self, client: AsyncRelayClient, settings: GatewaySettings, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._client = client
        self._settings = settings
        self._token = settings.token.get_secret_value().encode() if settings.token is not None else None
        self._open = 0
        self._bodies: dict[asyncio.Timeout, int] = {}
        """The received bytes of each body under way. The oldest comes first."""
        self._body_bytes = 0
        self._document = document(self._token is not None)
        self._metrics = HttpMetrics(registry)
        self.asgi = Starlette(
            routes=[
                Route("/v1/retrieval", self._retrieval, methods=["POST"]),
                Route("/v1/rank", self._rank, methods=["POST"]),
                Route("/openapi.json", self._serve_document, methods=["GET"]),
                Route("/", self._serve_page, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _refuse_route},
        )
        # Else `/v1/rank/` is answered with a redirect to the name of the Host header, by HTTP without TLS.
        self.asgi.router.redirect_slashes = False

    async def _retrieval(self, request: Request) -> Response:
        return await self._serve(request, RetrievalBody, self._begin_impression)

    async def _rank(self, request: Request) -> Response:
        return await self._serve(request, RankBody, self._rank_candidates)

    async def _serve_document(self, _: Request) -> Response:
        return JSONResponse(self._document)

    async def _serve_page(self, request: Request) -> Response:
        only_styles = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return HTMLResponse(page(self._document, str(request.base_url)), headers=only_styles)

    async def _serve(
        self, request: Request, kind: type[B], call: Callable[[B, Request, float], Awaitable[Answer]]
    ) -> Response:
        began_s = time.monotonic()
        # That of `request.url` depends on the Host header, and a label must be bounded.
        path = request.scope["path"]
        encoding = Encoding.JSON
        try:
            self._authorise(request)
            encoding = _accepted_encoding(request)
            self._refuse_if_full()
            sent_as = _body_encoding(request)
            data = await self._read(request)
            with self._slot():
                answer = await call(_decoded(kind, sent_as, data), request, began_s)
        except Refusal as refusal:
            answer = refusal.answer
        except ClientDisconnect:
            answer = Answer(499, {})
        except Exception:
            log.exception("a call failed", path=path)
            message = "the gateway failed; its log has the cause"
            answer = Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", message).answer
        self._metrics.answers.labels(path, str(int(answer.status))).inc()
        self._metrics.seconds.labels(path).observe(time.monotonic() - began_s)
        return Response(
            write_body(encoding, answer.content), answer.status, dict(answer.headers), media_type=encoding.value
        )

    async def _begin_impression(self, body: RetrievalBody, request: Request, _: float) -> Answer:
        budget_ms = _budget_ms(request, "ranking_budget_ms", body.ranking_budget_ms)
        with _refusals():
            event = self._client.publish_retrieval(
                body.user_id,
                # At most the budget: a fraction of a millisecond does not change the trigger's decision.
                ranking_budget_ms=max(1, int(budget_ms)),
                expected_ranking_in_ms=body.expected_ranking_in_ms,
                expected_candidates=body.expected_candidates,
                expected_suffix=body.expected_suffix,
                **_impression(body, request),
            )
        return accepted(event)

    async def _rank_candidates(self, body: RankBody, request: Request, began_s: float) -> Answer:
        budget_ms = _budget_ms(request, "budget_ms", body.budget_ms)
        left_ms = budget_ms - (time.monotonic() - began_s) * 1000
        if left_ms <= 0:
            message = f"the budget of {budget_ms:g} ms was over before the body had arrived"
            raise Refusal(HTTPStatus.GATEWAY_TIMEOUT, "expired", message)
        with _refusals():
            outcome = await self._client.rank(
                body.user_id,
                body.candidates,
                budget_ms=left_ms,
                suffix=body.suffix,
                query_time_ms=body.query_time_ms,
                **_impression(body, request),
            )
        return outcome_answer(outcome)

    def _authorise(self, request: Request) -> None:
        """Raises Refusal without the token. Without a token, a browser may be led here by a name of another site."""
        if self._token is None:
            names = dict.fromkeys((*_LOCAL_NAMES, self._settings.listen_host))
            if host_name(request.headers.get("host", "")) not in names:
                message = f"the Host header names none of {', '.join(names)}: use one, or set gateway.token"
                raise Refusal(HTTPStatus.FORBIDDEN, "forbidden_host", message)
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                "unauthorized",
                "send the token of the gateway: Authorization: Bearer TOKEN",
                {"www-authenticate": "Bearer"},
            )

    def _refuse_if_full(self) -> None:
        most = self._settings.max_requests
        if self._open >= most:
            message = f"{most} requests are being served (gateway.max_requests): send fewer at once"
            raise retry_later(HTTPStatus.TOO_MANY_REQUESTS, "too_many_requests", message)

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """One of `max_requests`. Raises Refusal if all are taken."""
        self._refuse_if_full()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def _read(self, request: Request) -> bytes:
        """The bytes of the body. Raises Refusal as soon as they are too many, or are late."""
        most = self._settings.max_body_bytes
        message = f"the body has more than {most} bytes (gateway.max_body_bytes)"
        too_large = Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_large", message)
        length = request.headers.get("content-length", "")
        if length.isdigit() and (len(length) > 18 or int(length) > most):
            raise too_large
        body = bytearray()
        limit = asyncio.timeout(self._settings.body_timeout_s)
        try:
            async with limit:
                self._bodies[limit] = 0
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise too_large
                    self._note_received(limit, len(part))
        except TimeoutError as error:
            raise self._too_late(limit) from error
        finally:
            self._body_bytes -= self._bodies.pop(limit, 0)
        return bytes(body)

    def _note_received(self, body: asyncio.Timeout, size: int) -> None:
        """Ends the oldest body under way if all together are too large."""
        if body not in self._bodies:
            return
        self._bodies[body] += size
        self._body_bytes += size
        while self._body_bytes > self._settings.max_requests * self._settings.max_body_bytes:
            oldest = next(iter(self._bodies))
            self._body_bytes -= self._bodies.pop(oldest)
            # One whose own time has just passed ends anyway, and cannot be given another.
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())

    def _too_late(self, body: asyncio.Timeout) -> Refusal:
        if body in self._bodies:
            message = f"the body took longer than {self._settings.body_timeout_s:g} s (gateway.body_timeout_s)"
            return Refusal(HTTPStatus.REQUEST_TIMEOUT, "body_timeout", message, {"connection": "close"})
        message = (
            "the bodies that are under way are too large together, and this one is the oldest "
            "(gateway.max_requests times gateway.max_body_bytes): send fewer at once, or faster"
        )
        return retry_later(HTTPStatus.TOO_MANY_REQUESTS, "too_many_requests", message, {"connection": "close"})


def _body_encoding(request: Request) -> Encoding:
    """Raises Refusal for a content type that is not served."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = MEDIA_TYPES.get(media_type)
    if encoding is None or request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            f"send a body of type {Encoding.JSON} or {Encoding.MESSAGEPACK}, without a content-encoding",
        )
    return encoding


def _decoded(kind: type[B], encoding: Encoding, data: bytes) -> B:
    try:
        return read_body(kind, encoding, data)
    except BadBody as error:
        raise _invalid(error) from error


def _impression(body: RetrievalBody | RankBody, request: Request) -> dict[str, Any]:
    """The arguments that both calls of the client have."""
    of_body = {name: getattr(body, name) for name in (*HISTORY_AND_SCENARIO, "request_id")}
    return {**of_body, "traceparent": request.headers.get(TRACEPARENT)}


@contextmanager
def _refusals() -> Iterator[None]:
    """Raises Refusal for what the client raises before it sends anything."""
    try:
        yield
    except EncodeError as error:
        raise _invalid(error) from error
    except ClientError as error:
        raise refused_by_client(error) from error


def _budget_ms(request: Request, name: str, in_body: float | None) -> float:
    """The budget of the header or the body. Raises Refusal unless exactly one of them has a valid one."""
    # Several headers are one list (RFC 9110, 5.3), which is no number.
    in_header = ", ".join(request.headers.getlist(BUDGET_HEADER)) or None
    if in_header is None and in_body is None:
        raise _invalid(f"{name} is required: give it in the body or in the header {BUDGET_HEADER}")
    if in_header is not None and in_body is not None:
        raise _invalid(f"{name} and the header {BUDGET_HEADER} are both given: give one of them")
    if in_header is None:
        assert in_body is not None
        where, budget_ms = name, float(in_body)
    else:
        where = BUDGET_HEADER
        try:
            budget_ms = float(in_header)
        except ValueError:
            raise _invalid(f"{BUDGET_HEADER} is {in_header[:40]!r}: expected a number of milliseconds") from None
    if not 0 < budget_ms <= MAX_BUDGET_MS:
        raise _invalid(f"{where} is {budget_ms:g}: expected more than 0 and at most {MAX_BUDGET_MS}")
    return budget_ms


def _accepted_encoding(request: Request) -> Encoding:
    """The encoding of the answer: of `Accept`, else of the request. Raises Refusal if `Accept` names neither."""
    wanted = [part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "*/*").split(",")]
    named = next((MEDIA_TYPES[name] for name in wanted if name in MEDIA_TYPES), None)
    if named is not None:
        return named
    if not {"*/*", "application/*", ""} & set(wanted):
        raise Refusal(
            HTTPStatus.NOT_ACCEPTABLE, "not_acceptable", f"answers are {Encoding.JSON} or {Encoding.MESSAGEPACK}"
        )
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return MEDIA_TYPES.get(media_type, Encoding.JSON)


def _invalid(problem: Exception | str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, "invalid_body", str(problem))


async def _refuse_route(_: Request, error: Exception) -> Response:
    """Starlette's own refusals: an unknown path, or another method."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    message = f"{phrase}: POST /v1/retrieval, POST /v1/rank and GET /openapi.json are here"
    content = {"status": "refused", "reason": phrase.lower().replace(" ", "_"), "message": message}
    return JSONResponse(content, error.status_code, dict(error.headers or {}))
