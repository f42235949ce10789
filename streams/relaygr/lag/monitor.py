"""Measures lag in the background. Readers take the last report and send no request to Kafka."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from relaygr.kafka.session import KafkaSession
from relaygr.lag.collector import LagCollector, group_topics
from relaygr.lag.report import LagReport, LagTracker
from relaygr.lag.settings import LagSettings
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class MonitorState:
    """The last report, and the error of the last poll if it failed."""

    report: LagReport | None = None
    error: str | None = None
    polls: int = 0
    failures: int = 0


class LagMonitor:
    """Polls every `interval_s` from `start` to `stop`, or once by `poll`."""

    def __init__(
        self,
        session: KafkaSession,
        settings: LagSettings,
        patterns: Sequence[str] = (),
        clock: Clock | None = None,
    ) -> None:
        if not all(patterns):
            raise RelayError("--group names no group: give a name, or a pattern such as 'relaygr.*'")
        self._settings = settings
        self._clock = clock or SystemClock()
        self._collector = LagCollector(session, settings, patterns, self._clock)
        co_partitioned = {group: topics for group, topics in group_topics(session.kafka).items() if len(topics) > 1}
        self._tracker = LagTracker(settings, co_partitioned)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.state = MonitorState()
        """Each poll replaces the whole object, so read the attribute once."""

    def prepare(self) -> None:
        """Begins what a first poll waits for. The caller may import its own modules meanwhile."""
        self._collector.prepare()

    def poll(self) -> LagReport:
        """Measures once. Raises RelayError if the cluster does not answer, and sets `state.error`."""
        last = self.state
        try:
            snapshot = self._collector.poll()
            self._tracker.observe(snapshot)
            unknown = self._tracker.unknown_times(snapshot)
            self._tracker.learn(self._collector.record_timestamps(unknown))
        except RelayError as error:
            self.state = MonitorState(last.report, str(error), last.polls + 1, last.failures + 1)
            raise
        report = self._tracker.report(snapshot)
        self.state = MonitorState(report, None, last.polls + 1, last.failures)
        return report

    def start(self, on_poll: Callable[[MonitorState], None] | None = None) -> None:
        """Polls on a thread. If the cluster does not answer, the thread logs it and polls again."""
        self._thread = threading.Thread(target=self._run, args=(on_poll,), name="lag-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and the requests of its current poll."""
        self._stopping.set()
        if self._thread is not None:
            self._collector.end_poll()
            self._thread.join(self._settings.request_timeout_s)
            if self._thread.is_alive():
                # Closing a consumer while another thread polls it would crash the process. Both end with the process.
                return
        self._collector.close()

    def _run(self, on_poll: Callable[[MonitorState], None] | None) -> None:
        while not self._stopping.is_set():
            before = self.state.error
            try:
                self.poll()
            except RelayError as error:
                if before is None:
                    _log.warning("lag cannot be measured", error=str(error))
            else:
                if before is not None:
                    _log.info("lag is measured again")
            if on_poll is not None:
                on_poll(self.state)
            self._stopping.wait(self._settings.interval_s)
