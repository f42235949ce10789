"""A page without Kafka: a live model that a test feeds, and a server for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from relaygr.runtime.clock import ManualClock
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.fields import Other
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import (
    LatencyCoefficients,
    Path,
    PreInferJob,
    RankingResult,
    RetrievalEvent,
    StageTimings,
    StaleCause,
    WorkerState,
    WorkerStatus,
)
from relaygr.schemas.topics import Topic
from relaygr.ui.model import LiveModel, LiveSnapshot, RequestView
from relaygr.ui.page import Page
from relaygr.ui.server import UiServer

MS = 1000
LEAD_MS = 150
BUDGET_MS = 50


class UiWorld:
    """One cluster as the page sees it, on a clock of the test's own."""

    has_ended = False

    def __init__(self, partitions: int = 4) -> None:
        self.clock = ManualClock(monotonic_us=1_000_000_000)
        self.model = LiveModel("kafka-1:9092", "relaygr", partitions, self.clock.monotonic_us(), salt=b"salt")
        self._offsets: dict[Topic, int] = {}

    def snapshot(self) -> LiveSnapshot:
        return self.model.snapshot(self.clock.monotonic_us(), self.clock.wall_us())

    def said(self) -> list[str]:
        """What the page says is wrong."""
        return [problem.text for problem in self.snapshot().problems]

    def find(self, text: str) -> list[RequestView]:
        return self.model.find(text, self.clock.monotonic_us())

    def wait(self, seconds: float) -> None:
        """Time passes, and the reader sweeps."""
        self.clock.advance_us(round(seconds * 1e6))
        self.model.sweep(self.clock.monotonic_us(), self.clock.wall_us())

    def count(self, topic: Topic) -> None:
        self._offsets[topic] = self._offsets.get(topic, -1) + 1
        self.model.count(topic, 0, self._offsets[topic], self.clock.monotonic_us())

    def retrieve(self, name: str) -> None:
        """An impression begins, and its job follows after 2 ms."""
        now_us, wall_us = self.clock.monotonic_us(), self.clock.wall_us()
        self.count(Topic.RETRIEVAL)
        ranking_us = wall_us + LEAD_MS * MS
        self.model.note_retrieval(RetrievalEvent(name, "ann", wall_us, ranking_us, BUDGET_MS, 10, 0), now_us)
        self.count(Topic.PREINFER)
        job = PreInferJob(name, "ann", wall_us, ranking_us, BUDGET_MS, 10, 0, wall_us + 2 * MS)
        self.model.note_job(job, now_us)

    def ask(self, name: str, user: bytes = b"ann") -> None:
        """The ranking request, sent now."""
        self.count(Topic.RANKING)
        now_us = self.clock.wall_us()
        headers = RankingHeaders(name, "g", "results", 0, now_us + BUDGET_MS * MS)
        self.model.note_ranking(headers, user, now_us, self.clock.monotonic_us())

    def answer(
        self, name: str, latency_ms: int = 10, path: Path | Other | None = Path.HBM, outcome: Ended = Ended.RANKED,
        reason: Reason | Other | None = None, queue_ms: int = 2, stale: StaleCause | Other | None = None,
    ) -> None:  # fmt: skip
        """The result of a request that was sent now, after `latency_ms`. `stale`: the cause of a stale history."""
        self.count(Topic.RESULTS)
        sent_us = self.clock.wall_us()
        timings = StageTimings(queue_us=queue_ms * MS, rank_us=5 * MS, total_us=(latency_ms - 1) * MS)
        result = RankingResult(
            name, "worker-00", outcome, sent_us, sent_us + MS, sent_us + latency_ms * MS, timings, reason, path=path,
            prefix_tokens=900, history_stale=stale is not None, history_stale_cause=stale,
        )  # fmt: skip
        self.model.note_result(result, self.clock.monotonic_us())

    def impression(self, name: str, latency_ms: int = 10, path: Path = Path.HBM) -> None:
        """A whole impression."""
        self.retrieve(name)
        self.clock.advance_us(LEAD_MS * MS)
        self.ask(name)
        self.answer(name, latency_ms, path)

    def status(self, worker_id: str, *partitions: int) -> None:
        """A status that is written now."""
        self.model.note_status(
            worker_id, worker_status(worker_id, self.clock.wall_us(), partitions), self.clock.wall_us()
        )


def worker_status(
    worker_id: str, written_at_us: int, partitions: tuple[int, ...], url: str | None = None, revision: str = "model-1"
) -> WorkerStatus:
    """A ready worker with 1 GiB of HBM, three quarters of it free or evictable."""
    return WorkerStatus(
        worker_id, WorkerState.READY, written_at_us, 1, partitions, revision, 1024, 1, 1, 8192, 2**30, 3 * 2**28,
        2**31, 2**30, 1500, 2500, LatencyCoefficients(*[1.0] * 13), ranking_backlog_us=700, host="machine-1",
        metrics_url=url,
    )  # fmt: skip


@contextmanager
def served(page: Page, host: str = "127.0.0.1", token: str | None = None) -> Iterator[UiServer]:
    with UiServer(page, host, 0, token) as server:
        yield server
