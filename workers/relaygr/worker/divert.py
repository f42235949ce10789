"""Passes ranking requests for which this worker has no time on to another worker, over the topic `ranking-overflow`.

`relaygr.admission.divert` decides; this module carries the decision out:

* The request keeps its id, reply address and deadline, so that the other worker answers the gateway itself. It carries
  its history inline, since the other worker does not read this user's partition.
* The other worker keeps the prefix as any other, and the policy sends the user's next requests there.
* The request's offset is finished on the delivery report. If this process dies before the report, the next owner of the
  partition reads the request again. Two workers may then answer it, and the gateway's client drops the second result.
* If the message cannot be delivered, the request is answered `failed(overloaded)`.

The poll thread calls `may_divert` for requests that it would refuse undecoded, and the device thread calls `divert` for
requests that later find no time. Both may call at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import structlog
from confluent_kafka import KafkaException, Producer

from relaygr.admission.divert import DivertOutcome, DivertPolicy, Need, Placed, Target
from relaygr.consumer.interface import Received
from relaygr.runtime.clock import Clock
from relaygr.schemas.codec import EncodeError, encode
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import Behaviours, Diverted, History, RankingRequest
from relaygr.worker.executor.backlog import Backlog
from relaygr.worker.executor.resolver import HistoryReader, longest_anchor, read_history
from relaygr.worker.executor.work import Unranked
from relaygr.worker.history.resolve import (
    HistoryMismatchError,
    ResolvedHistory,
    chosen_at_ms,
    wanted_by,
    window_start,
)
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.interface import Engine
from relaygr.worker.results import NO_TIME, ResultWriter
from relaygr.worker.settings import WorkerSettings

log = structlog.get_logger()

LEAST_TRANSIT_US: Final = 4_000
"""The least assumed time from here to the device thread of another worker."""
_BEHAVIOUR_BYTES: Final = 18
_ADDED_BYTES: Final = 768
"""Upper bound on what diverting adds to the request: history without behaviours and features, and worker's name."""


@dataclass(frozen=True, slots=True)
class DivertParts:
    """The parts of the worker that a diverter needs. `topic`: of diverted requests. `engine`, `backlog`: those now."""

    topic: str
    policy: DivertPolicy
    producer: Producer
    results: ResultWriter
    histories: HistoryReader
    metrics: WorkerMetrics
    clock: Clock
    engine: Callable[[], Engine]
    backlog: Callable[[], Backlog]


class Diverter:
    """See the module docstring."""

    def __init__(self, settings: WorkerSettings, parts: DivertParts) -> None:
        self._worker_id = settings.worker_id
        self._largest_bytes = int(settings.divert_bytes)
        self._anchor_behaviours = settings.anchor_behaviours
        self._skew_us = settings.max_clock_skew_ms * 1000
        self._parts = parts
        self._lock = threading.Lock()
        self._undecoded = 0
        """Requests that were refused or diverted without being handed to the executor."""

    def note_short(self) -> None:
        """The worker has no time for a request, its own or a diverted one."""
        with self._lock:
            self._parts.policy.note_short(self._parts.clock.monotonic_us())

    def takes_diverted(self) -> bool:
        """Whether other workers may divert requests to this one. Any thread may ask."""
        return self._parts.policy.takes_diverted(self._parts.clock.monotonic_us())

    def may_divert(self) -> bool:
        """Notes a request that is refused undecoded, and says whether to decode it for `divert`."""
        with self._lock:
            self._undecoded += 1
            clock = self._parts.clock
            self._parts.policy.note_short(clock.monotonic_us())
            reason = self._parts.policy.objection(self._parts.engine().revision, self._received, clock.wall_us())
        return reason is None or self._not_diverted(reason)

    def divert(
        self,
        request: RankingRequest,
        reply: RankingHeaders,
        received: Received,
        answer_by_us: int,
        kept_tokens: int = 0,
    ) -> bool:
        """Passes the request on if another worker can rank it in time. False: the caller answers it.

        `answer_by_us`: monotonic. `kept_tokens`: the longest prefix on which this worker could rank it; 0: none.
        """
        parts, engine = self._parts, self._parts.engine()
        try:
            resolved = read_history(
                parts.histories,
                request.user_id,
                wanted_by(request),
                request.history,
                received.partition,
                chosen_at_ms(request),
            )
        except HistoryMismatchError:
            return False
        if resolved.is_settling and resolved.history is None:
            return False  # The other worker would rank it on nothing.
        history = resolved.history or History(request.user_id, 0, np.empty(0, "<i8"), Behaviours.empty())
        limits, layout = engine.limits, engine.layout
        anchor_behaviours = longest_anchor(self._anchor_behaviours, limits)
        start = window_start(len(history.behaviours), limits.max_prefix_behaviours, anchor_behaviours)
        inline = request.history.behaviours if request.history is not None else Behaviours.empty()
        other_bytes = len(received.value or b"") - _BEHAVIOUR_BYTES * len(inline) + _ADDED_BYTES
        other_bytes += 8 * history.features.size
        need = Need(
            user_id=request.user_id,
            left_us=answer_by_us - parts.clock.monotonic_us(),
            transit_us=max(LEAST_TRANSIT_US, parts.results.deliveries.median_us),
            behaviours=len(history.behaviours) - start,
            most_behaviours=max(0, self._largest_bytes - other_bytes) // _BEHAVIOUR_BYTES,
            kept_behaviours=max(0, kept_tokens - layout.contextual_tokens) // layout.tokens_per_behaviour,
            suffix=len(request.suffix),
            candidates=int(request.candidates.size),
            lineage=_lineage(resolved, (history.first_position or 0) + start),
        )
        with self._lock:
            chosen = parts.policy.choose(need, engine.revision, self._received, parts.clock.wall_us())
        if isinstance(chosen, DivertOutcome):
            return self._not_diverted(chosen)
        left_out = need.behaviours - chosen.behaviours
        message = self._message(request, resolved, history, start, left_out)
        return self._send(message, chosen, reply, received)

    @property
    def _received(self) -> int:
        return self._parts.backlog().handed_over + self._undecoded

    def _not_diverted(self, reason: DivertOutcome) -> bool:
        self._parts.metrics.diverted[reason].inc()
        return False

    def _message(
        self, request: RankingRequest, resolved: ResolvedHistory, history: History, start: int, left_out: int
    ) -> RankingRequest:
        """The request with its history, from behaviour `start + left_out` on."""
        first = start + left_out
        return replace(
            request,
            history=History(
                request.user_id,
                history.number,
                history.features,
                history.behaviours[first:],
                first_position=(history.first_position or 0) + first or None,
            ),
            history_version=None,
            history_exactly=None,
            history_at_least=None,
            diverted=Diverted(
                self._worker_id,
                left_out,
                resolved.version,
                history_stale=resolved.is_stale,
                history_loading=resolved.loading,
                history_stale_cause=resolved.stale,
            ),
        )

    def _send(self, message: RankingRequest, target: Target, reply: RankingHeaders, received: Received) -> bool:
        try:
            self._parts.producer.produce(
                self._parts.topic,
                encode(message),
                message.user_id.encode(),
                partition=target.partition,
                headers=replace(reply, diverted_by=self._worker_id).encode(),
                on_delivery=partial(self._reported, reply, received, message.user_id, target.placed),
            )
        except (BufferError, EncodeError, KafkaException) as error:
            log.debug("a request was not diverted", error=str(error))
            self._parts.metrics.diverted[DivertOutcome.UNDELIVERED].inc()
            return False
        return True

    def _reported(
        self, reply: RankingHeaders, received: Received, user_id: str, placed: Placed | None, error: Any, _: Any
    ) -> None:
        """The delivery report. The message of a failed one may be in the log nevertheless."""
        parts = self._parts
        parts.metrics.diverted[DivertOutcome.DELIVERED if error is None else DivertOutcome.UNDELIVERED].inc()
        if error is None:
            if placed is not None:
                with self._lock:
                    parts.policy.placements.note(user_id, placed)
            return parts.results.finish(received.token)
        end = Unranked(Ended.FAILED, Reason.OVERLOADED, NO_TIME)
        if parts.clock.wall_us() > reply.deadline_us + self._skew_us:
            end = Unranked(Ended.EXPIRED)
        end.backlog_us = parts.backlog().predicted_us or None
        return parts.results.unranked(reply, received, end)


def _lineage(resolved: ResolvedHistory, first_position: int) -> bytes:
    """Equal for all versions of a history that only grows: its features, and where the attached part begins."""
    seed = resolved.chain.seed if resolved.chain is not None else b""
    return seed + first_position.to_bytes(8, "little")
