"""Watches a cluster for the readiness probe of a process: does it answer, and do its topics keep their partitions?

A Kafka client reports a broker that refuses connections, but neither one that is frozen nor a connection that stays
open and passes nothing, and no client reports that the partition count of a topic has changed. So a thread asks for the
metadata of the topics, one each interval, through the connections of a producer. Consumers are not asked: questions of
another thread than that which polls them took up to 15 s.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import ClusterMetadata

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.loggers import Logger
from relaygr.runtime.readiness import Check

_log = Logger(__name__)

INTERVAL_S: Final = 1.0
SILENCE_S: Final = 2.5
"""A client whose question has no answer for this long is silent. The client itself waits for 3 s (`SILENCE_MS`), so the
process says what it waits for before the connection is replaced.
"""
_PAUSE_S: Final = 0.1
_REFUSED: Final = frozenset((KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED))


class ClusterWatch:
    """Asks from `start` to `stop`. Any thread may call the other methods."""

    def __init__(
        self,
        client_id: str,
        list_topics: Callable[..., ClusterMetadata],
        topics: Sequence[str],
        partitions: int | None,
        clock: Clock | None = None,
        others: Sequence[str] = (),
    ) -> None:
        """`list_topics`: that of a Kafka client, which this thread shares. Each of `topics` must have `partitions`;
        None: any count. `others`: asked for, too, and may have any count.
        """
        self._client_id = client_id
        self._list_topics = list_topics
        self._topics = (*others, *topics)
        self._wanted = dict.fromkeys(topics, partitions)
        self._counts: dict[str, int] = {}
        self._clock = clock or SystemClock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster-watch", daemon=True)
        self._has_answered = self._is_away = False
        self._unanswered_us: int | None = None
        """The time of the first question since the last answer."""
        # Replaced as wholes, so readers need no lock.
        self._findings: dict[str, str] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2 * SILENCE_S) -> None:
        """Waits for a question in progress, `timeout_s` at most. May be called without `start`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def silence(self) -> str | None:
        """A sentence while the client gets no answer."""
        if not self._has_answered:
            return "Kafka has not answered yet"
        silent_s = self._silent_s()
        return f"Kafka has not answered {self._client_id} for {silent_s:.1f} s" if silent_s >= SILENCE_S else None

    def checks(self) -> tuple[Check, ...]:
        """Whether the cluster answers, and whether the topics are as the settings say."""
        silence, findings = self.silence, self._findings
        return (
            Check("cluster", silence is None, silence or ""),
            Check("topics", not findings, ". ".join(findings.values())),
        )

    def partitions_of(self, topic: str) -> int | None:
        """The topic's partitions, as of some seconds ago; None before the first answer."""
        return self._counts.get(topic)

    def ask(self, topic: str) -> None:
        """Asks about one topic until there is an answer, or the client is silent. A silent one is asked once more."""
        if self._unanswered_us is None:
            self._unanswered_us = self._clock.monotonic_us()
        while (metadata := self._answer(topic)) is None:
            # A client whose connection is replaced refuses at once, and others a little early.
            if self._stopping.wait(_PAUSE_S) or self._silent_s() >= SILENCE_S:
                self._tell()
                return
        self._has_answered = True
        self._tell()  # The answer may come after the process was not ready for the lack of it.
        self._unanswered_us = None
        self._tell()
        self._examine(topic, metadata)

    def _answer(self, topic: str) -> ClusterMetadata | None:
        left_s = SILENCE_S - self._silent_s()
        try:
            return self._list_topics(topic, timeout=left_s if left_s > 0 else SILENCE_S)
        except KafkaException:
            return None

    def _silent_s(self) -> float:
        since_us = self._unanswered_us
        return 0.0 if since_us is None else (self._clock.monotonic_us() - since_us) / 1e6

    def _tell(self) -> None:
        silence = self.silence if self._has_answered else None
        if silence is not None and not self._is_away:
            _log.warning("kafka does not answer", cause=silence)
        elif silence is None and self._is_away:
            _log.warning("kafka answers again")
        self._is_away = silence is not None

    def _examine(self, topic: str, metadata: ClusterMetadata) -> None:
        found = metadata.topics.get(topic)
        if found is None:
            return
        if found.error is None:
            # A broker that has just started may know a part of them, and partitions are never taken away.
            self._counts[topic] = max(len(found.partitions), self._counts.get(topic, 0))
        wanted = self._wanted.get(topic)
        finding: str | None = None
        if found.error is not None and found.error.code() in _REFUSED:
            finding = f"This user may not describe {topic}: grant it the right to describe the topic"
        elif found.error is None and wanted not in (None, len(found.partitions)):
            finding = (
                f"{topic} has {len(found.partitions)} partitions, the setting `partitions` is {wanted}: "
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
