"""The load: impressions of passing users on a schedule, and jobs and requests of resident users on demand."""

from __future__ import annotations

import heapq
import itertools
import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from confluent_kafka import OFFSET_END, TopicPartition

from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.headers import JOB_HEADER
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic

LEAD_S = 0.1
"""Time from the job of an impression to its ranking request."""
_TURN_S = 0.002
_POLL_S = 0.01


@dataclass(slots=True)
class Asked:
    """One ranking request. Times are monotonic seconds."""

    user: str
    sent_s: float
    answered_s: float | None = None
    is_hit: bool = False
    """Whether the member that answered has the user's last job."""

    def is_late(self, budget_ms: float) -> bool:
        return self.answered_s is None or (self.answered_s - self.sent_s) * 1e3 > budget_ms


def residents(partitions: int, each: int) -> dict[str, int]:
    """`each` users of every partition, with their partition."""
    found: dict[str, int] = {}
    counts = [0] * partitions
    for number in itertools.count():
        user = f"resident-{number}"
        part = partition_for(user.encode(), partitions)
        if counts[part] < each:
            counts[part] += 1
            found[user] = part
            if len(found) == each * partitions:
                return found
    raise AssertionError("unreachable")


class Load:
    """Sends `rate` impressions a second from `start` to its end as a context, which also ends the thread."""

    def __init__(self, kafka: KafkaSettings, rate: float) -> None:
        self._interval_s = 1 / rate
        self._jobs_topic, self._ranking = kafka.topic(kafka.jobs_topic), kafka.topic(Topic.RANKING)
        self._job_headers = [JOB_HEADER] if kafka.jobs_topic is Topic.RANKING else []
        self._producer = make_producer(kafka, ProducerKind.PREINFER, "affinity-load")
        self._consumer = make_assigned_consumer(kafka, "affinity-load", options={"fetch.wait.max.ms": 20})
        # The topic is new: the end is known long before the first member answers.
        self._consumer.assign([TopicPartition(kafka.topic(Topic.RESULTS), 0, OFFSET_END)])
        self._numbers = itertools.count()
        self._last_job: dict[str, str] = {}
        self._requests: dict[str, Asked] = {}
        self.passing: list[Asked] = []
        """Requests of the impressions, in the order of their sending."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="affinity-load", daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._producer.flush(5)
        self._consumer.close()

    def prepare(self, users: Iterable[str]) -> None:
        """Sends a job of each user."""
        for user in users:
            job = self._last_job[user] = str(next(self._numbers))
            self._producer.produce(self._jobs_topic, job, user, headers=[*self._job_headers])

    def ask(self, users: Iterable[str], timeout_s: float) -> list[Asked]:
        """A ranking request of each user, without a new job; returns when all are answered, or after `timeout_s`."""
        asked = [self._request(user) for user in users]
        ends_s = time.monotonic() + timeout_s
        while any(each.answered_s is None for each in asked) and time.monotonic() < ends_s:
            time.sleep(_POLL_S)
        return asked

    def between(self, since_s: float, until_s: float) -> Sequence[Asked]:
        """The requests of the impressions that were sent in this time."""
        return [each for each in self.passing if since_s <= each.sent_s < until_s]

    def _request(self, user: str) -> Asked:
        request_id = str(next(self._numbers))
        asked = self._requests[request_id] = Asked(user, time.monotonic())
        self._producer.produce(self._ranking, f"{request_id} {self._last_job[user]}", user)
        return asked

    def _run(self) -> None:
        due: list[tuple[float, str]] = []
        next_s = time.monotonic()
        while not self._stopping.is_set():
            now_s = time.monotonic()
            if now_s >= next_s:
                next_s += self._interval_s
                user = f"passing-{next(self._numbers)}"
                self.prepare([user])
                heapq.heappush(due, (now_s + LEAD_S, user))
            while due and due[0][0] <= now_s:
                self.passing.append(self._request(heapq.heappop(due)[1]))
            self._producer.poll(0)
            message = self._consumer.poll(_TURN_S)
            if message is not None and message.error() is None:
                self._answered(message.value())

    def _answered(self, value: str | bytes | None) -> None:
        request_id, _, is_hit = json.loads(value or b"[]")
        asked = self._requests.get(request_id)
        if asked is not None and asked.answered_s is None:
            asked.answered_s, asked.is_hit = time.monotonic(), is_hit
