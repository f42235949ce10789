"""Reads the newest jobs of newly assigned partitions, to rebuild what the trigger remembers of their users.

The jobs topic has the jobs of all trigger processes, so its tail serves as a changelog, and the trigger needs no topic
of its own. One thread reads the tail while another already decides about events; the deciding thread takes the jobs in
small portions.

`relaygr trigger` checks at its start that it may read the jobs topic. If that right is taken away later, the trigger
has no memory of the users of newly assigned partitions, and is not ready.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Message

from relaygr.kafka.client_errors import cause_of
from relaygr.kafka.log_reader import Log, LogReader, before_end
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.session import KafkaSession
from relaygr.runtime.clock import Clock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.codec import DecodeError, decode
from relaygr.schemas.headers import is_job
from relaygr.schemas.messages import PreInferJob
from relaygr.schemas.topics import Topic

log = structlog.get_logger()

PORTION: Final = 32
"""Jobs that the deciding thread takes at once: about a millisecond."""
_MOST_WAITING: Final = 4096
"""Most jobs that are read at once, and most that wait to be taken. Beyond it the oldest are dropped."""
_POLL_S: Final = 0.2
_READ_S: Final = 30.0


class JobsTail:
    """`follow` names the partitions of this process; `take` gives their earlier jobs, a portion at a time."""

    def __init__(self, session: KafkaSession, clock: Clock, client_id: str, rebuild_s: float) -> None:
        """Reads the jobs of the last `rebuild_s` seconds; 0: none. No network until `start`."""
        kafka = session.kafka
        self._topic = kafka.topic(kafka.jobs_topic)
        self._reader = LogReader(session, client_id, (self._topic,))
        self._has_requests = kafka.jobs_topic is Topic.RANKING
        self._clock = clock
        self._rebuild_us = round(rebuild_s * 1e6)
        self._partitions: frozenset[int] = frozenset()
        self._asked: queue.SimpleQueue[frozenset[int] | None] = queue.SimpleQueue()
        self._jobs: deque[tuple[PreInferJob, int]] = deque(maxlen=_MOST_WAITING)
        self._stopping = threading.Event()
        self._asked_for = self._read_so_far = 0
        """Calls of `follow` with new partitions, and those that the reader has served."""
        self._thread = threading.Thread(target=self._run, name="jobs-tail", daemon=True)

    @property
    def is_idle(self) -> bool:
        """Whether every partition so far was read, and all of its jobs taken."""
        return self._asked_for == self._read_so_far and not self._jobs

    def start(self) -> None:
        if self._rebuild_us:
            self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Returns when the thread has ended, or after `timeout_s`."""
        self._stopping.set()
        self._asked.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def follow(self, partitions: frozenset[int]) -> None:
        """These are the partitions of this process from now on: the tails of new ones will be read."""
        new, self._partitions = partitions - self._partitions, partitions
        if new and self._rebuild_us:
            self._asked_for += 1
            self._asked.put(new)

    def take(self) -> list[tuple[PreInferJob, int]]:
        """At most `PORTION` jobs with their partitions, those of each partition in order."""
        jobs = self._jobs
        return [jobs.popleft() for _ in range(min(PORTION, len(jobs)))]

    def _run(self) -> None:
        while (partitions := self._asked.get()) is not None and not self._stopping.is_set():
            try:
                self._read(partitions)
            except RelayError as error:
                log.warning("earlier jobs are not read", cause=str(error))
            except KafkaException as error:
                log.warning("earlier jobs are not read", cause=cause_of(error.args[0]))
            self._read_so_far += 1

    def _read(self, partitions: frozenset[int]) -> None:
        start = before_end(max(1, _MOST_WAITING // len(partitions)))
        logs = [Log(self._topic, partition, start) for partition in sorted(partitions)]
        since_us = self._clock.wall_us() - self._rebuild_us
        count, until_us = 0, self._clock.monotonic_us() + round(_READ_S * 1e6)
        with self._reader as reader:
            reader.read(*logs)
            while not self._stopping.is_set() and self._clock.monotonic_us() < until_us:
                batch = reader.batch(_POLL_S)
                count += self._take(batch.records, since_us)
                if any(each.error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED for each in batch.failures):
                    cause = "this user has no right to read the topic of the jobs"
                    log.warning("earlier jobs are not read", cause=cause)
                    return
                if all(each.caught_up for each in logs):
                    break
        log.info("earlier jobs read", jobs=count)

    def _take(self, messages: Sequence[Message], since_us: int) -> int:
        """Returns how many of the messages are jobs since then."""
        count = 0
        for message in messages:
            partition = message.partition()
            assert partition is not None
            if self._has_requests and not is_job(headers_of(message)):
                continue
            try:
                job = decode(PreInferJob, message.value())
            except DecodeError:
                continue
            if job.decided_at_us >= since_us:
                self._jobs.append((job, partition))
                count += 1
        return count
