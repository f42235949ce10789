"""Hypothesis strategies for every message: `messages()[RankingRequest]` draws valid ranking requests."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from relaygr.schemas import (
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
    LengthRatios,
    Other,
    Path,
    PrefixSource,
    PreInferJob,
    RankingRequest,
    RankingResult,
    RetrievalEvent,
    StageTimings,
    StaleCause,
    WorkerState,
    WorkerStatus,
)
from relaygr.schemas.ended import WIRE_ENDS, WIRE_REASONS, Ended
from relaygr.schemas.fields import INT64_MAX, MAX_CHOICE_BYTES
from relaygr.schemas.messages import (
    LENGTH_BUCKETS,
    MAX_BEHAVIOURS,
    MAX_BUDGET_MS,
    MAX_CANDIDATES,
    MAX_PARTITIONS,
    MAX_POSITION,
    MAX_SUFFIX_BEHAVIOURS,
    MAX_TASKS,
    MAX_VERSION_NUMBER,
)
from relaygr.schemas.times import wrong_unit

INT64_MIN = -(2**63)
item_ids = st.integers(INT64_MIN, INT64_MAX)
timestamps_ms = st.integers(INT64_MIN, INT64_MAX) | st.integers(1_600_000_000_000, 1_800_000_000_000)
whole = st.integers(0, INT64_MAX)
times_us = whole.filter(lambda time: wrong_unit(time, "microseconds") is None)
times_ms = whole.filter(lambda time: wrong_unit(time, "milliseconds") is None)
real = st.floats(allow_nan=False, allow_infinity=False)
digests = st.binary(min_size=16, max_size=16)


def texts(max_bytes: int) -> st.SearchStrategy[str]:
    """Text that a field of `max_bytes` takes."""
    characters = st.characters(exclude_categories=("Cc", "Cs"))
    return st.text(characters, min_size=1, max_size=20).filter(lambda text: len(text.encode()) <= max_bytes)


def choices(members: type[enum.StrEnum] | tuple[enum.StrEnum, ...]) -> st.SearchStrategy[Any]:
    """A value of an open choice: a member, or a text of a newer version."""
    unknown = texts(MAX_CHOICE_BYTES).filter(lambda text: text not in set(members)).map(Other)
    return st.sampled_from(members) | unknown


@st.composite
def behaviours(draw: st.DrawFn, max_length: int = 20) -> Behaviours:
    """Behaviours whose time never falls; extreme ids and times included."""
    length = draw(st.integers(0, max_length))
    items = draw(hnp.arrays("<i8", length, elements=item_ids))
    actions = draw(hnp.arrays("<u2", length))
    times = sorted(draw(st.lists(timestamps_ms, min_size=length, max_size=length)))
    if times and wrong_unit(times[-1], "milliseconds"):
        times[-1] = INT64_MAX  # A newest time in another unit is refused.
    return Behaviours(items, actions, np.array(times, dtype="<i8"))


version_numbers = st.integers(0, MAX_VERSION_NUMBER)
positions = st.integers(0, MAX_POSITION)
covers = st.builds(
    BehavioursOffset,
    st.integers(0, MAX_PARTITIONS),
    st.integers(0, INT64_MAX),
    st.none() | st.text("azAZ09_-", min_size=1, max_size=20),
)
history_versions = st.builds(HistoryVersion, version_numbers, st.integers(0, MAX_BEHAVIOURS), digests)


@st.composite
def continuations(draw: st.DrawFn, most: int) -> Continuation:
    """How a worker's snapshot of at most `most` behaviours continues others."""
    length = draw(st.integers(0, most))

    def arrays(least: int, largest: int) -> Any:
        return draw(hnp.arrays("<i8", length, elements=st.integers(least, largest)))

    return Continuation(
        *(draw(st.integers(0, INT64_MAX)) for _ in range(4)),
        arrays(0, INT64_MAX),
        arrays(0, INT64_MAX),
        arrays(-1, MAX_POSITION),
        arrays(-INT64_MAX, INT64_MAX),
        draw(st.none() | st.text("azAZ09_-", min_size=1, max_size=20)),
        draw(st.none() | positions),
    )


@st.composite
def histories(draw: st.DrawFn, user_id: str | None = None) -> History:
    """A history, of `user_id` if given."""
    user = draw(texts(256)) if user_id is None else user_id
    features = draw(hnp.arrays("<i8", st.integers(0, 8), elements=item_ids))
    shown = draw(behaviours())
    return History(
        user,
        draw(version_numbers),
        features,
        shown,
        draw(st.none() | positions),
        draw(st.none() | covers),
        draw(st.none() | continuations(len(shown))),
        draw(st.none() | whole),
    )


@st.composite
def _histories_of(draw: st.DrawFn, user_id: str) -> dict[str, Any]:
    """The history fields that impressions share: none, a length, or history and version, in agreement."""
    length = draw(st.none() | st.sampled_from(("history_exactly", "history_at_least")))
    if length is not None:
        return {length: draw(st.integers(0, MAX_BEHAVIOURS))}
    history = draw(st.none() | histories(user_id))
    version = draw(st.none() | history_versions)
    if history is not None and version is not None:
        version = history.version()
    return {"history": history, "history_version": version}


def _estimates(draw: st.DrawFn) -> dict[str, Any]:
    """What the retrieval event says and the pre-infer job repeats."""
    user_id = draw(texts(256))
    return {
        "request_id": draw(texts(128)),
        "user_id": user_id,
        "retrieval_at_us": draw(times_us),
        "expected_ranking_at_us": draw(times_us),
        "ranking_budget_ms": draw(st.integers(1, MAX_BUDGET_MS)),
        "expected_candidates": draw(st.integers(0, MAX_CANDIDATES)),
        "expected_suffix": draw(st.integers(0, MAX_SUFFIX_BEHAVIOURS)),
        "scenario": draw(st.none() | texts(64)),
        **draw(_histories_of(user_id)),
    }


@st.composite
def behaviour_events(draw: st.DrawFn) -> BehaviourEvent:
    new = draw(behaviours().filter(lambda drawn: len(drawn) > 0))
    return BehaviourEvent(draw(texts(256)), new, draw(st.none() | positions))


@st.composite
def retrieval_events(draw: st.DrawFn) -> RetrievalEvent:
    return RetrievalEvent(**_estimates(draw))


@st.composite
def preinfer_jobs(draw: st.DrawFn) -> PreInferJob:
    return PreInferJob(**_estimates(draw), decided_at_us=draw(whole))


@st.composite
def ranking_requests(draw: st.DrawFn) -> RankingRequest:
    user_id = draw(texts(256))
    return RankingRequest(
        request_id=draw(texts(128)),
        user_id=user_id,
        sent_at_us=draw(times_us),
        deadline_us=draw(times_us),
        query_time_ms=draw(times_ms),
        candidates=draw(hnp.arrays("<i8", st.integers(1, 20), elements=item_ids)),
        suffix=draw(behaviours()),
        scenario=draw(st.none() | texts(64)),
        diverted=draw(
            st.none()
            | st.builds(
                Diverted,
                texts(128),
                st.integers(0, MAX_BEHAVIOURS),
                st.none() | history_versions,
                st.booleans(),
                st.booleans(),
                st.none() | choices(StaleCause),
            )
        ),
        **draw(_histories_of(user_id)),
    )


@st.composite
def ranking_results(draw: st.DrawFn) -> RankingResult:
    outcome = draw(st.sampled_from(WIRE_ENDS))
    specific: dict[str, Any] = {}
    if outcome is Ended.RANKED:
        num_tasks = draw(st.integers(1, MAX_TASKS))
        size = num_tasks * draw(st.integers(1, 10))
        specific = {
            "path": draw(choices(Path)),
            "prefix_source": draw(st.none() | choices(PrefixSource)),
            "num_tasks": num_tasks,
            "scores": draw(hnp.arrays("<f4", size, elements=st.floats(-(2.0**100), 2.0**100, width=32))),
            "history_version": draw(st.none() | history_versions),
            "model_revision": draw(texts(64)),
        }
    elif outcome is Ended.FAILED:
        specific = {"reason": draw(choices(WIRE_REASONS)), "detail": draw(st.none() | texts(512))}
    return RankingResult(
        request_id=draw(texts(128)),
        worker_id=draw(texts(128)),
        outcome=outcome,
        request_sent_at_us=draw(whole),
        received_at_us=draw(whole),
        sent_at_us=draw(whole),
        timings=StageTimings(*draw(st.lists(whole, min_size=6, max_size=6)), draw(st.none() | whole)),
        prefix_tokens=draw(whole),
        tokens_cached=draw(whole),
        history_stale=draw(st.booleans()),
        history_loading=draw(st.booleans()),
        unknown_items=draw(whole),
        backlog_us=draw(st.none() | whole),
        diverted_by=draw(st.none() | texts(128)),
        unknown_actions=draw(st.none() | whole),
        unknown_features=draw(st.none() | whole),
        history_missing=draw(st.none() | st.booleans()),
        history_stale_cause=draw(st.none() | choices(StaleCause)),
        **specific,
    )


full_path_reports = st.builds(
    FullPathReport,
    outside_us=whole,
    ratios=st.lists(real, max_size=LENGTH_BUCKETS).map(tuple),
    prepared=st.lists(whole, max_size=LENGTH_BUCKETS).map(tuple),
    needless=st.lists(whole, max_size=LENGTH_BUCKETS).map(tuple),
    missed=st.lists(texts(128), max_size=20).map(tuple),
    full_outside_us=st.none() | whole,
)
lead_time_reports = st.builds(
    LeadTimeReport,
    scenarios=st.lists(texts(64), max_size=3).map(tuple),
    low_shares=st.lists(real, max_size=3).map(tuple),
    low_us=st.lists(whole, max_size=3).map(tuple),
    median_us=st.lists(whole, max_size=3).map(tuple),
)
worker_statuses = st.builds(
    WorkerStatus,
    worker_id=texts(128),
    state=choices(WorkerState),
    written_at_us=whole,
    assignment_epoch=whole,
    partitions=st.lists(st.integers(0, MAX_PARTITIONS), max_size=60).map(tuple),
    model_revision=texts(64),
    kv_bytes_per_token=whole,
    contextual_tokens=whole,
    tokens_per_behaviour=st.integers(1, 16),
    max_prefix_behaviours=whole,
    hbm_capacity_bytes=whole,
    hbm_free_bytes=whole,
    dram_capacity_bytes=whole,
    dram_free_bytes=whole,
    ranking_queue_p99_us=whole,
    preinfer_queue_us=whole,
    latency=st.builds(LatencyCoefficients, *[real] * 13),
    full_path=st.none() | full_path_reports,
    ranking_backlog_us=st.none() | whole,
    host=st.none() | texts(255),
    metrics_url=st.none() | texts(255),
    lead_times=st.none() | lead_time_reports,
    reuses_prefixes=st.none() | st.booleans(),
    length_ratios=st.none() | st.builds(LengthRatios, *[st.lists(real, max_size=LENGTH_BUCKETS).map(tuple)] * 3),
    predictions_off=st.none() | st.booleans(),
    overflow_partitions=st.none() | st.lists(st.integers(0, MAX_PARTITIONS), max_size=64).map(tuple),
    active_since_us=st.none() | whole,
)


def messages() -> dict[type[Any], st.SearchStrategy[Any]]:
    """A strategy for each message that is the value of a topic."""
    return {
        RetrievalEvent: retrieval_events(),
        PreInferJob: preinfer_jobs(),
        RankingRequest: ranking_requests(),
        RankingResult: ranking_results(),
        History: histories(),
        BehaviourEvent: behaviour_events(),
        WorkerStatus: worker_statuses,
    }
