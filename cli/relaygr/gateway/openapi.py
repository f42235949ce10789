"""The OpenAPI document of the gateway, from the classes of its bodies, and a page that shows it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from relaygr.gateway.bodies import Encoding, RankBody, RetrievalBody
from relaygr.schemas.ended import UNRANKED, Ended
from relaygr.schemas.json_schema import REFERENCE, Form, schemas_of
from relaygr.schemas.messages import RankingResult
from relaygr.schemas.version import __version__

_ABOUT = """\
The front door of RelayGR. Send /v1/retrieval when retrieval begins, and /v1/rank with its request_id when the
candidates are known. Bodies are JSON or MessagePack (content-type), answers likewise (accept). In MessagePack, arrays
and digests of a request may be bytes: packed little-endian. Scores are a list, row-major: num_tasks a candidate."""
_REFUSALS = {
    "400": "invalid_body: the message names the field; too_long: more than the model takes",
    "401": "unauthorized: no token, or a wrong one",
    "403": "forbidden_host: the Host header is of another site",
    "406": "not_acceptable",
    "408": "body_timeout: the body came too slowly",
    "409": "request_id_in_use: a request with this id is open",
    "413": "too_large: the body is larger than gateway.max_body_bytes, or its message than Kafka takes",
    "415": "unsupported_media_type",
    "429": "too_many_requests: gateway.max_requests are served, or too many bodies under way; see Retry-After",
    "503": "overloaded, queue_full, not_sent, stopping or closed: send again later; see Retry-After",
}
_RANK_REFUSALS = {
    # Of an end without a sentence below.
    **{str(end.row.http_status): end.value for end in UNRANKED},
    "502": "failed: the request failed at its worker, with its reason, or Kafka refused it: refused_by_kafka",
    "504": "expired, no_answer or not_acknowledged: no answer by the deadline",
}
_BUDGET = {
    "name": "x-relaygr-budget-ms",
    "in": "header",
    "description": "the budget, instead of the field of the body",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
_TRACEPARENT = {
    "name": "traceparent",
    "in": "header",
    "description": "the caller's span (W3C Trace Context), which the messages carry on; ignored if invalid",
    "schema": {"type": "string"},
}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "RetrievalBody": {
        "user_id": "ann", "expected_ranking_in_ms": 150, "expected_candidates": 3, "ranking_budget_ms": 50,
    },
    "RankBody": {"user_id": "ann", "candidates": [101, 102, 103], "budget_ms": 50},
}  # fmt: skip


def document(needs_token: bool) -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "RelayGR gateway", "version": __version__, "description": _ABOUT},
        # Relative, since only the caller knows the scheme and the host by which it reaches the gateway.
        "servers": [{"url": "/", "description": "the gateway that serves this document"}],
        "security": [{"token": []}] if needs_token else [],
        "paths": {
            "/v1/retrieval": _path(
                "announceImpression",
                "Announce an impression",
                "RetrievalBody",
                "202",
                "the event is on its way",
                "Accepted",
                {},
            ),
            "/v1/rank": _path(
                "rankCandidates", "Rank candidates", "RankBody", "200", "the scores", "RankOutcome", _RANK_REFUSALS
            ),
        },
        "components": {
            "schemas": {
                **schemas_of([RetrievalBody, RankBody], Form.JSON, closed=True),
                **schemas_of([RankingResult], Form.JSON),
                "Accepted": _object(
                    {
                        "status": {"const": "accepted"},
                        "request_id": {"type": "string", "description": "id of the impression, for /v1/rank"},
                        "query_time_ms": {"type": "integer", "description": "time of the impression, for /v1/rank"},
                    }
                ),
                "RankOutcome": _object(
                    {
                        "status": {"enum": list(map(str, Ended))},
                        "request_id": {"type": "string"},
                        "latency_us": {"type": "integer", "description": "from sending to the result or the deadline"},
                        "late": {"const": False},
                    },
                    {
                        "reason": {"type": "string", "description": "unless `ranked`"},
                        "message": {"type": "string", "description": "explanation, if `failed`"},
                        "result": {"$ref": REFERENCE + "RankingResult"},
                    },
                ),
                "Refusal": _object(
                    {
                        "status": {"const": "refused"},
                        "reason": {"type": "string"},
                        "message": {"type": "string", "description": "one sentence"},
                    }
                ),
            }
        },
    }
    if needs_token:
        found["components"]["securitySchemes"] = {
            "token": {"type": "http", "scheme": "bearer", "description": "the setting gateway.token"}
        }
    return found


def _path(
    name: str, summary: str, body: str, status: str, meaning: str, answer: str, refusals: Mapping[str, str]
) -> dict[str, Any]:
    responses = {status: {"description": meaning, "content": _content(answer)}}
    for code, text in sorted({**_REFUSALS, **refusals}.items()):
        either = {"anyOf": [{"$ref": REFERENCE + "Refusal"}, {"$ref": REFERENCE + "RankOutcome"}]}
        content = {encoding.value: {"schema": either} for encoding in Encoding}
        retry = {"headers": {"Retry-After": {"schema": {"type": "integer"}}}} if code in ("429", "503") else {}
        responses[code] = {"description": text, "content": content, **retry}
    request = {"required": True, "content": _content(body, _EXAMPLES[body])}
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "parameters": [_BUDGET, _TRACEPARENT],
            "requestBody": request,
            "responses": responses,
        }
    }


def _content(name: str, example: dict[str, Any] | None = None) -> dict[str, Any]:
    media: dict[str, Any] = {"schema": {"$ref": REFERENCE + name}}
    if example is not None:
        media["example"] = example
    return {encoding.value: media for encoding in Encoding}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


# -- the page ------------------------------------------------------------------------------------

_STYLE = """\
:root { color-scheme: light dark; --line: #8884; --code: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; background: var(--code); border-radius: 4px; }
code { padding: .1em .3em; } pre { padding: .75rem; white-space: pre-wrap; overflow-wrap: anywhere; }
pre code { padding: 0; background: none; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line); }
td:first-child { width: 12rem; } small { display: block; opacity: .75; }
@media (max-width: 40rem) { td:first-child { width: 8rem; } td:first-child code { overflow-wrap: anywhere; } }"""


def page(found: Mapping[str, Any], address: str) -> str:
    """The document as a page that loads nothing. `address` is that of the gateway, for the examples."""
    return "\n".join(_lines(found, html.escape(address.rstrip("/"))))


def _lines(found: Mapping[str, Any], address: str) -> Iterator[str]:
    title = html.escape(found["info"]["title"])
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
    yield f"<main><h1>{title} {html.escape(found['info']['version'])}</h1>"
    yield f"<p>{html.escape(found['info']['description'])}</p>"
    yield '<p><a href="openapi.json">The OpenAPI document</a></p>'
    schemas = found["components"]["schemas"]
    token = " -H 'authorization: Bearer TOKEN'" if found["security"] else ""
    for path, methods in found["paths"].items():
        call = methods["post"]
        media = call["requestBody"]["content"][Encoding.JSON.value]
        example = html.escape(json.dumps(media["example"]))
        yield f"<h2><code>POST {path}</code> {html.escape(call['summary'])}</h2>"
        command = f"curl -s {address}{path} -H 'content-type: application/json'{token} -d '{example}'"
        yield f"<pre><code>{command}</code></pre>"
        yield from _table(schemas, media["schema"]["$ref"].removeprefix(REFERENCE))
        yield '<h3>Answers</h3><div class="wide"><table><thead><tr><th>HTTP</th><th>meaning</th></tr></thead><tbody>'
        for code, answer in call["responses"].items():
            yield f"<tr><td>{code}</td><td>{html.escape(answer['description'])}</td></tr>"
        yield "</tbody></table></div>"
    for name in ("Accepted", "RankOutcome", "RankingResult", "Refusal", "History", "HistoryVersion", "Behaviours"):
        yield f"<h2 id='{name}'>{name}</h2>"
        yield f"<p>{_prose(schemas[name].get('description', ''))}</p>"
        yield from _table(schemas, name)
    yield "</main></body></html>"


def _table(schemas: Mapping[str, Any], name: str) -> Iterator[str]:
    yield '<div class="wide"><table><thead><tr><th>field</th><th>meaning</th></tr></thead><tbody>'
    for field, schema in schemas[name]["properties"].items():
        needed = "<small>required</small>" if field in schemas[name]["required"] else ""
        inner = [each["$ref"].removeprefix(REFERENCE) for each in (schema, *schema.get("allOf", ())) if "$ref" in each]
        link = f" <a href='#{inner[0]}'>{inner[0]}</a>" if inner else ""
        text = schema.get("description") or _values(schema)
        yield f"<tr><td><code>{field}</code>{needed}</td><td>{_prose(text)}{link}</td></tr>"
    yield "</tbody></table></div>"


def _values(schema: Mapping[str, Any]) -> str:
    """The values that a field may have, as JSON writes them; empty if there are too many to name."""
    if "const" in schema:
        return f"always `{json.dumps(schema['const'])}`"
    return f"one of {', '.join(f'`{json.dumps(value)}`' for value in schema['enum'])}" if "enum" in schema else ""


def _prose(text: str) -> str:
    """Text with names in backquotes as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
