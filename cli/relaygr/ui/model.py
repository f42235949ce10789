"""Folds messages, statuses, metrics and lag into the bounded state that the page shows. Pure: no I/O, no clock.

Every call takes the time of the reader's monotonic clock or of its wall clock, in µs. Counts are by the second in which
the reader received a message. A message that the reader skipped still counts, by the offsets around the skip.

    requests    a retrieval event, its job, its ranking request and its result, joined by the request id
    late        the result left the worker after the deadline, or the request was truncated, expired, failed or got no
                result: what the demo and `relaygr traffic` count
    latency     from the gateway's send to the worker's answer, by the clocks of both; without the way back

User ids are hashed with a key of this process. The random part of a request id, which protects its result, is cut off.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import math
import random
import secrets
import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from relaygr.admission.latency import is_long_wait
from relaygr.admission.worker_table import NoRoomError, WorkerTable
from relaygr.conditions import Finding, Seen, judge
from relaygr.lag.report import GroupReport, LagReport
from relaygr.runtime.quantiles import quantile_of_counts
from relaygr.schemas.ended import UNRANKED, Ended
from relaygr.schemas.fields import OTHER, Other, choice_label
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import (
    Path,
    PreInferJob,
    PreInferSlots,
    RankingResult,
    RetrievalEvent,
    StageTimings,
    WorkerState,
    WorkerStatus,
)
from relaygr.schemas.topics import Topic
from relaygr.trigger.fleet import Fleet
from relaygr.ui.scrape import THROTTLE, Reading, can_reach

SERIES_S: Final = 120
"""The length of the charts."""
WINDOW_S: Final = 60
"""The window of totals and percentiles."""
SMOOTH_S: Final = 10
"""The window of each point of the percentiles."""
RATE_S: Final = 5
DOTS_PER_S: Final = 8
MAX_OPEN: Final = 20_000
"""The most requests that wait for their result."""
MAX_LATE: Final = 50
SHOWN_REQUESTS: Final = 12
MAX_KEPT: Final = 2000
"""Requests that can be searched for: the late ones, and of the others so many a second:"""
KEPT_PER_S: Final = 16
MAX_CELLS: Final = 96
"""The bars of a group's lag. Of more partitions a bar shows the largest lag of neighbours."""
DEVICE_READINGS: Final = 6
MAX_SHOWN_WORKERS: Final = 64
MAX_KNOWN_WORKERS: Final = 256
"""The metrics of so many are read. Of further ones only the partitions are known."""
SILENT_S: Final = 60.0
"""A worker without a status for this long is not shown: the topic keeps the last status of each worker for ever."""
STALE_MS: Final = 3000
HOLD_US: Final = 1_500_000
"""How long a result waits for its ranking request, which comes from another partition."""
GRACE_US: Final = 2_000_000
"""How long after its deadline a request counts as unanswered."""
FORGET_US: Final = 60_000_000
START_US: Final = 20_000_000
"""How long a process may take until its metrics page answers for the first time."""
_US: Final = 1_000_000


STAGES: Final = (Topic.RETRIEVAL, Topic.PREINFER, Topic.RANKING, Topic.RESULTS)
KINDS: Final = (*(path.value for path in Path), OTHER, *(end.on_page for end in UNRANKED))
"""How a request ended: the path of a ranked one, or the end of another."""
_PLACES: Final = {kind: place for place, kind in enumerate(KINDS)}
_NOT_READY: Final = frozenset({Path.PENDING.value, Path.FULL.value, Path.TRUNCATED.value})
_RANKED: Final = frozenset(path.value for path in Path)
_LATE: Final = frozenset({Path.TRUNCATED.value, *(end.on_page for end in UNRANKED)})

# Latencies are counted in steps of 2 %, from 0.1 ms to a minute.
_STEP: Final = 1.02
_LEAST_MS: Final = 0.1
_EDGES: Final = tuple(_LEAST_MS * _STEP**place for place in range(math.ceil(math.log(60_000 / _LEAST_MS, _STEP))))


@dataclass(frozen=True, slots=True)
class StageFlow:
    """One topic of the relay: messages a second now, and in each second."""

    stage: str
    per_s: float
    series: Sequence[int]


@dataclass(frozen=True, slots=True)
class KindShare:
    """Requests of the window that ended in one way."""

    kind: str
    count: int
    share: float
    series: Sequence[int]


@dataclass(frozen=True, slots=True)
class LatencyView:
    """Latencies against the deadline. None: no request."""

    p50_ms: float | None
    p99_ms: float | None
    mean_ms: float | None
    """Of ranked requests."""
    not_ready_share: float | None
    """The part of the time of ranked requests that belongs to those whose prefix was not ready."""
    budget_ms: float | None
    late: int
    ended: int
    point_s: int
    """Each point of the series is of so many seconds, so it may differ from the percentiles of the window."""
    p50_series: Sequence[float | None]
    p99_series: Sequence[float | None]
    dots: Sequence[tuple[float, float, int]]
    """Some requests: age in s, latency in ms, place of the kind."""


@dataclass(frozen=True, slots=True)
class TierFill:
    """One tier of a worker's cache. `cached_bytes`: evictable prefixes; None without the worker's metrics."""

    capacity_bytes: int
    held_bytes: int
    cached_bytes: int | None


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool by a worker's metrics. `written` and `loaded`: objects that the worker wrote to it and prefixes that it
    loaded from it, since its start.
    """

    away: bool
    written: int
    loaded: int


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker by its last status and its metrics."""

    worker_id: str
    state: str
    fresh: bool
    age_s: float
    host: str | None
    owns: str
    partitions: int
    hbm: TierFill
    dram: TierFill
    pool: PoolView | None
    """None: no pool, or no metrics."""
    queue_p99_ms: float
    backlog_ms: float | None
    hit_share: float | None
    device_share: float | None
    """Device seconds a second, over the last readings."""
    revision: str
    """The beginning of the model's."""
    standbys: int | None
    """Processes that are ready to take over; None: no supervisor's metrics."""
    pre_infer: PreInferSlots | None
    """Of a pre-infer worker, which owns no partition."""


@dataclass(frozen=True, slots=True)
class DecisionCount:
    """Decisions of the triggers for one reason, in the window."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class LagView:
    """The lag of one group."""

    group: str
    messages: int | None
    seconds: float | None
    status: str
    members: int | None
    owner_split: int
    problem: str | None
    cells: Sequence[int]
    """The lag of each partition, of its topics the largest; at most `MAX_CELLS`, see there."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that has ended. Times are ms since the start of retrieval, or since the ranking request without one."""

    age_s: float
    request: str
    user: str
    worker_id: str
    kind: str
    reason: str | None
    latency_ms: float | None
    budget_ms: float | None
    decided_ms: float | None
    sent_ms: float
    received_ms: float | None
    deadline_ms: float | None
    answered_ms: float | None
    queue_ms: float
    wait_ms: float
    pre_infer_ms: float
    reload_ms: float
    rank_ms: float
    total_ms: float
    prefix_tokens: int


@dataclass(frozen=True, slots=True)
class LiveSnapshot:
    """Everything that the page shows of a cluster at one time."""

    cluster: str
    prefix: str
    partitions: int
    observed_s: float
    stages: Sequence[StageFlow]
    admitted_share: float | None
    """Jobs by retrieval events, in the window."""
    kinds: Sequence[KindShare]
    latency: LatencyView
    workers: Sequence[WorkerView]
    silent_workers: int
    owners: Sequence[int]
    """For each partition the place of its owner in `workers`; -1: no fresh owner."""
    decisions: Sequence[DecisionCount] | None
    """None: no trigger's metrics."""
    lag: Sequence[LagView] | None
    """None: not measured yet."""
    late: Sequence[RequestView]
    lost: int | None
    """Lost requests by the gateways' metrics, since their start; None: no gateway's metrics."""
    skipped: int
    unreadable: int
    problems: Sequence[Finding]
    """What is wrong, the gravest first (`relaygr.conditions`)."""


@dataclass(slots=True)
class _Request:
    seen_us: int
    user: str = ""
    retrieval_at_us: int = 0
    decided_at_us: int = 0
    sent_at_us: int = 0
    deadline_us: int = 0
    result: RankingResult | None = None


@dataclass(slots=True)
class _Second:
    counts: dict[Topic, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    kinds: Counter[str] = field(default_factory=Counter)
    bins: Counter[int] = field(default_factory=Counter)
    ranked: int = 0
    """Ranked requests of known latency."""
    ranked_ms: float = 0.0
    """Their latencies in sum, and those of requests whose prefix was not ready:"""
    not_ready_ms: float = 0.0
    late: int = 0
    waited: int = 0
    """Ranked requests whose wait in the queue was long."""
    stale: Counter[str] = field(default_factory=Counter)
    """Ranked requests on a stale history, by its cause."""
    dots: list[tuple[float, float, int]] = field(default_factory=list)
    """At s of the monotonic clock, ms, kind."""
    offered_dots: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None


@dataclass(slots=True)
class _Ended:
    """A request that has ended, kept for the lists."""

    at_us: int
    request_id: str
    entry: _Request
    kind: str


@dataclass(slots=True)
class _Known:
    status: WorkerStatus
    written_at_us: int
    """When the status was written; when it was read, if the worker's clock is ahead."""
    since_us: int
    """When its first status was read."""
    reading: Reading | None = None
    device: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=DEVICE_READINGS))
    """Device seconds by the time of their reading."""


class LiveModel:
    """One cluster. Not thread-safe: the owner takes a lock."""

    def __init__(self, cluster: str, prefix: str, partitions: int, now_us: int, salt: bytes | None = None) -> None:
        """`salt`: the key of the hashes of user ids; none: a random one."""
        self._cluster = cluster
        self._prefix = prefix
        self._partitions = partitions
        self._started_us = now_us
        self._salt = secrets.token_bytes(16) if salt is None else salt
        self._seconds: deque[_Second] = deque([_Second()], maxlen=SERIES_S + 1)
        self._second = now_us // _US
        self._offsets: dict[tuple[Topic, int], int] = {}
        self._skipped_from: dict[tuple[Topic, int], int] = {}
        """The last offsets before the reader went to the ends of the topics."""
        self._open: OrderedDict[str, _Request] = OrderedDict()
        self._held: OrderedDict[str, int] = OrderedDict()
        """Results without their ranking request, by the time of their receipt."""
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Requests that were counted, at most `MAX_OPEN`: a message of one may come twice, or after its time."""
        self._late: deque[_Ended] = deque(maxlen=MAX_LATE)
        self._kept: OrderedDict[str, _Ended] = OrderedDict()
        """By request id, at most `MAX_KEPT`. Their events and jobs may be read after their results."""
        self._budgets_ms: deque[float] = deque(maxlen=32)
        self._fleet = Fleet(STALE_MS)
        self._workers: WorkerTable[_Known] = WorkerTable(MAX_KNOWN_WORKERS, round(SILENT_S * _US))
        self._decisions: dict[str, _CounterWindow] = {}
        self._lost: dict[str, int] = {}
        self._standbys: dict[str, int] = {}
        self._held_back_s: dict[str, float] = {}
        """The longest time for which Kafka lately held back an answer, by process."""
        self._groups: Sequence[GroupReport] | None = None
        self._lag_problem: str | None = None
        self._reader_problem: str | None = None
        self._silent_pages: dict[str, int] = {}
        """The metrics pages that do not answer, with the time from which that is told."""
        self._heard_pages: dict[str, None] = {}
        self._skipped = 0
        self._unreadable = 0
        self._random = random.Random(1)
        self.pages_named = 0
        """How often a worker named a metrics page that it had not named before."""

    # -- messages ----------------------------------------------------------------------------------

    def count(self, stage: Topic, partition: int, offset: int, now_us: int, topic: Topic | None = None) -> None:
        """Counts a received message of a stage, and after a skip those between it and the one before it.

        `topic`: where it was read, if that is not the stage's own topic.
        """
        place = (topic or stage, partition)
        before = self._skipped_from.pop(place, offset - 1)
        self._offsets[place] = offset
        # An offset need not hold a message, so only those of a skip count as messages.
        advance = max(1, offset - before)
        self._now(now_us).counts[stage] += advance
        self._skipped += advance - 1

    def unreadable(self) -> None:
        """Counts a message that could not be read."""
        self._unreadable += 1

    def note_retrieval(self, event: RetrievalEvent, now_us: int) -> None:
        self._begun(event.request_id, now_us).retrieval_at_us = event.retrieval_at_us

    def note_job(self, job: PreInferJob, now_us: int) -> None:
        entry = self._begun(job.request_id, now_us)
        entry.retrieval_at_us, entry.decided_at_us = job.retrieval_at_us, job.decided_at_us

    def note_ranking(self, headers: RankingHeaders, user: bytes, sent_at_us: int, now_us: int) -> None:
        """A ranking request, by its headers and its key. `sent_at_us`: the record's time stamp; 0: unknown."""
        if headers.request_id in self._ended:
            return
        entry = self._entry(headers.request_id, now_us)
        entry.sent_at_us, entry.deadline_us = sent_at_us, headers.deadline_us
        entry.user = self._hashed(user)
        if entry.result is not None:
            self._end(headers.request_id, entry, entry.result, now_us)

    def note_result(self, result: RankingResult, now_us: int) -> None:
        if result.request_id in self._ended:
            return
        # The scores are a view of the whole message.
        result = replace(result, scores=None)
        entry = self._entry(result.request_id, now_us)
        if entry.deadline_us:
            self._end(result.request_id, entry, result, now_us)
        elif entry.result is None:
            entry.result = result
            self._held[result.request_id] = now_us

    def sweep(self, now_us: int, wall_us: int) -> None:
        """Ends requests without a result, and results without a ranking request. Call it about once a second."""
        self._now(now_us)
        while self._held and (held_us := next(iter(self._held.items())))[1] <= now_us - HOLD_US:
            entry = self._open.get(held_us[0])
            if entry is None or entry.result is None:
                self._held.pop(held_us[0])
            else:
                self._end(held_us[0], entry, entry.result, now_us)
        over = [
            name for name, entry in self._open.items() if entry.deadline_us and wall_us > entry.deadline_us + GRACE_US
        ]
        for name in over:
            self._count_end(name, self._open.pop(name), Ended.TIMED_OUT.on_page, None, now_us)
        while self._open and (oldest := next(iter(self._open)), self._open[oldest].seen_us)[1] <= now_us - FORGET_US:
            self._open.popitem(last=False)

    def forget_open(self) -> None:
        """Notes that the reader skips messages, so requests without a result are dropped: it may never come."""
        self._skipped_from = dict(self._offsets)
        self._open.clear()
        self._held.clear()

    # -- other sources -----------------------------------------------------------------------------

    def note_status(self, worker_id: str, status: WorkerStatus | None, wall_us: int) -> None:
        """The latest status of a worker; None is its tombstone. Raises ValueError for one that cannot be used."""
        if status is None:
            self._workers.pop(worker_id, None)
        try:
            self._fleet.apply(worker_id, status, wall_us)
        except NoRoomError:
            # It is shown, but owns nothing.
            self._unreadable += 1
        self._fleet.reports.clear()
        if status is None:
            return
        written_at_us = min(status.written_at_us, wall_us)
        known = self._workers.get(worker_id)
        if status.metrics_url is not None and (known is None or known.status.metrics_url != status.metrics_url):
            self.pages_named += 1
        if known is None:
            with contextlib.suppress(NoRoomError):
                self._workers.make_room(worker_id, wall_us)
                self._workers.put(worker_id, _Known(status, written_at_us, wall_us))
        else:
            known.status, known.written_at_us = status, written_at_us
            self._workers.put(worker_id, known)

    def metrics_urls(self, wall_us: int) -> dict[str, str]:
        """The metrics pages that live workers name, and that can be reached from here: address -> worker id."""
        return {
            known.status.metrics_url: name
            for name, known in self._workers.items()
            if known.status.metrics_url is not None
            and wall_us - known.written_at_us < SILENT_S * _US
            and can_reach(known.status.metrics_url, known.status.host)
        }

    def keep_pages(self, names: Collection[str]) -> None:
        """Forgets the metrics pages that are no longer read."""
        for known in (
            self._silent_pages,
            self._heard_pages,
            self._standbys,
            self._held_back_s,
            self._decisions,
            self._lost,
        ):
            for name in known.keys() - set(names):
                known.pop(name)

    def note_metrics(self, name: str, reading: Reading | None, now_us: int) -> None:
        """The metrics of a process, None if it did not answer. `name`: a worker id, or an address."""
        if reading is None:
            self._silent_pages.setdefault(name, now_us + (0 if name in self._heard_pages else START_US))
            if name in self._workers:
                self._workers[name].reading = None
                self._workers[name].device.clear()
            self._standbys.pop(name, None)
            self._held_back_s.pop(name, None)
            return
        self._silent_pages.pop(name, None)
        self._heard_pages[name] = None
        if name in self._workers:
            known = self._workers[name]
            known.reading = reading
            used_s = reading.total("relaygr_worker_device_seconds_total")
            if known.device and known.device[-1][1] > used_s:
                known.device.clear()  # Another process.
            known.device.append((now_us, used_s))
        self._held_back_s[name] = reading.largest(THROTTLE)
        if "relaygr_supervisor_children" in reading.samples:
            self._standbys[name] = int(reading.total("relaygr_supervisor_children", phase="standby"))
        if "relaygr_trigger_decisions_total" in reading.samples:
            window = self._decisions.setdefault(name, _CounterWindow())
            window.note(reading.by_label("relaygr_trigger_decisions_total", "reason"), now_us)
        if "relaygr_gateway_lost_requests_total" in reading.samples:
            self._lost[name] = int(reading.total("relaygr_gateway_lost_requests_total"))

    def note_lag(self, report: LagReport | None, error: str | None) -> None:
        """The last lag report, or why there is none."""
        self._lag_problem = error
        if report is not None:
            self._groups = report.groups

    def note_reader(self, problem: str | None) -> None:
        """Why the topics cannot be read; None if they can."""
        self._reader_problem = problem

    # -- the snapshot ------------------------------------------------------------------------------

    def snapshot(self, now_us: int, wall_us: int) -> LiveSnapshot:
        """Everything that the page shows now."""
        self._now(now_us)
        seconds = list(self._seconds)[:-1]
        window = [*seconds[-WINDOW_S:], self._seconds[-1]]
        shown = self._shown_workers(wall_us)
        events, jobs = (sum(each.counts[topic] for each in window) for topic in (Topic.RETRIEVAL, Topic.PREINFER))
        ended = sum(sum(each.kinds.values()) for each in window)
        return LiveSnapshot(
            cluster=self._cluster,
            prefix=self._prefix,
            partitions=self._partitions,
            observed_s=(now_us - self._started_us) / _US,
            stages=[_flow(topic, seconds) for topic in STAGES],
            admitted_share=min(1.0, jobs / events) if events else None,
            kinds=[_share(kind, window, seconds, ended) for kind in KINDS],
            latency=self._latency(window, seconds, ended, now_us),
            workers=[self._worker(name, wall_us) for name in shown],
            silent_workers=max(len(self._workers), self._fleet.summary(wall_us).workers) - len(shown),
            owners=self._owners(shown, wall_us),
            decisions=self._decided(now_us),
            lag=None if self._groups is None else [_lag_view(group) for group in self._groups],
            late=[_request_view(each, now_us) for each in list(self._late)[: -SHOWN_REQUESTS - 1 : -1]],
            lost=sum(self._lost.values()) if self._lost else None,
            skipped=self._skipped,
            unreadable=self._unreadable,
            problems=judge(self._seen(window, ended, now_us, wall_us)),
        )

    def find(self, text: str, now_us: int) -> list[RequestView]:
        """The newest kept requests of a user (its id or hash) or with a request id (whole, or its shown beginning)."""
        user = self._hashed(text.encode())
        found = (
            each
            for name, each in reversed(self._kept.items())
            # The random part is not searched by its beginning, else it could be guessed.
            if text and (each.entry.user in (user, text) or name == text or name.rpartition(".")[0].startswith(text))
        )
        return [_request_view(each, now_us) for each in itertools.islice(found, SHOWN_REQUESTS)]

    def _seen(self, window: Sequence[_Second], ended: int, now_us: int, wall_us: int) -> Seen:
        """What can be judged of the window, and of the last statuses, metrics and lag."""
        kinds, stale = Counter[str](), Counter[str]()
        for each in window:
            kinds.update(each.kinds)
            stale.update(each.stale)
        errors = [text for text in (self._reader_problem, self._lag_problem) if text]
        pools = {name: pool_of(known.reading) for name, known in sorted(self._workers.items())}
        # By then the statuses that are already in the topic have been read. Without a broker workers are not heard.
        was_read = now_us - self._started_us > STALE_MS * 1000 and not errors
        fresh = {name: known for name, known in sorted(self._workers.items()) if _is_fresh(known, wall_us)}
        revisions: dict[str, list[str]] = {}
        for name, known in fresh.items():
            revisions.setdefault(known.status.model_revision[:8], []).append(name)
        failed, truncated = kinds[Ended.FAILED.on_page], kinds[Path.TRUNCATED.value]
        return Seen(
            errors=errors,
            ready=sum(known.status.pre_infer is None for known in fresh.values()) if was_read else None,
            ended=ended,
            late=sum(each.late for each in window) - failed - truncated,
            failed=failed,
            truncated=truncated,
            ranked=sum(kinds[kind] for kind in (*_RANKED, OTHER)),
            waited=sum(each.waited for each in window),
            stale=stale,
            groups=self._groups or (),
            held_back_s=self._held_back_s,
            away=[name for name, pool in pools.items() if pool is not None and pool.away],
            revisions=revisions,
            silent_pages=[name for name, told_us in self._silent_pages.items() if told_us <= now_us],
        )

    def _shown_workers(self, wall_us: int) -> list[str]:
        alive = [
            (known.since_us, name)
            for name, known in self._workers.items()
            if wall_us - known.written_at_us < SILENT_S * _US
        ]
        return sorted(name for _, name in sorted(alive)[:MAX_SHOWN_WORKERS])

    def _worker(self, name: str, wall_us: int) -> WorkerView:
        known = self._workers[name]
        status, reading = known.status, known.reading
        state = status.state.value if isinstance(status.state, (WorkerState, Other)) else str(status.state)
        age_us = max(0, wall_us - known.written_at_us)
        return WorkerView(
            worker_id=name,
            state=state,
            fresh=_is_fresh(known, wall_us),
            age_s=age_us / _US,
            host=status.host,
            owns=ranges(status.partitions),
            partitions=len(status.partitions),
            hbm=_fill("hbm", status.hbm_capacity_bytes, status.hbm_free_bytes, reading),
            dram=_fill("dram", status.dram_capacity_bytes, status.dram_free_bytes, reading),
            pool=pool_of(reading),
            queue_p99_ms=status.ranking_queue_p99_us / 1000,
            backlog_ms=None if status.ranking_backlog_us is None else status.ranking_backlog_us / 1000,
            hit_share=None if reading is None else reading.hit_share,
            device_share=_device_share(known.device),
            revision=status.model_revision[:8],
            standbys=self._standbys.get(name),
            pre_infer=status.pre_infer,
        )

    def _owners(self, shown: Sequence[str], wall_us: int) -> list[int]:
        places = {name: place for place, name in enumerate(shown)}
        owners = (self._fleet.owner_of(partition, wall_us) for partition in range(self._partitions))
        return [-1 if owner is None else places.get(owner.worker_id, -1) for owner in owners]

    def _decided(self, now_us: int) -> list[DecisionCount] | None:
        if not self._decisions:
            return None
        totals: Counter[str] = Counter()
        for window in self._decisions.values():
            totals.update(window.increase(now_us))
        return [DecisionCount(reason, count) for reason, count in totals.most_common() if count]

    def _latency(self, window: Sequence[_Second], seconds: Sequence[_Second], ended: int, now_us: int) -> LatencyView:
        bins = _merged(window)
        ranked, ranked_ms = sum(each.ranked for each in window), sum(each.ranked_ms for each in window)
        dots = [
            (round(now_us / _US - at_s, 2), round(ms, 2), place)
            for each in self._seconds
            for at_s, ms, place in each.dots
        ]
        return LatencyView(
            p50_ms=_percentile(bins, 0.50),
            p99_ms=_percentile(bins, 0.99),
            mean_ms=ranked_ms / ranked if ranked else None,
            not_ready_share=sum(each.not_ready_ms for each in window) / ranked_ms if ranked_ms else None,
            budget_ms=statistics.median(self._budgets_ms) if self._budgets_ms else None,
            late=sum(each.late for each in window),
            ended=ended,
            point_s=SMOOTH_S,
            p50_series=[each.p50_ms for each in seconds],
            p99_series=[each.p99_ms for each in seconds],
            dots=dots,
        )

    # -- inside ------------------------------------------------------------------------------------

    def _now(self, now_us: int) -> _Second:
        """The current second. Ends those before it."""
        second = now_us // _US
        for _ in range(min(second - self._second, SERIES_S + 1)):
            last = self._seconds[-1]
            bins = _merged(list(self._seconds)[-SMOOTH_S:])
            last.p50_ms, last.p99_ms = _percentile(bins, 0.50), _percentile(bins, 0.99)
            self._seconds.append(_Second())
        self._second = max(self._second, second)
        return self._seconds[-1]

    def _begun(self, request_id: str, now_us: int) -> _Request:
        kept = self._kept.get(request_id)
        return self._entry(request_id, now_us) if kept is None else kept.entry

    def _entry(self, request_id: str, now_us: int) -> _Request:
        entry = self._open.get(request_id)
        if entry is None:
            if len(self._open) >= MAX_OPEN:
                self._open.popitem(last=False)
            entry = self._open[request_id] = _Request(now_us)
        return entry

    def _end(self, request_id: str, entry: _Request, result: RankingResult, now_us: int) -> None:
        self._open.pop(request_id, None)
        self._held.pop(request_id, None)
        entry.result = result
        # A request that was answered by its headers alone has no time in its result.
        entry.sent_at_us = result.request_sent_at_us or entry.sent_at_us
        if result.outcome is Ended.RANKED:
            kind = OTHER if result.path is None else choice_label(result.path)
        else:
            kind = result.outcome.on_page
        self._count_end(request_id, entry, kind, result, now_us)

    def _count_end(self, name: str, entry: _Request, kind: str, result: RankingResult | None, now_us: int) -> None:
        self._ended[name] = None
        if len(self._ended) > MAX_OPEN:
            self._ended.popitem(last=False)
        second = self._now(now_us)
        second.kinds[kind] += 1
        late = kind in _LATE
        if result is not None and result.outcome is Ended.RANKED:
            self._count_ranked(second, entry, result)
        if result is not None and entry.sent_at_us:
            late = late or 0 < entry.deadline_us < result.sent_at_us
            latency_ms = max(0, result.sent_at_us - entry.sent_at_us) / 1000
            second.bins[bisect.bisect_left(_EDGES, latency_ms)] += 1
            if kind in _RANKED:
                second.ranked += 1
                second.ranked_ms += latency_ms
                second.not_ready_ms += latency_ms if kind in _NOT_READY else 0.0
            self._add_dot(second, (now_us / _US, latency_ms, _PLACES[kind]))
        if entry.deadline_us > entry.sent_at_us > 0:
            self._budgets_ms.append((entry.deadline_us - entry.sent_at_us) / 1000)
        ended = _Ended(now_us, name, entry, kind)
        if late:
            second.late += 1
            self._late.append(ended)
        if late or sum(second.kinds.values()) - second.late <= KEPT_PER_S:
            self._kept[name] = ended
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)

    def _count_ranked(self, second: _Second, entry: _Request, result: RankingResult) -> None:
        if result.history_stale:
            cause = result.history_stale_cause
            # Older workers name no cause.
            second.stale[OTHER if cause is None else choice_label(cause)] += 1
        if entry.deadline_us:
            second.waited += is_long_wait(result.timings.queue_us, entry.deadline_us - result.received_at_us)

    def _add_dot(self, second: _Second, dot: tuple[float, float, int]) -> None:
        """Keeps a random sample of the second's requests."""
        second.offered_dots += 1
        if len(second.dots) < DOTS_PER_S:
            second.dots.append(dot)
        elif (place := self._random.randrange(second.offered_dots)) < DOTS_PER_S:
            second.dots[place] = dot

    def _hashed(self, user: bytes) -> str:
        return hashlib.blake2b(user, key=self._salt, digest_size=4).hexdigest()


class _CounterWindow:
    """By how much counters of one process grew in the window. A restart of the process begins them again at 0."""

    def __init__(self) -> None:
        self._last: Mapping[str, float] | None = None
        self._steps: deque[tuple[int, Counter[str]]] = deque(maxlen=10 * WINDOW_S)

    def note(self, totals: Mapping[str, float], now_us: int) -> None:
        last = totals if self._last is None else self._last
        grown = {
            name: total - last.get(name, 0.0) if total >= last.get(name, 0.0) else total
            for name, total in totals.items()
        }
        self._last = dict(totals)
        self._steps.append((now_us, Counter({name: round(step) for name, step in grown.items()})))

    def increase(self, now_us: int) -> Counter[str]:
        while self._steps and self._steps[0][0] <= now_us - WINDOW_S * _US:
            self._steps.popleft()
        return sum((step for _, step in self._steps), Counter())


def _is_fresh(known: _Known, wall_us: int) -> bool:
    """Whether a worker is ready, by a status that is not old."""
    return known.status.state is WorkerState.READY and wall_us - known.written_at_us <= STALE_MS * 1000


def ranges(partitions: Iterable[int]) -> str:
    """Ascending partitions as text, such as 0-5, 8, 10-11."""
    runs: list[list[int]] = []
    for partition in partitions:
        if runs and partition == runs[-1][1] + 1:
            runs[-1][1] = partition
        else:
            runs.append([partition, partition])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _merged(seconds: Iterable[_Second]) -> Counter[int]:
    total: Counter[int] = Counter()
    for each in seconds:
        total.update(each.bins)
    return total


def _percentile(bins: Mapping[int, int], share: float) -> float | None:
    place = quantile_of_counts(bins, share)
    return None if place is None else round(_EDGES[min(place, len(_EDGES) - 1)], 2)


def _flow(topic: Topic, seconds: Sequence[_Second]) -> StageFlow:
    series = [each.counts[topic] for each in seconds]
    recent = series[-RATE_S:]
    return StageFlow(topic.value, round(sum(recent) / len(recent), 1) if recent else 0.0, series)


def _share(kind: str, window: Sequence[_Second], seconds: Sequence[_Second], ended: int) -> KindShare:
    count = sum(each.kinds[kind] for each in window)
    return KindShare(kind, count, count / ended if ended else 0.0, [each.kinds[kind] for each in seconds])


def _fill(tier: str, capacity_bytes: int, free_bytes: int, reading: Reading | None) -> TierFill:
    """`free_bytes` of a status includes what is evictable."""
    if reading is not None and "relaygr_cache_bytes" in reading.samples:
        held = {
            name: int(reading.total("relaygr_cache_bytes", tier=tier, held=name))
            for name in reading.by_label("relaygr_cache_bytes", "held")
        }
        free, evictable = held.pop("free", 0), held.pop("evictable", 0)
        busy = sum(held.values())
        return TierFill(free + evictable + busy, busy, evictable)
    return TierFill(capacity_bytes, max(0, capacity_bytes - free_bytes), None)


def pool_of(reading: Reading | None) -> PoolView | None:
    """The pool of the worker with these metrics; None if it has none."""
    loaded = {} if reading is None else reading.by_label("relaygr_pool_fetches_total", "outcome")
    if reading is None or "loaded" not in loaded:
        return None
    written = reading.total("relaygr_pool_objects_written_total", outcome="stored")
    return PoolView(reading.total("relaygr_pool_away") > 0, int(written), int(loaded["loaded"]))


def _device_share(device: Sequence[tuple[int, float]]) -> float | None:
    if len(device) < 2:
        return None
    (from_us, before_s), (to_us, after_s) = device[0], device[-1]
    return (after_s - before_s) * _US / (to_us - from_us) if to_us > from_us and after_s else None


def _lag_view(group: GroupReport) -> LagView:
    time_lag = group.max_time_lag
    lags: dict[int, int] = {}
    for each in group.partitions:
        lags[each.partition] = max(lags.get(each.partition, 0), each.lag or each.unread or 0)
    largest = [lags.get(partition, 0) for partition in range(max(lags, default=-1) + 1)]
    step = -(-len(largest) // MAX_CELLS) or 1
    return LagView(
        group.group,
        group.lag,
        None if time_lag is None else round(time_lag.seconds, 2),
        group.status.value,
        group.members,
        len(group.owner_split),
        group.problems[0] if group.problems else None,
        [max(largest[first : first + step]) for first in range(0, len(largest), step)],
    )


def _request_view(each: _Ended, now_us: int) -> RequestView:
    entry, result = each.entry, each.entry.result
    timings = StageTimings() if result is None else result.timings
    sent_us = entry.sent_at_us
    start_us = entry.retrieval_at_us or sent_us or entry.deadline_us

    def since(at_us: int) -> float | None:
        return round((at_us - start_us) / 1000, 2) if at_us else None

    def ms(duration_us: int) -> float:
        return round(duration_us / 1000, 2)

    return RequestView(
        age_s=round((now_us - each.at_us) / _US, 1),
        request=each.request_id.rpartition(".")[0][:80],
        user=entry.user,
        worker_id=result.worker_id if result is not None else "",
        kind=each.kind,
        reason=None if result is None or result.reason is None else choice_label(result.reason),
        latency_ms=ms(result.sent_at_us - sent_us) if result is not None and sent_us else None,
        budget_ms=ms(entry.deadline_us - sent_us) if sent_us and entry.deadline_us else None,
        decided_ms=since(entry.decided_at_us),
        sent_ms=since(sent_us) or 0.0,
        received_ms=since(result.received_at_us) if result is not None else None,
        deadline_ms=since(entry.deadline_us),
        answered_ms=since(result.sent_at_us) if result is not None else None,
        queue_ms=ms(timings.queue_us),
        wait_ms=ms(timings.wait_us + (timings.history_wait_us or 0)),
        pre_infer_ms=ms(timings.pre_infer_us),
        reload_ms=ms(timings.reload_us),
        rank_ms=ms(timings.rank_us),
        total_ms=ms(timings.total_us),
        prefix_tokens=result.prefix_tokens if result is not None else 0,
    )
