"""The time of the device thread: what work will take of it, what is left for a request, and what it took.

    a look-up   `price` -> `put`, while the request waits or is queued -> `drop`
    a chunk     `next_chunking` -> `chunk_begins` -> `chunk_took`
    a batch     `pass_us`, `further_us` -> `pass_took` -> `answered`

Predictions are those of the calibration as the corrector corrects them. `Backlog` (admitted work), `Measured` (how far
to trust predictions) and `Chunking` are pure, and change only here, in the scheduler, and where a request enters and
leaves the mailbox (`Executor`, `Requests`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from relaygr.admission.corrector import Corrector
from relaygr.admission.latency import LatencyModel, Stage
from relaygr.runtime.clock import Clock
from relaygr.worker.executor.chunks import Chunking, chunk_bound_us
from relaygr.worker.executor.impressions import ExpectedArrivals
from relaygr.worker.executor.job_admission import JobAdmission
from relaygr.worker.executor.measured import SLOWDOWN_SAMPLE_US
from relaygr.worker.executor.order import Scheduler
from relaygr.worker.executor.schedulable import IDLE_CLASSES, WorkClass
from relaygr.worker.executor.work import PrefixWork, RankingWork
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.interface import Engine
from relaygr.worker.settings import WorkerSettings

UNCUT_US = 1e12
"""Longer than any prefix takes."""
CHUNK_WEIGHT = 0.05
"""Weight of one chunk in the size that predictions assume: that of the last 20 or so."""
LOOK_UPS_MEASURED = 8
"""Look-ups are measured in groups of this many, since a single one takes as long as the measurement."""


@dataclass(slots=True)
class Price:
    """What a request demands at `now_us`, and what is left for it. One look-up has one price."""

    now_us: int
    is_new: bool
    """Whether no time was spent on the request before, so that it may not wait for long."""
    needed_us: float
    """For its ranking pass, and the worker's own time."""
    room_us: float
    """For a ranking pass. Pre-infer takes no part of it: when the turn of the request comes, it precedes pre-infer."""
    fits: bool
    """Whether there is time for the ranking pass, if the prefix is ready."""


class Capacity:
    """Belongs to the device thread. Any thread may ask `backlog`, and read `last_progress_us` and `chunking`."""

    def __init__(
        self,
        engine: Engine,
        settings: WorkerSettings,
        corrector: Corrector,
        scheduler: Scheduler[PrefixWork | RankingWork],
        arrivals: ExpectedArrivals,
        admission: JobAdmission,
        metrics: WorkerMetrics,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._corrector = corrector
        self._scheduler = scheduler
        self._arrivals = arrivals
        self._admission = admission
        self._metrics = metrics
        self._clock = clock
        self.backlog = scheduler.backlog
        self._measured = scheduler.backlog.measured
        self._look_ups = self._look_ups_us = 0
        """Those measured together, and their time."""
        self._first_look_up_us = 0
        """When the first request of this step was looked up; 0 if none was."""
        self.last_progress_us = clock.monotonic_us()
        """When the device thread last made progress."""
        self.use(engine)

    def use(self, engine: Engine) -> None:
        """Predicts for this model from now on. What was measured stays."""
        settings = self._settings
        self.chunking = Chunking(
            # Without reuse there is no pre-infer, so a cut would only cost time.
            max(settings.chunk_ms, settings.longest_chunk_ms) * 1000 if settings.reuse_prefixes else UNCUT_US,
            settings.max_chunk_tokens,
            engine.geometry.page_tokens,
            in_one_chunk=not engine.rules.chunks,
        )
        """The chunking that predictions assume: chunks of the recent mean size."""

    # -- predictions -------------------------------------------------------------------------------

    def latency_at(self, tokens: int) -> LatencyModel:
        """The present latency model for prefixes of this length."""
        return self._corrector.model_at(tokens)

    @property
    def latency(self) -> LatencyModel:
        """The present latency model for all lengths."""
        return self._corrector.model

    def compute_us(self, done_tokens: int, total_tokens: int) -> float:
        """Time of all chunks that are left of a prefix."""
        return self.chunking.duration_us(done_tokens, total_tokens, self._corrector.model_at(total_tokens))

    def full_us(self, prefix_tokens: int, scored_tokens: int) -> float:
        """Time of full inference: the chunks of the prefix, then the ranking pass."""
        latency = self._corrector.model_at(prefix_tokens)
        computed_us = self.chunking.duration_us(0, prefix_tokens, latency)
        return computed_us + latency.hit_us(prefix_tokens, scored_tokens)

    def computed_in_us(self, done_tokens: int, total_tokens: int) -> float:
        """Time until these tokens are computed, behind the admitted work."""
        return self.compute_us(done_tokens, total_tokens) + self.backlog.predicted_us

    # -- one request -------------------------------------------------------------------------------

    def predict_pass(self, work: RankingWork) -> None:
        """Sets the times of the request's ranking pass on `ranked_prefix_tokens` and `scored_tokens`."""
        time = self._corrector.pass_time(work.ranked_prefix_tokens, work.scored_tokens)
        own_us = self._measured.own_us[work.path]
        work.predicted_us = time.alone_us
        # Under load a request is one of a batch, and what they share is paid once.
        work.remaining_us = time.further_us + own_us
        work.latest_start_us = work.answer_by_us - int(work.predicted_us + own_us)

    def price(self, work: RankingWork, now_us: int, is_new: bool) -> Price:
        """The price of the request's ranking pass, as predicted. The request gives back the time that it was promised,
        until it is put again. The time of the look-ups of a step is measured from the first of them on.
        """
        if not self._first_look_up_us:
            self._first_look_up_us = now_us
        self.backlog.drop(work)
        needed_us = work.predicted_us + self._measured.own_us[work.path]
        room_us = self._room_us(work, now_us, is_new)
        return Price(now_us, is_new, needed_us, room_us, needed_us <= room_us)

    def price_again(self, work: RankingWork, price: Price) -> None:
        """Other work made room for the request."""
        price.room_us = self._room_us(work, price.now_us, price.is_new)
        price.fits = price.needed_us <= price.room_us

    def fits_without_longest(self, work: RankingWork, price: Price) -> bool:
        """Whether there is time for the ranking pass without the longest work that may be displaced."""
        return price.needed_us <= self._room_us(work, price.now_us, price.is_new, displacing=True)

    def _room_us(self, work: RankingWork, now_us: int, is_new: bool, displacing: bool = False) -> float:
        """0 for a new request that would have to wait for too long."""
        sent_us = work.queued_since_us if is_new else None
        return self.backlog.room_us(work.answer_by_us, now_us, sent_us=sent_us, displacing=displacing)

    def left_us(self, work: RankingWork, now_us: int, price: Price | None = None) -> int:
        """The device time that the request may take, a computation included, without being late or making admitted
        requests late. `price`: that of `now_us`, if the request has one. It gives back the time that it was promised.
        """
        self.backlog.drop(work)
        share = self.backlog.preinfer_share
        if price is not None and not share:
            room_us = price.room_us
        else:
            room_us = self.backlog.room_us(work.answer_by_us, now_us, preinfer_share=share)
        return int(room_us - self._measured.own_us[work.path])

    def pass_left_us(self, work: RankingWork, price: Price) -> float:
        """The device time that a ranking pass may take, without the worker's own."""
        return price.room_us - self._measured.own_us[work.path]

    def may_wait(self, work: RankingWork, now_us: int, predicted_us: float) -> bool:
        """Whether a new request that takes `predicted_us` in all may wait for the admitted work. The larger its
        computation, the more of the queue is reserved for others.
        """
        own_us = self._measured.own_us[work.path]
        ready_part = min(1.0, (work.predicted_us + own_us) / max(1.0, predicted_us + own_us))
        return self.backlog.may_wait(work.answer_by_us, now_us, work.queued_since_us, ready_part=ready_part)

    def put(self, work: RankingWork) -> None:
        """The request waits for its prefix. Its ranking pass is admitted, so that there is room for it then."""
        self.backlog.put(work, work.latest_start_us)

    def drop(self, work: RankingWork) -> None:
        """The request gives back the time that it was promised."""
        self.backlog.drop(work)

    def admitted(self, work: RankingWork) -> None:
        """There is time for the request's ranking pass."""
        self._measured.expect(work.remaining_us)

    def turned_away(self) -> None:
        """There is no time for a request's ranking pass. It demanded its look-up only."""
        self._measured.expect(self._measured.prepare_us)

    def refused(self) -> None:
        """A request was refused, or cut short, because other work leaves no time for it."""
        self._measured.refused()

    def missed(self) -> None:
        """An admitted request can not end in time."""
        self._measured.missed()

    # -- steps -------------------------------------------------------------------------------------

    def rest(self, now_us: int) -> None:
        """The device thread has nothing to do, or only work that delays nobody."""
        self._measured.rest(now_us)

    def begins(self, work: PrefixWork | RankingWork, now_us: int) -> None:
        """The device thread begins this piece of work."""
        if work.work_class in IDLE_CLASSES:
            # The device counts as idle, since this work delays nobody.
            self._measured.rest(now_us)
        else:
            self._measured.begin(now_us)

    def progressed(self, now_us: int) -> None:
        """The device thread goes on: for its watchdog."""
        self.last_progress_us = now_us

    def begins_step(self) -> None:
        """The device thread looks for work. A step begins with its look-ups."""
        if self._measured.idle_since_us is not None:
            self._measured.wake(self._clock.monotonic_us())
        self._first_look_up_us = 0

    def looked_up(self, requests: int, now_us: int) -> None:
        """The look-ups of a step ended, with so many requests from the mailbox: measures their time."""
        self.last_progress_us = now_us
        if not self._first_look_up_us:
            return
        self._look_ups += requests
        self._look_ups_us += now_us - self._first_look_up_us
        if self._look_ups >= LOOK_UPS_MEASURED:
            self._measured.observe_look_ups(self._look_ups_us, self._look_ups)
            self._look_ups = self._look_ups_us = 0

    # -- chunks ------------------------------------------------------------------------------------

    def next_chunking(self, work: PrefixWork, now_us: int) -> Chunking:
        """The bounds of the next chunk of this prefix, by the requests that wait or may arrive."""
        shortest_us, longest_us = self._settings.chunk_ms * 1000, self._settings.longest_chunk_ms * 1000
        if longest_us <= shortest_us or not self._settings.reuse_prefixes:
            return self.chunking
        first = self._scheduler.ranking.peek()
        slack_us = first.latest_start_us - now_us if first is not None and first is not work else math.inf
        cut_us = self._corrector.cut_us(work.done_tokens)
        arrival_us, others_us = self._arrivals.next_us(now_us, {job.impression for job in work.jobs})
        # This one is in that queue, too, unless a request waits for it, or nobody.
        prefixes = len(self._scheduler.preinfer) + (work.work_class is not WorkClass.PREINFER)
        bound_us = chunk_bound_us(shortest_us, longest_us, cut_us, slack_us, arrival_us, others_us, prefixes)
        # The time of a prefix grows with the number of chunks, that is with the mean of 1 / bound.
        mean = 1 / self.chunking.chunk_us + CHUNK_WEIGHT * (1 / bound_us - 1 / self.chunking.chunk_us)
        self.chunking = self.chunking.within(1 / mean)
        return self.chunking.within(bound_us)

    def chunk_begins(self, work: PrefixWork, chunk_us: float, now_us: int) -> None:
        """The device begins a chunk of this work, which may be admitted now, later or never."""
        self.backlog.begin_chunk(work, chunk_us, now_us)

    def chunk_failed(self, now_us: int) -> None:
        """The chunk ended, if one was begun. Its work must be put again, or dropped."""
        self.backlog.end_chunk(now_us)

    def chunk_took(self, work: PrefixWork, duration_us: int, now_us: int) -> None:
        """The chunk ended, after so much device time. Its work must be put again, or dropped."""
        self.backlog.end_chunk(now_us)
        self._took(work.work_class, duration_us, now_us, had_job=any(each.was_announced for each in work.waiters))
        if work.waiters:
            self._measured.did(duration_us)

    def observe_chunk(self, done_tokens: int, end_tokens: int, total_tokens: int, took_us: int) -> None:
        """Corrects the predictions by the time of a chunk that ran by itself."""
        predicted_us = self._corrector.calibrated.append_us(done_tokens, end_tokens - done_tokens)
        self._corrector.observe(Stage.PRE, predicted_us, took_us, total_tokens)

    def is_too_late(self, work: RankingWork, ready_us: float) -> bool:
        """Whether the request would be late if its prefix were complete at `ready_us`."""
        return ready_us + work.predicted_us + self._measured.answer_us > work.answer_by_us

    # -- ranking passes ----------------------------------------------------------------------------

    def pass_us(self, work: RankingWork) -> float:
        """Time of the request's ranking pass by itself. Results are written one after the other."""
        return work.predicted_us * self._margin + self._measured.answer_us

    def further_us(self, work: RankingWork) -> tuple[float, bool]:
        """What the request adds to a pass of others, and whether it may join them only if that pays."""
        latency = self._corrector.model_at(work.ranked_prefix_tokens)
        further_us = latency.further_us(work.ranked_prefix_tokens, work.scored_tokens) * self._margin
        must_pay = latency.shared_us is not None and self._measured.wait_limit >= 1.0
        return further_us + self._measured.answer_us, must_pay

    @property
    def _margin(self) -> float:
        # The last request in the queue delays no other, so it needs none.
        return self._measured.margin if self.backlog.total_us else 1.0

    def _calibrated_us(self, works: Sequence[RankingWork]) -> float:
        """The calibrated time of one forward of these requests."""
        return self._corrector.calibrated.batch_us([(work.ranked_prefix_tokens, work.scored_tokens) for work in works])

    def pass_took(self, works: Sequence[RankingWork], duration_us: int, now_us: int) -> None:
        """A pass of these requests alone took so much device time: corrects the predictions."""
        # The requests of a batch may differ in length.
        tokens = works[0].ranked_prefix_tokens if len(works) == 1 else None
        self._corrector.observe(Stage.HIT, self._calibrated_us(works), duration_us, tokens)
        self._took(WorkClass.RANKING, duration_us, now_us)

    def mixed_pass_took(
        self, works: Sequence[RankingWork], done_tokens: int, end_tokens: int, duration_us: int, now_us: int
    ) -> int:
        """A pass of these requests and of a chunk took so much device time. Returns the part of the chunk, which is to
        be counted with `chunk_took`.
        """
        rank_us = self._calibrated_us(works)
        chunk_us = self._corrector.calibrated.append_us(done_tokens, end_tokens - done_tokens)
        share = rank_us / (rank_us + chunk_us) if rank_us + chunk_us else 0.5
        self._took(WorkClass.RANKING, round(duration_us * share), now_us)
        return round(duration_us * (1 - share))

    def answered(self, works: Sequence[RankingWork], first: RankingWork, ended_us: int, now_us: int) -> None:
        """These requests of a pass with `first` were answered: the pass ended at `ended_us`, the answers `now_us`."""
        measured, answer_us = self._measured, (now_us - ended_us) / len(works)
        for work in works:
            measured.observe(work.path, work.remaining_us, answer_us, work.answered_us <= work.answer_by_us)
        # The first request of a batch had the fixed part of the pass.
        measured.did(max(0.0, first.predicted_us - first.remaining_us))
        if measured.done_us >= SLOWDOWN_SAMPLE_US:
            measured.observe_slowdown(now_us)

    def observe_full(self, work: RankingWork) -> None:
        """Corrects the predictions of full inference. The ranking pass counts with its predicted time, since its
        forward may have served other requests, too.
        """
        size = work.ranked_prefix_tokens, work.scored_tokens
        corrector = self._corrector
        took_us = work.pre_infer_us + corrector.model_at(size[0]).hit_us(*size)
        corrector.observe(Stage.FULL, corrector.calibrated.full_us(*size), took_us, size[0])

    def _took(self, work_class: WorkClass, duration_us: int, now_us: int, *, had_job: bool = False) -> None:
        """Counts device time. `had_job`: it computed a prefix, and a job had come for it. The job admission counts such
        work as no ranking load, as the trigger does.
        """
        self._scheduler.charge(work_class, duration_us, now_us)
        self._metrics.device_seconds[work_class].inc(duration_us / 1e6)
        self.last_progress_us = now_us
        if work_class is WorkClass.RANKING and not had_job:
            self._admission.ranked(duration_us, now_us)
