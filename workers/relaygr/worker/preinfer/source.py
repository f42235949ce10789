"""Where the jobs of a slot come from. Each slot has a source of its own: a source gives one job at a time, and the next
one only when that job has ended.

In a share group a job can be given back. Kafka hands it to another member, also if the member that had it is dead. In
an ordinary group, for clusters without share groups, jobs wait behind each other for the member of their partition.
"""

from __future__ import annotations

import json
from typing import Any, Final, Protocol

import structlog
from confluent_kafka import AcknowledgeType, KafkaError, KafkaException, Message

from relaygr.kafka.session import KafkaSession
from relaygr.schemas.topics import Topic
from relaygr.worker.preinfer.decision import Verdict

log = structlog.get_logger()

_LONGEST_JOB: Final[dict[str, Any]] = {"max.poll.interval.ms": 120_000}
"""Of a member of an ordinary group. A store that hangs keeps a slot for a minute. After the usual 30 s the group would
take the partition from it; on the embedded cluster nobody got it again.
"""
_TYPES: Final = {
    Verdict.ACCEPT: AcknowledgeType.ACCEPT,
    Verdict.RELEASE: AcknowledgeType.RELEASE,
    Verdict.PASS_ON: AcknowledgeType.ACCEPT,
    Verdict.REJECT: AcknowledgeType.REJECT,
}


class JobSource(Protocol):
    """See the module. One thread uses it."""

    can_release: bool

    @property
    def has_jobs(self) -> bool:
        """Whether jobs come, if there are any."""

    def next(self, wait_s: float) -> Message | None:
        """The next job, None after `wait_s` without one. Raises KafkaException."""

    def end(self, job: Message, verdict: Verdict) -> None:
        """The job is done with. Raises KafkaException."""

    def close(self) -> None:
        """Leaves the group. A job that has not ended goes to another member."""


class ShareSource:
    """A member of a share group. Kafka gives it its partition once the group works, which may be never."""

    can_release = True
    has_jobs = False

    def __init__(self, session: KafkaSession, client_id: str) -> None:
        self._session, self._topic = session, session.kafka.topic(Topic.PREINFER_POOL)
        # Only its statistics have a member's assignment.
        self._consumer = session.share_consumer(session.kafka.pool_group, client_id, self._read)
        self._consumer.subscribe([self._topic])

    def _read(self, statistics: str) -> None:
        group = json.loads(statistics).get("cgrp", {})
        self.has_jobs = group.get("assignment_size", 0) > 0

    def next(self, wait_s: float) -> Message | None:
        jobs = [each for each in self._consumer.poll(wait_s) if not _is_error(each, self._topic, self._session)]
        # Records of one batch come together. The trigger writes batches of one.
        self.has_jobs = self.has_jobs or bool(jobs)
        for surplus in jobs[1:]:
            self._consumer.acknowledge(surplus, AcknowledgeType.RELEASE)
        return jobs[0] if jobs else None

    def end(self, job: Message, verdict: Verdict) -> None:
        self._consumer.acknowledge(job, _TYPES[verdict])
        if verdict is Verdict.RELEASE:
            # Other verdicts go with the next poll, which follows at once.
            self._consumer.commit_async()

    def close(self) -> None:
        self._consumer.close()


class GroupSource:
    """A member of an ordinary group. A released job is the caller's, who can not give it back."""

    can_release = False

    def __init__(self, session: KafkaSession, client_id: str) -> None:
        self._session, self._topic = session, session.kafka.topic(Topic.PREINFER_POOL)
        self._consumer = session.group_consumer(session.kafka.pool_group, client_id, self._topic, options=_LONGEST_JOB)
        self._consumer.subscribe([self._topic])

    @property
    def has_jobs(self) -> bool:
        return bool(self._consumer.assignment())

    def next(self, wait_s: float) -> Message | None:
        job = self._consumer.poll(wait_s)
        return None if job is None or _is_error(job, self._topic, self._session) else job

    def end(self, job: Message, verdict: Verdict) -> None:  # noqa: ARG002
        try:
            self._consumer.store_offsets(job)
        except KafkaException as error:
            # Its partition has moved, and the next member repeats it.
            if error.args[0].code() != KafkaError._STATE:
                raise

    def close(self) -> None:
        self._consumer.close()


def _is_error(message: Message, topic: str, session: KafkaSession) -> bool:
    error = message.error()
    if error is not None and error.code() != KafkaError._PARTITION_EOF:
        session.note(topic, error)
        log.warning("pre-infer jobs cannot be read", cause=error.str())
    return error is not None
