"""One cluster under observation: the model, the threads that feed it, and the lag monitor."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from relaygr.kafka.session import KafkaSession
from relaygr.lag.monitor import LagMonitor
from relaygr.lag.settings import LagSettings
from relaygr.runtime.clock import SystemClock
from relaygr.runtime.masking import masked
from relaygr.ui.model import LiveModel, LiveSnapshot, RequestView
from relaygr.ui.reader import TopicReader
from relaygr.ui.scrape import Reading, Scraper, pages_at
from relaygr.ui.settings import UiSettings

LAG_INTERVAL_S = 2.0


class LiveCluster:
    """Observes from `start` to `stop`; also a context manager. After `stop` the last snapshot stays."""

    def __init__(
        self,
        session: KafkaSession,
        settings: UiSettings,
        pages: Mapping[str, str] | None = None,
        monitor: LagMonitor | None = None,
    ) -> None:
        """`pages`: more metrics pages, address -> name. `monitor`: one that another part starts and stops."""
        kafka = session.kafka
        self._clock = SystemClock()
        self._lock = threading.Lock()
        now_us = self._clock.monotonic_us()
        self._model = LiveModel(kafka.bootstrap, kafka.topic_prefix, kafka.partitions, now_us)
        self._reader = TopicReader(session, self._model, self._lock, self._clock.monotonic_us, self._clock.wall_us)
        self._settings = settings
        self._pages = dict(pages or {})
        self._pages.update((url, masked(url)) for url in settings.scrape)
        self._scraper = Scraper(
            settings.scrape_interval_s, self._targets, self._note_metrics, named=lambda: self._model.pages_named
        )
        self._own_monitor = monitor is None
        # Time stamps of unread records would have to be read from the topics.
        self._monitor = monitor or LagMonitor(session, LagSettings(interval_s=LAG_INTERVAL_S, record_timeout_s=0))
        self._ended: LiveSnapshot | None = None

    def require_topics(self) -> None:
        """Raises RelayError, with what to do, if the cluster or one of the topics cannot be read."""
        self._reader.require_topics()

    def add_page(self, url: str, name: str) -> None:
        """Reads one more metrics page from now on."""
        with self._lock:
            self._pages[url] = name

    def start(self) -> None:
        self._reader.start()
        self._scraper.start()
        if self._own_monitor:
            self._monitor.start()

    def stop(self) -> None:
        """May be called twice."""
        if self._ended is not None:
            return
        self._ended = self.snapshot()
        self._reader.stop()
        self._scraper.stop()
        if self._own_monitor:
            self._monitor.stop()

    def __enter__(self) -> LiveCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def snapshot(self) -> LiveSnapshot:
        """What the page shows now; after `stop`, the last one. Any thread may call it."""
        if self._ended is not None:
            return self._ended
        state = self._monitor.state
        with self._lock:
            self._model.note_lag(state.report, state.error)
            return self._model.snapshot(self._clock.monotonic_us(), self._clock.wall_us())

    def find(self, text: str) -> list[RequestView]:
        """Kept requests of a user or with a request id: see `LiveModel.find`. Any thread may call it."""
        with self._lock:
            return self._model.find(text, self._clock.monotonic_us())

    def _targets(self) -> dict[str, str]:
        with self._lock:
            pages = dict(self._pages)
        # Outside the lock: a name server may be slow.
        places = ((url, place, name) for url, name in pages.items() for place in pages_at(url))
        pages = {place: name if place == url else masked(place) for url, place, name in places}
        with self._lock:
            named = self._model.metrics_urls(self._clock.wall_us()) if self._settings.scrape_workers else {}
            targets = {**pages, **named}
            self._model.keep_pages(targets.values())
        return targets

    def _note_metrics(self, name: str, reading: Reading | None) -> None:
        with self._lock:
            self._model.note_metrics(name, reading, self._clock.monotonic_us())
