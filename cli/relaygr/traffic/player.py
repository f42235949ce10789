"""A gateway that plays a schedule of impressions against the clock (open loop) and records the outcomes.

The gateway also publishes the histories of its users: the first versions before the first impression, and each longer
version before the retrieval event that names it. A user starts again when none of its impressions is open, and is
deleted first. In a run without an end the history of a user who comes once is published before its retrieval event.

The latency of a request counts from its *scheduled* ranking time, even if the gateway was late. Every request ends as
exactly one record: answered, answered late, not sent, undelivered, lost, or open when the player was stopped.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from relaygr.client import Ended, LostRequest, QueueFull, RankOutcome, RelayClient
from relaygr.client.requests import RankFields
from relaygr.schemas.messages import MAX_EVENT_BEHAVIOURS, BehaviourEvent, History, HistoryVersion, RankingResult
from relaygr.schemas.record import record
from relaygr.traffic.population import KEPT_SEQUENCES, Population, history_at
from relaygr.traffic.records import LOST, NOT_SENT, OPEN, UNDELIVERED, ImpressionRecord, pack_scores
from relaygr.traffic.schedule import HISTORY_LEAD_US, Impression, candidate_source, impressions, suffix_of
from relaygr.traffic.settings import TrafficSettings

log = structlog.get_logger()

WARM_UP_REQUESTS = 24
_WARM_UP_MS = 2_000
_BACK_PRESSURE_S = 0.02
_LONGEST_SLEEP_US = 200_000
_DRAIN_STEP_S = 0.2

OnRecord = Callable[[ImpressionRecord], None]


@dataclass(slots=True)
class Request:
    """A ranking request, and when it was scheduled and sent. Its fields are there before it is due."""

    impression: Impression
    request_id: str
    user_id: str
    fields: RankFields
    candidates: NDArray[np.int64] | None = None
    """None: it was not sent yet."""
    scheduled_us: int = 0
    sent_us: int = 0
    budget_us: int = 0

    @property
    def next_place(self) -> int | None:
        """The place of the item that the user chose among the candidates; None: not known, or not retrieved."""
        if self.candidates is None or self.impression.next_item is None:
            return None
        places = np.flatnonzero(self.candidates == self.impression.next_item)
        return int(places[0]) if places.size else None

    @property
    def next_retrieved(self) -> bool | None:
        """Whether the item that the user chose is among the candidates; None: it is not known."""
        is_known = self.candidates is not None and self.impression.next_item is not None
        return self.next_place is not None if is_known else None


def _rank_of(place: int | None, result: RankingResult | None) -> int | None:
    """How many candidates the answer puts before this one. Equal scores count as before it."""
    if place is None or result is None or result.scores is None:
        return None
    scores = result.scores[:: result.num_tasks]
    return int((scores >= scores[place]).sum()) - 1


class TimedCall(NamedTuple):
    """A call at a given time, for one impression. Two of them differ in their sequence, so the rest is not compared."""

    at_us: int
    sequence: int
    number: int
    may_be_left_out: bool
    """By a player that stops. Then all later calls of the impression are left out, too."""
    make: Callable[[int], object]
    """Called with `at_us`."""


@record(frozen=True, slots=True)
class _VersionedHistory:
    """A history and its version."""

    history: History
    version: HistoryVersion


class Player:
    """A gateway that plays one schedule. `record` is called once for each request, on the thread of the client."""

    def __init__(
        self,
        client_of: Callable[..., RelayClient],
        settings: TrafficSettings,
        population: Population,
        record: OnRecord,
        lost_after_s: float = 3.0,
        scenario: str | None = None,
    ) -> None:
        """`client_of(on_late=..., on_lost=...)` makes the client, which the player starts and closes.

        `scenario`: that of every impression.
        `lost_after_s`: time after the deadline at which the client reports an unanswered request as lost.
        """
        self._client = client_of(on_late=self._late, on_lost=self._lost)
        self._settings = settings
        self._scenario = scenario
        self._population = population
        self._record = record
        self._candidates = candidate_source(settings, population)
        self._open: dict[str, Request] = {}
        # Not a threading.Event: a signal handler must not take a lock that the main thread may hold in its wait.
        self._stopped_s: float | None = None
        self._lost_after_s = lost_after_s
        self._versions: dict[int, _VersionedHistory] = {}
        self._lengths: dict[int, int] = {}
        self.recorded = 0

    def stop(self) -> None:
        """Starts no more impressions. Those that have started are completed, within `traffic.drain_s`."""
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()

    def play(self) -> None:
        """Publishes the histories, warms up and plays the schedule. Returns when every request has ended."""
        with self._client, closing(self._candidates):
            self._publish_first_histories()
            self._warm_up()
            self._settle()
            self._play(impressions(self._settings, self._population))
            status = self._drain(self._longest_end_s())
        self._record_open_as(status)

    def replay(self, numbers: frozenset[int], budget_ms: int, at_once: int) -> None:
        """Ranks chosen impressions of the schedule again, at most `at_once` at a time, with a long deadline.

        The scores are the reference for the scores of another run.
        """
        slots = threading.Semaphore(at_once)
        with self._client, closing(self._candidates):
            self._publish_first_histories()
            self._warm_up()
            for impression in self._chosen(numbers):
                while not slots.acquire(timeout=_DRAIN_STEP_S) and not self._stopping:
                    pass
                if self._stopping:
                    break
                self._publish_version(impression)
                now_us = time.monotonic_ns() // 1000
                future = self._rank(self._request_of(impression, self._client.new_request_id()), now_us, budget_ms)
                if future is None:
                    slots.release()
                else:
                    future.add_done_callback(lambda _: slots.release())
            status = self._drain(budget_ms / 1000 + self._longest_end_s())
        self._record_open_as(status)

    # -- the stream --------------------------------------------------------------------------------

    def _play(self, stream: Iterator[Impression]) -> None:
        """Makes the calls of all impressions in the order of their times. The calls of started ones are in a heap."""
        started_us = time.monotonic_ns() // 1000 + HISTORY_LEAD_US
        calls: list[TimedCall] = []
        sequence = itertools.count()
        dropped: set[int] = set()
        upcoming = next(stream, None)
        while (upcoming is not None and not self._stopping) or calls:
            while upcoming is not None and not self._stopping:
                begins_us = started_us + upcoming.retrieval_us - HISTORY_LEAD_US
                if calls and begins_us > calls[0].at_us:
                    break
                for place, (at_us, make) in enumerate(self._calls_of(upcoming, started_us)):
                    heapq.heappush(calls, TimedCall(at_us, next(sequence), upcoming.number, place == 0, make))
                if upcoming.next_item is not None:
                    shown_us = started_us + upcoming.ranking_us + self._settings.budget_ms * 1000
                    publish = partial(self._publish_next, upcoming)
                    heapq.heappush(calls, TimedCall(shown_us, next(sequence), upcoming.number, True, publish))
                upcoming = next(stream, None)
            if not calls:
                continue
            call = heapq.heappop(calls)
            if call.number in dropped:
                continue
            if self._sleep_until(call.at_us, give_up=call.may_be_left_out):
                call.make(call.at_us)
            else:
                dropped.add(call.number)

    def _sleep_until(self, at_us: int, give_up: bool) -> bool:
        """Sleeps until the time. Returns False if `stop` was called and the call may be given up."""
        while not (give_up and self._stopping):
            left_us = at_us - time.monotonic_ns() // 1000
            if left_us <= 0:
                return True
            time.sleep(min(left_us, _LONGEST_SLEEP_US) / 1e6)
        return False

    def _calls_of(self, impression: Impression, started_us: int) -> Iterable[tuple[int, Callable[[int], None]]]:
        request_id = self._client.new_request_id()
        retrieval_us, ranking_us = started_us + impression.retrieval_us, started_us + impression.ranking_us
        if self._may_be_new(impression):
            yield retrieval_us - HISTORY_LEAD_US, lambda _: self._publish_version(impression)
        request = self._request_of(impression, request_id)
        yield retrieval_us, lambda _: self._begin(request)
        yield ranking_us, lambda at_us: self._rank_on_schedule(request, at_us)

    def _begin(self, request: Request) -> None:
        if self._settings.relay:
            self._publish_retrieval(request)
        self._candidates.begin(request.impression)

    def _publish_retrieval(self, request: Request) -> None:
        settings = self._settings
        # A full queue means that the broker is away. The ranking request then takes the full path.
        with suppress(QueueFull):
            self._client.publish_retrieval(
                request.user_id,
                ranking_budget_ms=settings.budget_ms,
                expected_ranking_in_ms=round(settings.lead_median_ms),
                expected_candidates=settings.candidates,
                expected_suffix=settings.suffix,
                history_version=request.fields["history_version"],
                request_id=request.request_id,
                scenario=self._scenario,
            )

    def _request_of(self, impression: Impression, request_id: str) -> Request:
        fields: RankFields = {
            "budget_ms": self._settings.budget_ms,
            "suffix": suffix_of(impression, self._settings, self._population),
            "history_version": self._version(impression),
            "request_id": request_id,
            "scenario": self._scenario,
        }
        user_id = self._population.user_id(impression.user)
        return Request(impression, request_id, user_id, fields)

    def _rank_on_schedule(self, request: Request, at_us: int) -> None:
        if self._comes_once(request.impression.user):
            self._versions.pop(request.impression.user, None)
        self._rank(request, at_us, self._settings.budget_ms)

    def _rank(self, request: Request, scheduled_us: int, budget_ms: int) -> Future[RankOutcome] | None:
        """Sends a ranking request. Returns None, and records the request as not sent, if the client's queue is full.

        `budget_ms`: its time limit from `scheduled_us` on.
        """
        request.candidates = self._candidates.of(request.impression)
        request.scheduled_us, request.sent_us = scheduled_us, time.monotonic_ns() // 1000
        request.budget_us = budget_ms * 1000
        request.fields["budget_ms"] = max(1.0, budget_ms - (request.sent_us - scheduled_us) / 1000)
        self._open[request.request_id] = request
        try:
            future = self._client.submit_rank(request.user_id, request.candidates, **request.fields)
        except QueueFull:
            self._unanswered(request.request_id, NOT_SENT)
            return None
        future.add_done_callback(lambda done: self._ended(done.result()))
        return future

    def _chosen(self, numbers: frozenset[int]) -> Iterator[Impression]:
        left = set(numbers)
        for impression in impressions(self._settings, self._population):
            if not left:
                return
            if impression.number in left:
                left.discard(impression.number)
                yield impression

    # -- histories ---------------------------------------------------------------------------------

    def _publish_first_histories(self) -> None:
        for index in itertools.chain(range(self._population.size), self._known_users_who_come_once()):
            if self._stopping:
                return
            self._publish(history_at(self._population, index, self._population.first_length(index)))

    def _known_users_who_come_once(self) -> Iterator[int]:
        """Those of the whole run. Without an end there are too many to publish their histories before it."""
        if self._settings.new_share and self._settings.duration_s:
            for impression in impressions(self._settings, self._population):
                if self._comes_once(impression.user):
                    yield impression.user

    def _comes_once(self, user: int) -> bool:
        return user >= self._population.size

    def _may_be_new(self, impression: Impression) -> bool:
        """Whether the history may be another one than that which was published before the first impression."""
        if self._comes_once(impression.user):
            return not self._settings.duration_s
        return self._settings.start_again or impression.history_length > self._population.first_length(impression.user)

    def _publish_version(self, impression: Impression) -> None:
        user, length = impression.user, impression.history_length
        if self._comes_once(user):
            if self._may_be_new(impression):
                self._publish(self._history(impression))
            return
        if length < self._lengths.get(user, self._population.first_length(user)):
            self._lengths[user] = length
            self._when_there_is_room(partial(self._client.tombstone, self._population.user_id(user)))
            self._publish(self._history(impression))
        self._publish_behaviours(user, length)

    def _publish_next(self, impression: Impression, _: int) -> None:
        """Publishes what the user chose in the impression."""
        self._publish_behaviours(impression.user, impression.history_length + 1)

    def _publish_behaviours(self, user: int, length: int) -> None:
        """Publishes those of the user's first `length` behaviours that were not published before."""
        before = self._lengths.get(user, self._population.first_length(user))
        self._lengths[user] = length
        for start in range(before, length, MAX_EVENT_BEHAVIOURS):
            new = self._population.sequence(user)[start : min(start + MAX_EVENT_BEHAVIOURS, length)]
            event = BehaviourEvent(self._population.user_id(user), new, start)
            self._when_there_is_room(partial(self._client.publish_behaviours, event))

    def _publish(self, history: History) -> None:
        self._when_there_is_room(partial(self._client.publish_history, history))

    def _when_there_is_room(self, publish: Callable[[], None]) -> None:
        """Publishes, after a wait while the client's queue is full."""
        while not self._stopping:
            try:
                return publish()
            except QueueFull:
                time.sleep(_BACK_PRESSURE_S)

    def _history(self, impression: Impression) -> History:
        return self._version_of(impression).history

    def _version(self, impression: Impression) -> HistoryVersion:
        return self._version_of(impression).version

    def _version_of(self, impression: Impression) -> _VersionedHistory:
        """The history of the impression and its version. The last ones are kept for three messages each."""
        known = self._versions.pop(impression.user, None)
        if known is None or known.history.number != impression.history_length:
            history = history_at(self._population, impression.user, impression.history_length)
            known = _VersionedHistory(history, history.version())
        self._versions[impression.user] = known
        if len(self._versions) > KEPT_SEQUENCES:
            del self._versions[next(iter(self._versions))]
        return known

    def _warm_up(self) -> None:
        """Sends a few requests of unknown users, without records, to warm up connections, caches and compilers."""
        log.info("warming up: waiting for a worker's answers", at_most_s=_WARM_UP_MS / 1000)
        candidates = self._population.items[: self._settings.candidates]
        futures = [
            self._client.submit_rank(f"warm-up-{number}", candidates, budget_ms=_WARM_UP_MS, scenario=self._scenario)
            for number in range(WARM_UP_REQUESTS)
        ]
        answered = sum(future.result().status is Ended.RANKED for future in futures)
        if answered:
            log.info("warmed up", answered=answered, requests=len(futures))
        else:
            log.warning("no worker answers: the requests are sent, but start a worker, or ask `relaygr doctor`")

    # -- ends --------------------------------------------------------------------------------------

    def _ended(self, outcome: RankOutcome) -> None:
        """Records an answer. After a time-out, `on_late` or `on_lost` of the client follows."""
        if outcome.status is not Ended.TIMED_OUT:
            self._write(outcome)

    def _late(self, outcome: RankOutcome) -> None:
        self._write(outcome)

    def _lost(self, lost: LostRequest) -> None:
        self._unanswered(lost.request_id, LOST if lost.acknowledged else UNDELIVERED)

    def _unanswered(self, request_id: str, status: str) -> None:
        entry = self._open.pop(request_id, None)
        if entry is not None:
            self._write_unanswered(entry, status)

    def _drain(self, longest_s: float) -> str:
        """Waits until every request has ended: at most `longest_s`, and after `stop` at most `traffic.drain_s`.

        Returns the status of the requests that have not ended.
        """
        ends_s = time.monotonic() + longest_s
        if self._open:
            log.info("waiting for the last answers", requests=len(self._open), at_most_s=longest_s)
        while (now_s := time.monotonic()) < ends_s:
            if self._stopped_s is not None and now_s >= self._stopped_s + self._settings.drain_s:
                return OPEN
            if self._client.drain(min(_DRAIN_STEP_S, ends_s - now_s)):
                break
        return LOST

    def _record_open_as(self, status: str) -> None:
        while self._open:
            self._write_unanswered(self._open.popitem()[1], status)

    def _write_unanswered(self, entry: Request, status: str) -> None:
        self._emit(
            ImpressionRecord(
                number=entry.impression.number,
                request_id=entry.request_id,
                user_id=entry.user_id,
                status=status,
                latency_us=None,
                send_lag_us=entry.sent_us - entry.scheduled_us,
                late=True,
                scheduled_us=entry.scheduled_us,
                next_retrieved=entry.next_retrieved,
                next_place=entry.next_place,
            )
        )

    def _write(self, outcome: RankOutcome) -> None:
        entry = self._open.pop(outcome.request_id, None)
        if entry is None:
            return
        result = outcome.result
        send_lag_us = entry.sent_us - entry.scheduled_us
        latency_us = send_lag_us + outcome.latency_us
        version = result.history_version if result is not None else None
        self._emit(
            ImpressionRecord(
                number=entry.impression.number,
                request_id=entry.request_id,
                user_id=entry.user_id,
                status=outcome.status.value,
                latency_us=latency_us,
                send_lag_us=send_lag_us,
                late=outcome.late or latency_us > entry.budget_us,
                scheduled_us=entry.scheduled_us,
                reason=outcome.reason.value if outcome.reason is not None else None,
                path=result.path.value if result is not None and result.path is not None else None,
                prefix_source=result.prefix_source.value if result is not None and result.prefix_source else None,
                worker_id=result.worker_id if result is not None else None,
                prefix_tokens=result.prefix_tokens if result is not None else 0,
                tokens_cached=result.tokens_cached if result is not None else 0,
                history_number=version.number if version is not None else None,
                history_length=version.length if version is not None else None,
                history_stale=result.history_stale if result is not None else False,
                history_loading=result.history_loading if result is not None else False,
                model_revision=result.model_revision if result is not None else None,
                timings=result.timings if result is not None else None,
                to_worker_us=result.received_at_us - result.request_sent_at_us if result is not None else None,
                scores=pack_scores(result.scores) if result is not None and result.scores is not None else None,
                next_retrieved=entry.next_retrieved,
                next_place=entry.next_place,
                next_rank=_rank_of(entry.next_place, result),
            )
        )

    def _emit(self, record: ImpressionRecord) -> None:
        self.recorded += 1
        self._record(record)

    @property
    def _stopping(self) -> bool:
        return self._stopped_s is not None

    def _longest_end_s(self) -> float:
        return self._settings.budget_ms / 1000 + self._lost_after_s + 1.0

    def _settle(self) -> None:
        ends_s = time.monotonic() + self._settings.settle_s
        while not self._stopping and time.monotonic() < ends_s:
            time.sleep(0.05)
