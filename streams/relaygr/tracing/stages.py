"""The stages of one ranking request in its worker, from the times that the worker keeps. Pure.

The stages follow each other without overlap. Whenever the request has been received and no stage of its work runs, the
stage is `queue`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from relaygr.schemas.record import record


class TraceStage(enum.StrEnum):
    """What a request spends its time on."""

    QUEUE = "queue"
    HISTORY = "history"
    """Waiting for the user's history."""
    RELOAD = "reload"
    """Copying the prefix from DRAM to HBM."""
    PRE_INFER = "pre_infer"
    """The computation of the prefix for a pre-infer job."""
    FULL = "full"
    """The computation of the prefix for this request."""
    APPEND = "append"
    """The computation of the tail that the cached prefix lacks."""
    HIT = "hit"
    """The ranking pass over suffix and candidates."""


@record(frozen=True, slots=True)
class StageSpan:
    """One stage. Times are monotonic."""

    stage: TraceStage
    start_us: int
    end_us: int
    device_us: int | None = None
    """Device time within the stage; None: not a stage of the device, or the whole."""


@record(frozen=True, slots=True)
class RankingTimes:
    """Times of a request, monotonic; None and 0: that did not happen. Durations end with the time named beside them."""

    received_us: int
    ended_us: int
    """When the result was handed to the producer."""
    started_us: int | None = None
    """The first device work."""
    reload_us: int = 0
    reloaded_us: int = 0
    compute_us: int = 0
    """Device time of the prefix."""
    ready_us: int | None = None
    """The prefix was complete."""
    rank_us: int = 0
    ranked_us: int = 0
    history_wait_us: int = 0
    history_waited_us: int = 0


def stages_of(times: RankingTimes, computed: TraceStage) -> tuple[StageSpan, ...]:
    """The stages in their order. `computed`: the stage that the computation of the prefix was."""
    found: list[StageSpan] = []
    now_us = times.received_us
    for stage in sorted(_work(times, computed), key=lambda each: each.end_us):
        start_us, end_us = max(now_us, stage.start_us), min(stage.end_us, times.ended_us)
        if end_us <= start_us:
            continue
        if start_us > now_us:
            found.append(StageSpan(TraceStage.QUEUE, now_us, start_us))
        found.append(StageSpan(stage.stage, start_us, end_us, stage.device_us))
        now_us = end_us
    if not times.ranked_us and times.ended_us > now_us:
        found.append(StageSpan(TraceStage.QUEUE, now_us, times.ended_us))
    return tuple(found)


def _work(times: RankingTimes, computed: TraceStage) -> Iterator[StageSpan]:
    if times.history_wait_us:
        yield StageSpan(TraceStage.HISTORY, times.history_waited_us - times.history_wait_us, times.history_waited_us)
    if times.reload_us:
        yield StageSpan(TraceStage.RELOAD, times.reloaded_us - times.reload_us, times.reloaded_us)
    if times.compute_us:
        end_us = times.ready_us if times.ready_us is not None else times.ended_us
        # A request that joined the last chunk of a computation was started after it.
        started = times.started_us is not None and times.started_us < end_us
        start_us = times.started_us if started and times.started_us is not None else end_us - times.compute_us
        yield StageSpan(computed, start_us, end_us, times.compute_us)
    if times.rank_us:
        yield StageSpan(TraceStage.HIT, times.ranked_us - times.rank_us, times.ranked_us)
