"""Watches a cluster for the readiness probe of a process: does it answer, and do its topics keep their partitions?

A Kafka client reports a broker that refuses connections, but not one that is frozen, and no client reports that the
partition count of a topic has changed. So a thread asks for the metadata of the topics, one each interval.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import ClusterMetadata

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.probes import Check

_log = structlog.get_logger()

INTERVAL_S: Final = 1.0
TIMEOUT_S: Final = 2.0
SILENCE_S: Final = 5.0
"""A cluster that has not answered for this long is away."""
_REFUSED: Final = frozenset((KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED))


class ClusterWatch:
    """Asks from `start` to `stop`. `checks` may be called by any thread."""

    def __init__(
        self,
        list_topics: Callable[..., ClusterMetadata],
        topics: Sequence[str],
        partitions: int,
        clock: Clock | None = None,
    ) -> None:
        """`list_topics`: that of a Kafka client, which this thread shares. Each topic must have `partitions`."""
        self._list_topics = list_topics
        self._topics = tuple(topics)
        self._partitions = partitions
        self._clock = clock or SystemClock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster-watch", daemon=True)
        self._answered_us: int | None = None
        # Replaced as wholes, so readers need no lock.
        self._findings: dict[str, str] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns within `TIMEOUT_S`. May be called without `start`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(2 * TIMEOUT_S)

    def checks(self) -> tuple[Check, ...]:
        """Whether the cluster answers, and whether the topics are as the settings say."""
        if self._answered_us is None:
            answers = Check("cluster", False, "Kafka has not answered yet")
        else:
            silent_s = (self._clock.monotonic_us() - self._answered_us) / 1e6
            answers = Check("cluster", silent_s < SILENCE_S, f"Kafka answered {silent_s:.1f} s ago")
        findings = self._findings
        return answers, Check("topics", not findings, ". ".join(findings.values()))

    def ask(self, topic: str) -> None:
        """Asks about one topic, and waits `TIMEOUT_S` at most."""
        try:
            metadata = self._list_topics(topic, timeout=TIMEOUT_S)
        except KafkaException:
            return
        self._answered_us = self._clock.monotonic_us()
        found = metadata.topics.get(topic)
        if found is None:
            return
        finding: str | None = None
        if found.error is not None and found.error.code() in _REFUSED:
            finding = f"This user may not describe {topic}: grant it the right to describe the topic"
        elif found.error is None and len(found.partitions) != self._partitions:
            finding = (
                f"{topic} has {len(found.partitions)} partitions, the setting `partitions` is {self._partitions}: "
                "users of other partitions get no answer. Partitions are never added: use a new `topic_prefix`"
            )
        if finding is not None and self._findings.get(topic) != finding:
            _log.error("a topic cannot be used", topic=topic, cause=finding)
        others = {name: text for name, text in self._findings.items() if name != topic}
        self._findings = others if finding is None else {**others, topic: finding}

    def _run(self) -> None:
        for topic in itertools.cycle(self._topics):
            self.ask(topic)
            if self._stopping.wait(INTERVAL_S):
                return
