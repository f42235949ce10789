"""One instance of every message, header set and history of the test vectors. `wire.json` holds their bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.headers import RankingHeaders, ResultHeaders
from relaygr.schemas.messages import (
    BehaviourEvent,
    Behaviours,
    BehavioursOffset,
    Continuation,
    Diverted,
    FullPathReport,
    History,
    HistoryVersion,
    LatencyCoefficients,
    LeadTimeReport,
    Path,
    PrefixSource,
    PreInferJob,
    PreInferSlots,
    RankingRequest,
    RankingResult,
    RetrievalEvent,
    StageTimings,
    StaleCause,
    WorkerState,
    WorkerStatus,
)

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
        Ended.RANKED,
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
        Ended.FAILED,
        0,
        NOW_US,
        NOW_US,
        StageTimings(),
        reason=Reason.UNDECODABLE,
        detail="no map",
    ),
    "History": HISTORY,
    "History, with its place in the behaviours topic": replace(
        HISTORY, first_position=40, covers=BehavioursOffset(5, 1_000_000, "Zb1XmZp3QyS3mF8cT7i2Pw")
    ),
    "History, saved by a worker": replace(
        HISTORY,
        first_position=40,
        covers=BehavioursOffset(5, 1_000_000, "Zb1XmZp3QyS3mF8cT7i2Pw"),
        continues=Continuation(
            next_offset=12,
            written_at_ms=1_700_000_000_000,
            covered_offset=900_000,
            covered_before_ms=0,
            offsets=np.array([999_999], "<i8"),
            recorded_at_ms=np.array([1_700_000_000_001], "<i8"),
            positions=np.array([-1], "<i8"),
            sent_times_ms=np.array([1_700_000_000_000], "<i8"),
            topic_id="aQ2XmZp3QyS3mF8cT7i2Pw",
        ),
    ),
    "History, with a cut": replace(HISTORY, cut_ms=1_700_000_000_000),
    "History, saved by a worker whose publisher's count began again": replace(
        HISTORY,
        covers=BehavioursOffset(5, 1_000_000),
        continues=Continuation(12, 0, 0, 0, *(np.empty(0, "<i8"),) * 4, next_position=1),
        cut_ms=1_700_000_000_000,
    ),
    "BehaviourEvent": BehaviourEvent("user-é", BEHAVIOURS),
    "BehaviourEvent, with its position": BehaviourEvent("user-é", BEHAVIOURS[:1], 42),
    "RetrievalEvent, exact length": RetrievalEvent(
        "gateway.1.7", "user-é", NOW_US, NOW_US + 80_000, 50, 512, 16, history_exactly=2
    ),
    "PreInferJob, least length": PreInferJob(
        "gateway.1.7", "user-é", NOW_US, NOW_US + 80_000, 50, 512, 16, NOW_US + 900, history_at_least=2
    ),
    "RetrievalEvent, scenario": RetrievalEvent(
        "gateway.1.7", "user-é", NOW_US, NOW_US + 80_000, 50, 512, 16, scenario="home"
    ),
    "PreInferJob, scenario": PreInferJob(
        "gateway.1.7", "user-é", NOW_US, NOW_US + 80_000, 50, 512, 16, NOW_US + 900, scenario="home"
    ),
    "RankingRequest, scenario": RankingRequest(
        "gateway.1.7", "user-é", NOW_US, NOW_US + 50_000, 1_700, np.array([5], "<i8"), BEHAVIOURS, scenario="home"
    ),
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
        LatencyCoefficients(*(n / 4 for n in range(13))),
    ),
}
MESSAGES["WorkerStatus, full path"] = replace(
    MESSAGES["WorkerStatus"], full_path=FullPathReport(4200, (0.0, 1.25), (0, 7), (0, 2), ("gateway.1.7",))
)
MESSAGES["WorkerStatus, wait of the full path"] = replace(
    MESSAGES["WorkerStatus"], full_path=FullPathReport(4200, (), (), (), (), full_outside_us=97_000)
)

MESSAGES["WorkerStatus, lead times"] = replace(
    MESSAGES["WorkerStatus"],
    lead_times=LeadTimeReport(("default",), (0.75,), (60_000,), (80_000,)),
    reuses_prefixes=False,
)
MESSAGES["WorkerStatus, takes diverted requests"] = replace(MESSAGES["WorkerStatus"], overflow_partitions=(3, 11))
MESSAGES["WorkerStatus, pre-infer worker"] = replace(
    MESSAGES["WorkerStatus"], partitions=(), pre_infer=PreInferSlots(4, 1, 1200, 7)
)
MESSAGES["WorkerStatus, since when"] = replace(MESSAGES["WorkerStatus"], active_since_us=NOW_US - 60_000_000)
MESSAGES["RankingRequest, diverted"] = replace(
    MESSAGES["RankingRequest"],
    history_version=None,
    history=replace(HISTORY, behaviours=BEHAVIOURS[1:], first_position=1),
    diverted=Diverted("worker-01", 1, VERSION, history_stale=True),
)
MESSAGES["RankingResult, diverted"] = replace(MESSAGES["RankingResult, failed"], diverted_by="worker-01")
MESSAGES["RankingResult, unknown inputs"] = replace(
    MESSAGES["RankingResult, ranked"], unknown_actions=3, unknown_features=2, history_missing=True
)
MESSAGES["RankingRequest, diverted with a stale history"] = replace(
    MESSAGES["RankingRequest, diverted"],
    diverted=Diverted("worker-01", 1, VERSION, history_stale=True, history_stale_cause=StaleCause.GAP),
)
MESSAGES["RankingResult, waited for its history in vain"] = replace(
    MESSAGES["RankingResult, ranked"],
    timings=StageTimings(1, 2, 3, 4, 5, 13, history_wait_us=7),
    history_stale_cause=StaleCause.BEHIND,
)

HEADERS: dict[str, Any] = {
    "RankingHeaders": RankingHeaders("gateway.1.7", "gateway", "relaygr.results", 5, NOW_US + 130_000),
    "RankingHeaders, diverted": RankingHeaders(
        "gateway.1.7", "gateway", "relaygr.results", 5, NOW_US + 130_000, diverted_by="worker-01"
    ),
    "ResultHeaders": ResultHeaders("gateway.1.7", "gateway"),
}


def _long_history() -> History:
    numbers = np.arange(130)
    behaviours = Behaviours(numbers + 1000, (numbers % 7).astype("<u2"), numbers * 1000 + 1_700_000_000_000)
    return History("user-é", 8, np.array([3, -4], "<i8"), behaviours)


HISTORIES: dict[str, History] = {
    "no features and no behaviours": History("user-é", 1, np.empty(0, "<i8"), Behaviours.empty()),
    "two behaviours": HISTORY,
    "130 behaviours: two full blocks and a short one": _long_history(),
}

REFUSED: dict[str, tuple[type[Any], bytes]] = {
    "no bytes": (RankingRequest, b""),
    "a later version": (RankingRequest, b"\x02\x80"),
    "no MessagePack": (RankingRequest, b"\x01\xc1"),
    "a list instead of a map": (RankingRequest, b"\x01\x90"),
    "a map without the required fields": (RankingRequest, b"\x01\x80"),
    "a map that is cut off": (RankingRequest, b"\x01\x81\xaarequest"),
    "a field twice": (RankingRequest, b"\x01\x82\xa1a\x01\xa1a\x02"),
}

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
USER_IDS: tuple[str, ...] = (
    # Every length of the hash's last word, text beyond ASCII, digits, and ids as they are common.
    *(_LETTERS[:length] for length in range(1, 14)),
    *("é", "ü-1", "用户", "用户-42", "пользователь", "👤", "👤👤", "user-é"),
    *(f"user-{number}" for number in range(12)),
    *(str(number) for number in (0, 7, 42, 1_000, 123_456_789, 2**31, 2**63 - 1)),
    *("ann@example.org", "ANN@EXAMPLE.ORG", "a b", "a/b:c", "00000000-0000-4000-8000-000000000000"),
    *("f47ac10b-58cc-4372-a567-0e02b2c3d479", "x" * 63, "x" * 64, "x" * 65, "x" * 256),
)
PARTITION_COUNTS = (12, 48)
