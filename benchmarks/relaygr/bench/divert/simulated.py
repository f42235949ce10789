"""The same loads in virtual time: the product's scheduler, admission and divert policy, without a broker.

Three simulated workers (`relaygr.simulate.worker`) take the times of `paced.LATENCY`. A diverted request is encoded,
takes a hop, and is decoded by the other worker. Statuses take a hop, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import simpy
from confluent_kafka import Producer
from prometheus_client import CollectorRegistry

from relaygr.admission.divert import DivertPolicy, Peers
from relaygr.admission.latency import LatencyModel
from relaygr.admission.settings import AdmissionSettings
from relaygr.bench.divert.paced import LATENCY
from relaygr.bench.divert.run import (
    BUDGET_MS,
    CANDIDATES,
    HISTORY,
    SETTLE_S,
    SLOW_FACTOR,
    STATUS_INTERVAL_MS,
    WARM_UP_BUDGET_MS,
    WORKERS,
    DivertRow,
    Load,
    row_of,
    trace_of,
    users_of,
)
from relaygr.bench.generator.samples import LOST, Sample
from relaygr.schemas.codec import decode
from relaygr.schemas.messages import Outcome, RankingRequest
from relaygr.schemas.partitioner import partition_for
from relaygr.simulate.device import EPOCH_US, SharedHistories, SimulatedModel, behaviours_of
from relaygr.simulate.figures import CODE, RANKED, Ending
from relaygr.simulate.times import Draws, MeasuredTimes
from relaygr.simulate.worker import SimulatedWorker, WorkerSpec
from relaygr.worker.cache.policies import TierPolicies
from relaygr.worker.divert import Diverter, DivertParts
from relaygr.worker.executor.work import RankingWork
from relaygr.worker.kv import DramGeometry, KvDtype, KvGeometry, PrefixLayout
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.model.interface import EngineLimits
from relaygr.worker.settings import WorkerSettings

PARTITIONS: Final = 12
_STALE_STATUSES: Final = 3
_HBM_BYTES: Final = 256 << 20
_TIMES: Final = MeasuredTimes()


@dataclass(slots=True)
class _Request:
    """A request, and how it ended."""

    user_id: str
    ranking_us: float
    """When the gateway sent it."""
    budget_ms: int
    hop_us: float
    ended_us: float | None = None
    ending: Ending = Ending.LOST
    answers: int = 0

    def sample(self, row: int) -> Sample:
        is_ranked = CODE[self.ending] in RANKED
        return Sample(
            row=row,
            part=1,
            user_id=self.user_id,
            history_length=HISTORY,
            ranking_us=round(self.ranking_us),
            lag_us=0,
            latency_us=None if self.ended_us is None else round(self.ended_us + self.hop_us - self.ranking_us),
            status=Outcome.RANKED if is_ranked else LOST if self.ended_us is None else Outcome.FAILED,
            path=self.ending.value if is_ranked else None,
        )


@dataclass(slots=True, eq=False)
class _Overflow:
    """In the place of a worker's producer."""

    send: Callable[[int, bytes], None]

    def produce(
        self,
        _topic: str,
        value: bytes,
        _key: bytes,
        *,
        partition: int,
        headers: object,  # noqa: ARG002
        on_delivery: Callable[[Any, Any], None],
    ) -> None:
        self.send(partition, value)
        on_delivery(None, None)


@dataclass(slots=True)
class _Histories:
    """The histories as a diverter reads them."""

    shared: SharedHistories

    def get(self, user_id: str) -> Any:
        return self.shared.get(user_id)

    def is_loading(self, partition: int) -> bool:  # noqa: ARG002
        return False


@dataclass(slots=True)
class _Clock:
    """The clock of a worker's diverter. It looks the worker up when it is read, because the worker is made later."""

    fleet: SimulatedFleet
    number: int

    def monotonic_us(self) -> int:
        return self.fleet.workers[self.number].now_us

    def wall_us(self) -> int:
        return EPOCH_US + self.fleet.workers[self.number].now_us


class SimulatedFleet:
    """Three workers, of which each owns a third of the partitions, and a gateway."""

    def __init__(self, divert: bool, seed: int = 0) -> None:
        self._env = simpy.Environment()
        self._random = np.random.default_rng(seed)
        self._hops = Draws(_TIMES.hop_us, self._random)
        self._histories = SharedHistories(HISTORY)
        self._divert = divert
        self._spec = _spec(divert)
        stale_us = _STALE_STATUSES * STATUS_INTERVAL_MS * 1000
        self._peers = [Peers(f"worker-{number:02d}", stale_us) for number in range(WORKERS)]
        self._registries = [CollectorRegistry() for _ in range(WORKERS)]
        self._passed_on: set[int] = set()
        self.requests: list[_Request] = []
        self.workers: list[SimulatedWorker] = []
        for number in range(WORKERS):
            self.workers.append(self._worker(number))
        for worker, owned in zip(self.workers, np.array_split(np.arange(PARTITIONS), WORKERS), strict=True):
            worker.partitions = frozenset(owned.tolist())
        self._env.process(self._report_statuses())

    def run(self, load: Load, seconds: float, rounds: int) -> DivertRow:
        """Warms up, and plays the load `rounds` times."""
        for user in users_of(load, PARTITIONS):
            self._histories.lengths[user] = HISTORY
            self._send(user, WARM_UP_BUDGET_MS)
        self._env.run(until=self._env.now + WARM_UP_BUDGET_MS * 1000)
        if load is Load.SLOW_WORKER:
            self.workers[0].device.pace = SLOW_FACTOR
        warm, before = len(self.requests), self._diverted
        for turn in range(rounds):
            self._env.run(until=self._env.now + SETTLE_S * 1e6)
            trace = trace_of(load, seconds, PARTITIONS, seed=turn)
            for at_us, user in zip(trace.ranking_us.tolist(), trace.user_id, strict=True):
                self._after(at_us, partial(self._send, user, BUDGET_MS))
            self._env.run(until=self._env.now + seconds * 1e6 + 4 * BUDGET_MS * 1000)
        samples = [request.sample(row) for row, request in enumerate(self.requests[warm:])]
        return row_of(load, self._divert, samples, self._diverted - before, self._late_elsewhere(samples, warm))

    @property
    def _diverted(self) -> int:
        name, labels = "relaygr_worker_diverted_total", {"outcome": "delivered"}
        return round(sum(each.get_sample_value(name, labels) or 0.0 for each in self._registries))

    def _late_elsewhere(self, samples: Sequence[Sample], first: int) -> int:
        """Requests of these samples, the first of which has this number, that were ranked late where they went."""
        passed_on = (samples[number - first] for number in self._passed_on if number >= first)
        return sum((each.latency_us or 0) > BUDGET_MS * 1000 and each.path is not None for each in passed_on)

    # -- the gateway -------------------------------------------------------------------------------

    def _send(self, user: str, budget_ms: int) -> None:
        now_us, number = self._env.now, len(self.requests)
        self.requests.append(_Request(user, now_us, budget_ms, self._hops.next()))
        sent_us = EPOCH_US + int(now_us)
        request = RankingRequest(
            str(number),
            user,
            sent_us,
            sent_us + budget_ms * 1000,
            sent_us // 1000,
            np.zeros(CANDIDATES, "<i8"),
            behaviours_of(0),
            self._histories.version(HISTORY),
        )
        partition = partition_for(user.encode(), PARTITIONS)
        self._after(self._hops.next(), partial(self._deliver, number, request, partition))

    def _deliver(self, number: int, request: RankingRequest, partition: int) -> None:
        owner = next(worker for worker in self.workers if partition in worker.partitions)
        owner.receive_ranking(number, request, partition)

    def _on_ranked(self, number: int, at_us: int, ending: Ending, _work: RankingWork | None) -> None:
        request = self.requests[number]
        request.answers += 1
        request.ended_us, request.ending = at_us, ending

    # -- the workers -------------------------------------------------------------------------------

    def _worker(self, number: int) -> SimulatedWorker:
        return SimulatedWorker(
            self._env,
            f"worker-{number:02d}",
            self._spec,
            self._histories,
            self._random,
            self._on_ranked,
            lambda *_: None,
            lambda _: None,
            diverter=self._diverter(number) if self._divert else None,
        )

    def _diverter(self, number: int) -> Diverter:
        results: Any = SimpleNamespace(
            deliveries=SimpleNamespace(median_us=0), finish=lambda _: None, refused=lambda *_: None
        )
        parts = DivertParts(
            topic="ranking-overflow",
            policy=DivertPolicy(self._peers[number], self._spec.settings.divert_share),
            producer=cast(Producer, _Overflow(partial(self._pass_on, number))),
            results=results,
            histories=_Histories(self._histories),
            metrics=WorkerMetrics(self._registries[number]),
            clock=_Clock(self, number),
            engine=lambda: self.workers[number].executor.engine,
            backlog=lambda: self.workers[number].executor.backlog,
        )
        settings = self._spec.settings.model_copy(update={"worker_id": f"worker-{number:02d}"})
        return Diverter(settings, parts)

    def _pass_on(self, number: int, partition: int, value: bytes) -> None:
        """A worker has written to the overflow topic. Its device thread may be ahead of the simulation."""
        request = decode(RankingRequest, value)
        if int(request.request_id) in self._passed_on:
            raise AssertionError(f"request {request.request_id} was diverted twice")
        self._passed_on.add(int(request.request_id))
        delay_us = self.workers[number].now_us - self._env.now + self._hops.next()
        self._after(delay_us, partial(self._deliver, int(request.request_id), request, partition))

    def _report_statuses(self) -> Generator[simpy.Event, None, None]:
        while True:
            for worker in self.workers:
                status = worker.status()
                self._after(self._hops.next(), partial(self._hear, worker.worker_id, status))
            yield self._env.timeout(STATUS_INTERVAL_MS * 1000)

    def _hear(self, worker_id: str, status: Any) -> None:
        for peers in self._peers:
            peers.apply(worker_id, status, EPOCH_US + int(self._env.now))

    def _after(self, delay_us: float, call: Callable[[], None]) -> None:
        self._env.timeout(max(0.0, delay_us)).callbacks.append(lambda _: call())


def simulate(seconds: float, rounds: int) -> Sequence[DivertRow]:
    """Two rows a load: without and with `worker.divert`."""
    return [SimulatedFleet(divert).run(load, seconds, rounds) for load in Load for divert in (False, True)]


def _spec(divert: bool) -> WorkerSpec:
    settings = WorkerSettings(
        divert=divert,
        status_interval_ms=STATUS_INTERVAL_MS,
        hbm_bytes=_HBM_BYTES,
        dram_bytes=0,
        warm_up_users=0,
    )
    geometry = DramGeometry(KvGeometry(1, 1, 16, 16, settings.page_tokens, KvDtype.FLOAT32))
    limits = EngineLimits(2 * HISTORY, 32, CANDIDATES)
    model = SimulatedModel(geometry, PrefixLayout(0, 1), limits, PrefixRules(), LatencyModel(LATENCY), is_cpu=True)
    policies = TierPolicies(settings.hbm_policy, settings.dram_policy, round(settings.prefix_ttl_s * 1e6))
    return WorkerSpec(model, _TIMES, settings, AdmissionSettings(), policies)
