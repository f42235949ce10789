"""The processes of one run: trigger, workers and gateway on their own topics, with a live table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from rich.console import Console

from relaygr.admission.corrector import PredictionQuality
from relaygr.admission.latency import Stage
from relaygr.admission.policy import DecisionReason
from relaygr.demo.board import Board, LagWatch, RecordTail
from relaygr.demo.summary import PredictionFigures, RunSummary, run_view, summarise
from relaygr.devbroker import LocalBroker
from relaygr.kafka.session import KafkaSession
from relaygr.processes import CommandProcess, Processes, metrics_url, read_metrics, write_config
from relaygr.runtime.clock import SystemClock
from relaygr.settings import Settings
from relaygr.trigger.fleet import Fleet
from relaygr.trigger.fleet_reader import FleetReader
from relaygr.ui.live import LiveCluster
from relaygr.ui.page import Page
from relaygr.ui.scrape import Reading
from relaygr.worker.executor.schedulable import WorkClass
from relaygr.worker.executor.work import JobOutcome
from relaygr.worker.shared.lock import memory_folder

START_TIMEOUT_S = 120.0
_STALE_MS = 3000


def show_phase(page: Page | None, phase: str) -> None:
    """What the demo does now, on its page if it serves one."""
    if page is not None:
        page.set_phase(phase)


class DemoStack:
    """The processes of one run, with their own topics. The context manager starts and stops them."""

    def __init__(
        self,
        console: Console,
        folder: Path,
        broker: LocalBroker,
        settings: Settings,
        relay: bool,
        workers: int,
        observed: bool = True,
        reuse: bool | None = None,
        page: Page | None = None,
    ) -> None:
        """`observed`: shows the live table, and feeds `page`. `reuse`: whether the workers keep prefixes for other
        requests; None: as `relay`.
        """
        self._console = console
        self._folder = folder / settings.topic_prefix
        self._broker = broker
        self._settings = settings
        self._relay = relay
        self._reuse = relay if reuse is None else reuse
        self._worker_count = workers
        self._cleanup = ExitStack()
        self._observed = observed
        self._lag: LagWatch | None = None
        self._page = page
        self._live: LiveCluster | None = None

    def __enter__(self) -> DemoStack:
        self._folder.mkdir(parents=True)
        settings = self._settings
        self._broker.create_topics(settings)
        if not self._broker.ours:
            self._cleanup.callback(self._broker.delete_topics, settings)
        config = self._folder / "settings.yaml"
        write_config(settings, config)
        try:
            # Entered first, so that it is removed last: the workers share memory in this folder.
            self._shared = self._cleanup.enter_context(
                TemporaryDirectory(prefix="relaygr-demo-", dir=memory_folder(), ignore_cleanup_errors=True)
            )
            self._processes = self._cleanup.enter_context(Processes(self._folder, config))
            with self._console.status(
                f"starting {self._worker_count} workers" + (" and the trigger" if self._relay else "")
            ):
                self._workers = [self._start_worker(number) for number in range(self._worker_count)]
                self._trigger = self._processes.start("trigger", ["trigger"], "trigger") if self._relay else None
                started = [*self._workers, *([self._trigger] if self._trigger is not None else [])]
                self._processes.await_ready(started, START_TIMEOUT_S)
            self._fleet = Fleet(_STALE_MS)
            self._clock = SystemClock()
            if self._observed:
                self._observe()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def play(self, title: str, records: Path, overrides: Sequence[str] = (), expected: int = 0) -> RunSummary:
        """Plays the schedule once. `overrides` are for the gateway. `expected`: its requests; 0: not known."""
        before, warm_up_before = self._device_seconds(), self._device_seconds(work_class=WorkClass.WARM_UP.value)
        tail = RecordTail(records)
        gateway = self._begin(records, overrides)
        if self._page is not None and self._live is not None:
            self._live.add_page(metrics_url(gateway), gateway.name)
            self._page.follow(self._live, title)
        board = Board(
            self._console,
            title,
            self._settings.traffic.budget_ms,
            tail,
            self._workers,
            self._trigger,
            self._owners,
            self._lag,
            expected,
        )
        board.run(lambda: self._has_ended(gateway))
        warm_up = self._device_seconds(work_class=WorkClass.WARM_UP.value) - warm_up_before
        summary = summarise(tail.records, self._device_seconds() - before, warm_up, self.predictions())
        if self._page is not None and self._live is not None:
            self._live.stop()
            self._page.add_run(run_view(title, summary, tail.records), self._settings.traffic.budget_ms)
        return summary

    def play_unobserved(self, records: Path, watch: Callable[[], None], overrides: Sequence[str] = ()) -> None:
        """Plays the schedule once, without the live table, which takes CPU time."""
        gateway = self._begin(records, overrides)
        while not self._has_ended(gateway):
            watch()
            time.sleep(0.1)

    def play_by(self, name: str, sender: Sequence[str], at_most_s: float) -> None:
        """Runs another sender than `relaygr traffic` until it ends: a module and its arguments. Raises RelayError, with
        its log, if it takes longer.
        """
        module, *arguments = sender
        relay = [f"traffic.relay={str(self._relay).lower()}"]
        gateway = self._processes.start(name, arguments, "traffic", relay, [module])
        self._processes.await_so(f"{name} has ended", lambda: self._has_ended(gateway), at_most_s)

    def play_reference(self, records: Path, of: Path, overrides: Sequence[str] = ()) -> None:
        """Ranks a sample of the impressions of an earlier run again, with a long deadline, for their scores."""
        phase = "ranking a sample again in full, to compare the scores"
        if self._page is not None:
            self._page.set_phase(phase)
        with self._console.status(phase):
            gateway = self._start_gateway(records, ["--reference-of", str(of)], overrides)
            while not self._has_ended(gateway):
                time.sleep(0.1)

    def _observe(self) -> None:
        """Follows the owners of partitions and the lag, for the live table. This costs the broker some work."""
        session = KafkaSession(self._settings, f"{self._settings.topic_prefix}-demo")
        reader = FleetReader(session, self._fleet, self._clock, session.name)
        reader.start()
        self._cleanup.callback(reader.stop)
        self._lag = self._cleanup.enter_context(LagWatch(session))
        if self._page is not None:
            trigger = {} if self._trigger is None else {metrics_url(self._trigger): self._trigger.name}
            self._live = LiveCluster(session, self._settings.ui, trigger, self._lag.monitor)
            self._cleanup.enter_context(self._live)

    def _start_worker(self, number: int) -> CommandProcess:
        name = f"worker-{number:02d}"
        own = [
            f"worker.worker_id={name}",
            f"worker.history_path={self._folder / f'history-{number:02d}'}",
            f"worker.shared_path={self._shared}",
        ]
        if not self._reuse:
            own += ["worker.reuse_prefixes=false", "worker.dram_bytes=0"]
        return self._processes.start(name, ["worker"], "worker", own)

    def _begin(self, records: Path, overrides: Sequence[str]) -> CommandProcess:
        """Starts a gateway that plays the schedule; the relay is on or off for it, as for the workers."""
        return self._start_gateway(records, [], [f"traffic.relay={str(self._relay).lower()}", *overrides])

    def _start_gateway(self, records: Path, arguments: Sequence[str], settings: Sequence[str] = ()) -> CommandProcess:
        return self._processes.start(records.stem, ["traffic", "--out", str(records), *arguments], "traffic", settings)

    def _has_ended(self, child: CommandProcess) -> bool:
        """Whether the gateway has ended. Raises RelayError, with its log, if a process has failed."""
        self._processes.require_running()
        return child.process.poll() is not None

    def worker_readings(self) -> list[Reading]:
        """The metrics of each worker."""
        return [read_metrics(worker.port) for worker in self._workers]

    def trigger_reading(self) -> Reading:
        """The metrics of the trigger; none without one."""
        return read_metrics(self._trigger.port) if self._trigger is not None else Reading()

    def roles(self) -> dict[int, str]:
        """`gateway`, `trigger` or `worker` of each running process, by its process id."""
        others = {child.process.pid: child.name.split("-")[0] for child in self._processes.running}
        return {pid: name if name in ("trigger", "worker") else "gateway" for pid, name in others.items()}

    def _device_seconds(self, **labels: str) -> float:
        return sum(reading.total("relaygr_worker_device_seconds_total", **labels) for reading in self.worker_readings())

    def predictions(self) -> PredictionFigures:
        """How good the predictions of this stack's trigger and workers were so far."""
        workers = self.worker_readings()
        trigger = self.trigger_reading()
        qualities = {stage: _mean_quality(workers, stage) for stage in Stage}
        decisions = "relaygr_trigger_decisions_total"
        return PredictionFigures(
            {stage: quality for stage, quality in qualities.items() if quality is not None},
            not_at_risk=int(trigger.total(decisions, reason=DecisionReason.NOT_AT_RISK)),
            misjudged=int(trigger.total("relaygr_trigger_misjudged_total")),
            computed=int(
                sum(
                    worker.total("relaygr_worker_preinfer_jobs_total", outcome=JobOutcome.COMPUTED)
                    for worker in workers
                )
            ),
            needless=int(sum(worker.total("relaygr_worker_preinfer_needless_total") for worker in workers)),
        )

    def _owners(self) -> Mapping[str, Sequence[int]]:
        now_us = self._clock.wall_us()
        owners: dict[str, list[int]] = {}
        for partition in range(self._settings.partitions):
            owner = self._fleet.owner_of(partition, now_us)
            if owner is not None:
                owners.setdefault(owner.worker_id, []).append(partition)
        return owners


def _mean_quality(workers: Sequence[Reading], stage: Stage) -> PredictionQuality | None:
    """The mean of the workers that did such work; None if none did."""
    slowdown, ratio = "relaygr_worker_slowdown_ratio", "relaygr_worker_prediction_ratio"
    told = [
        (
            worker.total(slowdown, stage=stage),
            *(worker.total(ratio, stage=stage, quantile=quantile) for quantile in ("0.1", "0.5", "0.9")),
        )
        for worker in workers
        if worker.total(slowdown, stage=stage)
    ]
    return PredictionQuality(*(statistics.mean(values) for values in zip(*told, strict=True))) if told else None
