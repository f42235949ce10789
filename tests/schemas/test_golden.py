"""The wire form, held still: exact bytes of one instance of every message, header set and digest chain.

A change here is a change of the wire form: read the policy in `relaygr.schemas.codec` first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relaygr.schemas import (
    Behaviours,
    FailureReason,
    History,
    HistoryVersion,
    LatencyCoefficients,
    Outcome,
    Path,
    PrefixSource,
    PreInferJob,
    RankingRequest,
    RankingResult,
    RetrievalEvent,
    StageTimings,
    WorkerState,
    WorkerStatus,
    decode,
    digest_chain,
    encode,
)
from relaygr.schemas.headers import RankingHeaders, ResultHeaders

BEHAVIOURS = Behaviours(
    np.array([101, -1], "<i8"), np.array([1, 65535], "<u2"), np.array([1_700_000_000_000, 1_700_000_000_001], "<i8")
)
VERSION = HistoryVersion(7, 2, bytes(range(16)))
HISTORY = History("user-é", 7, np.array([3, -4], "<i8"), BEHAVIOURS)
NOW_US = 1_700_000_000_000_000

MESSAGES: dict[str, Any] = {
    "RetrievalEvent": RetrievalEvent(
        "gateway.1.7", "user-é", NOW_US, NOW_US + 80_000, 50, 512, 16, history_version=VERSION
    ),
    "RetrievalEvent, history inline": RetrievalEvent(
        "gateway.1.7", "user-é", NOW_US, NOW_US + 80_000, 50, 512, 16, history=HISTORY
    ),
    "PreInferJob": PreInferJob(
        "gateway.1.7", "user-é", NOW_US, NOW_US + 80_000, 50, 512, 16, NOW_US + 900, history_version=VERSION
    ),
    "RankingRequest": RankingRequest(
        "gateway.1.7",
        "user-é",
        NOW_US + 80_000,
        NOW_US + 130_000,
        NOW_US // 1000,
        np.array([5, 2**62], "<i8"),
        BEHAVIOURS,
        history_version=VERSION,
    ),
    "RankingResult, ranked": RankingResult(
        "gateway.1.7",
        "worker-00",
        Outcome.RANKED,
        NOW_US,
        NOW_US + 1,
        NOW_US + 2,
        StageTimings(1, 2, 3, 4, 5, 6),
        path=Path.HBM,
        prefix_source=PrefixSource.COMPUTED,
        num_tasks=2,
        scores=np.array([0.5, -1.25, 0, 3], "<f4"),
        prefix_tokens=10,
        tokens_cached=8,
        history_version=VERSION,
        history_stale=True,
        history_loading=False,
        unknown_items=1,
        model_revision="rev-1",
    ),
    "RankingResult, failed": RankingResult(
        "gateway.1.7",
        "worker-00",
        Outcome.FAILED,
        0,
        NOW_US,
        NOW_US,
        StageTimings(),
        reason=FailureReason.UNDECODABLE,
        detail="no map",
    ),
    "History": HISTORY,
    "WorkerStatus": WorkerStatus(
        "worker-00",
        WorkerState.READY,
        NOW_US,
        3,
        (0, 1, 47),
        "rev-1",
        1024,
        2,
        2,
        4096,
        2**30,
        2**29,
        2**31,
        2**20,
        1500,
        2500,
        LatencyCoefficients(*(n / 4 for n in range(12))),
    ),
}

GOLDEN: dict[str, str] = {
    "RetrievalEvent": (
        "0188aa726571756573745f6964ab676174657761792e312e37a7757365725f6964a7757365722dc3a9af726574726965"
        "76616c5f61745f7573cf00060a24181e4000b665787065637465645f72616e6b696e675f61745f7573cf00060a24181f"
        "7880b172616e6b696e675f6275646765745f6d7332b365787065637465645f63616e64696461746573cd0200af657870"
        "65637465645f73756666697810af686973746f72795f76657273696f6e83a66e756d62657207a66c656e67746802a664"
        "6967657374c410000102030405060708090a0b0c0d0e0f"
    ),
    "RetrievalEvent, history inline": (
        "0188aa726571756573745f6964ab676174657761792e312e37a7757365725f6964a7757365722dc3a9af726574726965"
        "76616c5f61745f7573cf00060a24181e4000b665787065637465645f72616e6b696e675f61745f7573cf00060a24181f"
        "7880b172616e6b696e675f6275646765745f6d7332b365787065637465645f63616e64696461746573cd0200af657870"
        "65637465645f73756666697810a7686973746f727984a7757365725f6964a7757365722dc3a9a66e756d62657207a866"
        "65617475726573c4100300000000000000fcffffffffffffffaa6265686176696f75727383a56974656d73c410650000"
        "0000000000ffffffffffffffffa7616374696f6e73c4040100ffffad74696d657374616d70735f6d73c4100068e5cf8b"
        "0100000168e5cf8b010000"
    ),
    "PreInferJob": (
        "0189aa726571756573745f6964ab676174657761792e312e37a7757365725f6964a7757365722dc3a9af726574726965"
        "76616c5f61745f7573cf00060a24181e4000b665787065637465645f72616e6b696e675f61745f7573cf00060a24181f"
        "7880b172616e6b696e675f6275646765745f6d7332b365787065637465645f63616e64696461746573cd0200af657870"
        "65637465645f73756666697810ad646563696465645f61745f7573cf00060a24181e4384af686973746f72795f766572"
        "73696f6e83a66e756d62657207a66c656e67746802a6646967657374c410000102030405060708090a0b0c0d0e0f"
    ),
    "RankingRequest": (
        "0188aa726571756573745f6964ab676174657761792e312e37a7757365725f6964a7757365722dc3a9aa73656e745f61"
        "745f7573cf00060a24181f7880ab646561646c696e655f7573cf00060a2418203bd0ad71756572795f74696d655f6d73"
        "cf0000018bcfe56800aa63616e64696461746573c41005000000000000000000000000000040a673756666697883a569"
        "74656d73c4106500000000000000ffffffffffffffffa7616374696f6e73c4040100ffffad74696d657374616d70735f"
        "6d73c4100068e5cf8b0100000168e5cf8b010000af686973746f72795f76657273696f6e83a66e756d62657207a66c65"
        "6e67746802a6646967657374c410000102030405060708090a0b0c0d0e0f"
    ),
    "RankingResult, ranked": (
        "01de0012aa726571756573745f6964ab676174657761792e312e37a9776f726b65725f6964a9776f726b65722d3030a7"
        "6f7574636f6d65a672616e6b6564b2726571756573745f73656e745f61745f7573cf00060a24181e4000ae7265636569"
        "7665645f61745f7573cf00060a24181e4001aa73656e745f61745f7573cf00060a24181e4002a774696d696e677386a8"
        "71756575655f757301a7776169745f757302ac7072655f696e6665725f757303a972656c6f61645f757304a772616e6b"
        "5f757305a8746f74616c5f757306a470617468a368626dad7072656669785f736f75726365a8636f6d7075746564a96e"
        "756d5f7461736b7302a673636f726573c4100000003f0000a0bf0000000000004040ad7072656669785f746f6b656e73"
        "0aad746f6b656e735f63616368656408af686973746f72795f76657273696f6e83a66e756d62657207a66c656e677468"
        "02a6646967657374c410000102030405060708090a0b0c0d0e0fad686973746f72795f7374616c65c3af686973746f72"
        "795f6c6f6164696e67c2ad756e6b6e6f776e5f6974656d7301ae6d6f64656c5f7265766973696f6ea57265762d31"
    ),
    "RankingResult, failed": (
        "018faa726571756573745f6964ab676174657761792e312e37a9776f726b65725f6964a9776f726b65722d3030a76f75"
        "74636f6d65a66661696c6564b2726571756573745f73656e745f61745f757300ae72656365697665645f61745f7573cf"
        "00060a24181e4000aa73656e745f61745f7573cf00060a24181e4000a774696d696e677386a871756575655f757300a7"
        "776169745f757300ac7072655f696e6665725f757300a972656c6f61645f757300a772616e6b5f757300a8746f74616c"
        "5f757300a6726561736f6eab756e6465636f6461626c65a664657461696ca66e6f206d6170a96e756d5f7461736b7300"
        "ad7072656669785f746f6b656e7300ad746f6b656e735f63616368656400ad686973746f72795f7374616c65c2af6869"
        "73746f72795f6c6f6164696e67c2ad756e6b6e6f776e5f6974656d7300"
    ),
    "History": (
        "0184a7757365725f6964a7757365722dc3a9a66e756d62657207a86665617475726573c4100300000000000000fcffff"
        "ffffffffffaa6265686176696f75727383a56974656d73c4106500000000000000ffffffffffffffffa7616374696f6e"
        "73c4040100ffffad74696d657374616d70735f6d73c4100068e5cf8b0100000168e5cf8b010000"
    ),
    "WorkerStatus": (
        "01de0011a9776f726b65725f6964a9776f726b65722d3030a57374617465a57265616479ad7772697474656e5f61745f"
        "7573cf00060a24181e4000b061737369676e6d656e745f65706f636803aa706172746974696f6e739300012fae6d6f64"
        "656c5f7265766973696f6ea57265762d31b26b765f62797465735f7065725f746f6b656ecd0400b1636f6e7465787475"
        "616c5f746f6b656e7302b4746f6b656e735f7065725f6265686176696f757202b56d61785f7072656669785f62656861"
        "76696f757273cd1000b268626d5f63617061636974795f6279746573ce40000000ae68626d5f667265655f6279746573"
        "ce20000000b36472616d5f63617061636974795f6279746573ce80000000af6472616d5f667265655f6279746573ce00"
        "100000b472616e6b696e675f71756575655f7039395f7573cd05dcb1707265696e6665725f71756575655f7573cd09c4"
        "a76c6174656e63798ca26130cb0000000000000000a26131cb3fd0000000000000a26132cb3fe0000000000000a26230"
        "cb3fe8000000000000a26231cb3ff0000000000000a26232cb3ff4000000000000a26330cb3ff8000000000000a26331"
        "cb3ffc000000000000a26332cb4000000000000000a26430cb4002000000000000a26431cb4004000000000000a26333"
        "cb4006000000000000"
    ),
}

STATUS_WITHOUT_C3 = (
    "01de0011a9776f726b65725f6964a9776f726b65722d3030a57374617465a57265616479ad7772697474656e5f61745f"
    "7573cf00060a24181e4000b061737369676e6d656e745f65706f636803aa706172746974696f6e739300012fae6d6f64"
    "656c5f7265766973696f6ea57265762d31b26b765f62797465735f7065725f746f6b656ecd0400b1636f6e7465787475"
    "616c5f746f6b656e7302b4746f6b656e735f7065725f6265686176696f757202b56d61785f7072656669785f62656861"
    "76696f757273cd1000b268626d5f63617061636974795f6279746573ce40000000ae68626d5f667265655f6279746573"
    "ce20000000b36472616d5f63617061636974795f6279746573ce80000000af6472616d5f667265655f6279746573ce00"
    "100000b472616e6b696e675f71756575655f7039395f7573cd05dcb1707265696e6665725f71756575655f7573cd09c4"
    "a76c6174656e63798ba26130cb0000000000000000a26131cb3fd0000000000000a26132cb3fe0000000000000a26230"
    "cb3fe8000000000000a26231cb3ff0000000000000a26232cb3ff4000000000000a26330cb3ff8000000000000a26331"
    "cb3ffc000000000000a26332cb4000000000000000a26430cb4002000000000000a26431cb4004000000000000"
)
"""Of a worker older than the coefficient `c3`."""

DIGESTS = [
    "795ff67172aae511a9e523015d605231",
    "e45307bb9813f392553a83a6494bc897",
    "5f61cb2ec43af8c1838ee724fa24218d",
    "ebd20644b874e60ed49d55c3ee3be425",
]
VERSION_DIGEST = "2be8df9735f83a1b5dd8446a7e568e31"

HEADERS: dict[str, tuple[Any, list[tuple[str, bytes]]]] = {
    "RankingHeaders": (
        RankingHeaders("gateway.1.7", "gateway", "relaygr.results", 5, NOW_US + 130_000),
        [
            ("request_id", b"gateway.1.7"),
            ("gateway_id", b"gateway"),
            ("reply_topic", b"relaygr.results"),
            ("reply_partition", b"5"),
            ("deadline_us", b"1700000000130000"),
        ],
    ),
    "ResultHeaders": (
        ResultHeaders("gateway.1.7", "gateway"),
        [("request_id", b"gateway.1.7"), ("gateway_id", b"gateway")],
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_exactly_these_bytes(name: str) -> None:
    assert encode(MESSAGES[name]).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_these_bytes_are_read_as_the_message(name: str) -> None:
    message = MESSAGES[name]
    assert decode(type(message), bytes.fromhex(GOLDEN[name])) == message


def test_a_status_of_an_older_worker_is_read_with_the_default_of_what_it_lacks() -> None:
    status = MESSAGES["WorkerStatus"]
    assert decode(WorkerStatus, bytes.fromhex(STATUS_WITHOUT_C3)) == replace(
        status, latency=replace(status.latency, c3=0.0)
    )


@pytest.mark.parametrize("name", HEADERS)
def test_headers_have_exactly_these_bytes(name: str) -> None:
    headers, wire = HEADERS[name]
    assert headers.encode() == wire
    assert type(headers).decode(wire) == headers


def test_the_digest_chain_has_exactly_these_values() -> None:
    numbers = np.arange(130)
    history = Behaviours(numbers + 1000, (numbers % 7).astype("<u2"), numbers * 1000 + 1_700_000_000_000)
    chain = digest_chain(np.array([3, -4], "<i8"), history)
    assert [digest.hex() for digest in (chain.seed, *chain.blocks)] == DIGESTS


def test_a_version_names_its_history() -> None:
    version = HISTORY.version()
    assert (version.number, version.length, version.digest.hex()) == (7, 2, VERSION_DIGEST)
