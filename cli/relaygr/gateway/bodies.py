"""The bodies of the API: their fields, and their two encodings.

JSON and MessagePack carry the same object. Arrays are lists of numbers and digests are hexadecimal text; in MessagePack
both may be bytes instead, as on the topics (arrays packed little-endian). Results have lists in both.

A body costs memory and time in proportion to its size only: what MessagePack headers claim is compared with the bytes
that there are before anything is allocated for it.
"""

from __future__ import annotations

import enum
import json
from typing import Annotated, Any, TypeVar

import msgpack

from relaygr.ingest.json_lines import JsonLineError, parse_object
from relaygr.ingest.messages import check_times, with_history_user
from relaygr.schemas.codec import MAX_MAP_ENTRIES, unpack_bounded
from relaygr.schemas.fields import FieldError, Packed, Real, UInt
from relaygr.schemas.json_messages import from_json
from relaygr.schemas.messages import (
    MAX_BEHAVIOURS,
    MAX_BUDGET_MS,
    MAX_CANDIDATES,
    MAX_SUFFIX_BEHAVIOURS,
    REQUEST_ID_TEXT,
    AskedVersion,
    Behaviours,
    ExactLength,
    InlineHistory,
    Int64Array,
    LeastLength,
    Scenario,
    UserId,
)
from relaygr.schemas.record import record

B = TypeVar("B")


class Encoding(enum.StrEnum):
    """An encoding of bodies, named by its media type."""

    JSON = "application/json"
    MESSAGEPACK = "application/msgpack"


MEDIA_TYPES = {
    "application/json": Encoding.JSON,
    "application/msgpack": Encoding.MESSAGEPACK,
    "application/x-msgpack": Encoding.MESSAGEPACK,
    "application/vnd.msgpack": Encoding.MESSAGEPACK,
}
"""The media types that requests may name."""


class BadBody(ValueError):  # noqa: N818 - named for the state, as the client's errors are
    """The body is not an object, or one of its fields is invalid. The text names the field."""


@record(frozen=True, slots=True)
class RetrievalBody:
    """An impression begins: `POST /v1/retrieval`."""

    user_id: UserId
    expected_ranking_in_ms: Annotated[
        int, UInt("ms", MAX_BUDGET_MS), "time from now to the ranking request: retrieval and pre-processing"
    ]
    expected_candidates: Annotated[int, UInt("candidates", MAX_CANDIDATES), "estimated number of candidates"]
    expected_suffix: Annotated[
        int, UInt("behaviours", MAX_SUFFIX_BEHAVIOURS), "estimated number of short-term behaviours"
    ] = 0
    ranking_budget_ms: Annotated[
        int | None,
        UInt("ms", MAX_BUDGET_MS, 1),
        "time limit of the ranking stage; required here or in the header x-relaygr-budget-ms",
    ] = None
    history_version: AskedVersion = None
    history: InlineHistory = None
    history_exactly: ExactLength = None
    history_at_least: LeastLength = None
    request_id: Annotated[str | None, REQUEST_ID_TEXT, "id of the impression; absent: a new one"] = None
    scenario: Scenario = None


@record(frozen=True, slots=True, eq=False)
class RankBody:
    """A ranking request: `POST /v1/rank`."""

    user_id: UserId
    candidates: Annotated[Int64Array, Packed("<i8", MAX_CANDIDATES, "candidates", min_length=1), "item ids to score"]
    budget_ms: Annotated[
        float | None,
        Real("ms"),
        "time from the receipt of the request to its deadline; required here or in the header x-relaygr-budget-ms",
    ] = None
    query_time_ms: Annotated[
        int | None, UInt("ms since the epoch"), "`query_time_ms` of the answer to /v1/retrieval; absent: now"
    ] = None
    suffix: Annotated[Behaviours | None, "short-term behaviours that follow the prefix; absent: none"] = None
    history_version: AskedVersion = None
    history: InlineHistory = None
    history_exactly: ExactLength = None
    history_at_least: LeastLength = None
    request_id: Annotated[
        str | None, REQUEST_ID_TEXT, "`request_id` of the answer to /v1/retrieval; absent: a new one"
    ] = None
    scenario: Scenario = None


def read_body(body: type[B], encoding: Encoding, data: bytes) -> B:
    """The fields of a request's body. Raises BadBody."""
    content = _object(encoding, data)
    try:
        check_times(content)
        return from_json(body, with_history_user(content))
    except FieldError as error:
        raise BadBody(str(error).lstrip(".: ")) from error


def write_body(encoding: Encoding, content: dict[str, Any]) -> bytes:
    """The body of an answer. Floats of results are float32, so MessagePack writes them as such."""
    if encoding is Encoding.JSON:
        return json.dumps(content, separators=(",", ":")).encode()
    return bytes(msgpack.packb(content, use_single_float=True, unicode_errors="replace"))


def _object(encoding: Encoding, data: bytes) -> dict[str, Any]:
    if encoding is Encoding.JSON:
        try:
            return parse_object(data)
        except JsonLineError as error:
            raise BadBody(f"the body is {error}" if str(error).startswith("not") else str(error)) from error
    try:
        # Builds nothing, and raises if a map or list claims more entries than there are.
        unpacker = msgpack.Unpacker(max_buffer_size=len(data))
        unpacker.feed(data)
        unpacker.skip()
        content = unpack_bounded(data, MAX_MAP_ENTRIES, MAX_BEHAVIOURS)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError) as error:
        raise BadBody(f"the body is not MessagePack: {str(error)[:200] or type(error).__name__}") from error
    if not isinstance(content, dict):
        raise BadBody("the body is not a MessagePack map")
    return content
