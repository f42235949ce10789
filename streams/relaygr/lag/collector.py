"""Reads the offsets and members of groups and the ends of logs from Kafka, without joining a group or committing.

Order of a poll: metadata and the list of groups, members, committed offsets, and then starts and ends of the logs.
The metadata gives the partitions, because a group's offsets do not include partitions without a commit. The ends come
last; otherwise a group that keeps up could be ahead of them.

The requests of a poll are made in a child process (`relaygr.cluster.admin_process`), because librdkafka can abort the
process that makes them while the broker is away.

librdkafka's embedded cluster has no DescribeGroups, so members and state are unknown there. A value of one group that
cannot be read becomes a sentence in its `problems`; only a cluster that does not answer is an error. The coordinator of
one group can be away while the cluster answers: each group has a request of its own, and the next poll waits only
`_UNANSWERED_TIMEOUT_S` for a group that had no answer in the last one.
"""

from __future__ import annotations

import contextlib
import fnmatch
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import structlog
from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
)
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (
    AdminClient,
    ClusterMetadata,
    ConsumerGroupDescription,
    ListConsumerGroupsResult,
    ListOffsetsResultInfo,
    OffsetSpec,
)

from relaygr.cluster.admin import is_embedded
from relaygr.cluster.admin_process import AdminProcess, CannotStart
from relaygr.cluster.rights import Role, missing_rights
from relaygr.consumer.watermark import TopicPartition
from relaygr.kafka.client_errors import NO_COORDINATOR
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings, SecurityProtocol
from relaygr.lag.model import UNKNOWN, GroupMember, GroupSnapshot, PartitionOffsets, Snapshot
from relaygr.lag.settings import LagSettings
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic

log = structlog.get_logger()

_T = TypeVar("_T")
# Each request has its own time-out. This longer one is for a client that hangs.
_FUTURE_TIMEOUT_S: Final = 60.0
_CLIENT_ID: Final = "relaygr-lag"
_COORDINATOR_RETRY_S: Final = 0.2
_REQUESTS_IN_A_ROW: Final = 8
"""A poll waits for at most six requests, for the coordinator, and has some time for its own work."""
_UNANSWERED_TIMEOUT_S: Final = 0.5
_NO_GROUP_REQUESTS: Final = "This cluster does not describe groups: members, owners and state are unknown"


def group_topics(kafka: KafkaSettings) -> dict[str, tuple[str, ...]]:
    """The groups of RelayGR, and the topics of each."""
    return {
        kafka.workers_group: tuple(map(kafka.topic, kafka.worker_topics)),
        kafka.trigger_group: (kafka.topic(Topic.RETRIEVAL),),
        kafka.overflow_group: (kafka.topic(Topic.OVERFLOW),),
    }


@dataclass(frozen=True, slots=True)
class _GroupDescription:
    """The answer of DescribeGroups for one group, or the reason why there is none."""

    state: str = UNKNOWN
    protocol: str = UNKNOWN
    assignor: str = ""
    members: tuple[GroupMember, ...] | None = None
    problem: str | None = None
    refused: bool = False
    """This user has no right to describe the group, so the group may exist."""
    answered: bool = True
    """Whether the group's coordinator answered. If not, the group may exist."""


class LagCollector:
    """Polls the groups whose names match `patterns` (`*` and `?`); by default those of `group_prefix`."""

    def __init__(
        self,
        session: KafkaSession,
        settings: LagSettings,
        patterns: Sequence[str] = (),
        clock: Clock | None = None,
    ) -> None:
        self._session = session
        self._kafka = kafka = session.kafka
        self._settings = settings
        self._poll = _GroupPoll(kafka, settings, tuple(patterns))
        self._clock = clock or SystemClock()
        self._admin = AdminProcess(kafka, _CLIENT_ID)
        session.on_new_files(self._admin.renew)
        self._connected = False
        self._records: Consumer | None = None

    def prepare(self) -> None:
        """Starts the child process, so that the first poll need not wait for its imports."""
        with contextlib.suppress(CannotStart):  # The poll starts it again, and reports why it cannot.
            self._admin.start(__name__)

    def poll(self) -> Snapshot:
        """Measures once. Raises RelayError if the cluster does not answer."""
        try:
            if not self._connected:
                self.prepare()
                cluster = self._session.require_broker()
                # Without authentication a cluster rarely has ACLs, and its coordinators take long to answer.
                has_users = self._kafka.security.protocol is not SecurityProtocol.PLAINTEXT
                if has_users and not is_embedded(cluster):
                    for sentence in missing_rights(self._kafka, Role.LAG, self._admin):
                        log.warning("the lag of some partitions cannot be measured", cause=sentence)
                self._connected = True
            snapshot = self._ask()
        except (KafkaException, OSError) as error:
            raise self._no_answer(error) from error
        self._poll.remember(snapshot)
        return replace(snapshot, polled_at_us=self._clock.monotonic_us(), wall_us=self._clock.wall_us())

    def _ask(self) -> Snapshot:
        timeout_s = _REQUESTS_IN_A_ROW * self._settings.request_timeout_s
        try:
            return self._admin.call(timeout_s, self._poll.ask)
        except KafkaException as error:
            # librdkafka can abort the child while a broker is away. Then another child asks.
            if error.args[0].code() != KafkaError._FAIL:
                raise
        return self._admin.call(timeout_s, self._poll.ask)

    def record_timestamps(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, tuple[int, int]]:
        """Partition -> (requested offset, timestamp in ms of the first record from that offset on).

        Reads one record of each partition, all within `record_timeout_s`. Partitions without a record by then are
        missing in the result. Raises RelayError as `poll` does.
        """
        if not offsets or self._settings.record_timeout_s == 0:
            return {}
        try:
            return self._read_records(offsets)
        except KafkaException as error:
            raise self._no_answer(error) from error

    def _read_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, tuple[int, int]]:
        if self._records is None:
            # One record of each partition is needed, not a megabyte.
            options = {"queued.min.messages": 1, "max.partition.fetch.bytes": 1024}
            self._records = self._session.assigned_consumer(_CLIENT_ID, options=options)
        consumer = self._records
        found: dict[TopicPartition, tuple[int, int]] = {}
        consumer.assign([KafkaPartition(tp.topic, tp.partition, offset) for tp, offset in offsets.items()])
        end_us = self._clock.monotonic_us() + int(self._settings.record_timeout_s * 1e6)
        while len(found) < len(offsets) and (left_us := end_us - self._clock.monotonic_us()) > 0:
            message = consumer.poll(left_us / 1e6)
            if message is None or message.error() is not None:
                continue
            topic, partition = message.topic(), message.partition()
            assert topic is not None and partition is not None
            tp = TopicPartition(topic, partition)
            if tp in offsets and tp not in found:
                found[tp] = (offsets[tp], message.timestamp()[1])
                consumer.incremental_unassign([KafkaPartition(*tp)])
        consumer.unassign()
        return found

    def _no_answer(self, error: KafkaException | OSError) -> RelayError:
        cause = error.args[0].str() if isinstance(error, KafkaException) else str(error) or "a request did not end"
        return RelayError(f"Kafka at {self._kafka.bootstrap} does not answer: {cause}")

    def end_poll(self) -> None:
        """Any thread may call it: `poll` ends soon, and later polls raise RelayError."""
        self._admin.close()

    def close(self) -> None:
        """Ends the child process, and closes the consumer that reads records."""
        self._admin.close()
        if self._records is not None:
            self._records.close()


class _GroupPoll:
    """The requests of one poll, in the child process. Pickled with each call."""

    def __init__(self, kafka: KafkaSettings, settings: LagSettings, patterns: tuple[str, ...]) -> None:
        self._settings = settings
        self._ours = group_topics(kafka)
        self._patterns = patterns or (f"{kafka.group_prefix}.*",)
        self._explicit = {pattern for pattern in patterns if not any(mark in pattern for mark in "*?[")}
        self._seen: set[str] = set()
        self._unanswered: set[str] = set()

    def remember(self, snapshot: Snapshot) -> None:
        """Keeps the groups of a poll: the broker that lists a group may be away at the next one."""
        self._seen = {group.group for group in snapshot.groups}
        self._unanswered = {group.group for group in snapshot.groups if not group.answered}

    def ask(self, admin: AdminClient) -> Snapshot:
        """Raises KafkaException or TimeoutError without an answer of the cluster."""
        timeout_s = self._settings.request_timeout_s
        # Requests that do not depend on each other are under way at the same time.
        listing = admin.list_consumer_groups(request_timeout=timeout_s)
        cluster = admin.list_topics(timeout=timeout_s)
        groups = self._groups(listing)
        # Not at the same time: while a group has no coordinator yet, a request for its offsets can crash the process.
        described = self._describe(admin, groups)
        asked = {group: self._ask_committed(admin, cluster, group) for group in groups if described[group].answered}
        committed = {group: _committed(future) for group, future in asked.items()}
        committed |= {group: ({}, described[group].problem) for group in groups if group not in asked}
        known = {
            group
            for group in groups
            if _is_known(described[group], committed[group][0], has_topics=group in self._ours)
        }
        known |= {group for group in groups if committed[group][1] is not None}
        shown = [group for group in groups if group in known or group in self._explicit]
        wanted = {
            group: self._partitions(cluster, group, described[group], committed[group][0])
            if group in known and committed[group][1] is None
            else ([], [])
            for group in shown
        }
        # Requests may wait for a group of ours that never had a member.
        absent = {
            group: _partitions_of(cluster, self._ours[group])
            for group in groups
            if group in self._ours and group not in known and described[group].members == ()
        }
        asked_for = [*(partitions for partitions, _ in wanted.values()), *absent.values()]
        ends, starts, failures = self._ends(admin, {tp for partitions in asked_for for tp in partitions})
        for group, partitions in absent.items():
            if any(ends.get(tp, 0) > starts.get(tp, 0) for tp in partitions):
                wanted[group] = (partitions, [])
        snapshots = []
        for group, (partitions, gone) in sorted(wanted.items()):
            offsets, problem = committed[group]
            problems = [text for text in dict.fromkeys((described[group].problem, problem)) if text is not None]
            if group not in known:
                waits = ", and messages wait for it" if partitions else ""
                problems.append(f"The group has no member and no commit{waits}")
            if gone:
                problems.append(f"The group has commits for topics that no longer exist: {', '.join(gone)}")
            failed = sorted({failures[tp] for tp in partitions if tp in failures})
            problems += [f"The end of some logs cannot be read: {text}" for text in failed]
            snapshots.append(
                GroupSnapshot(
                    group=group,
                    state=described[group].state,
                    protocol=described[group].protocol,
                    assignor=described[group].assignor,
                    members=described[group].members,
                    partitions=tuple(
                        PartitionOffsets(tp, offsets.get(tp), ends.get(tp), starts.get(tp)) for tp in partitions
                    ),
                    problems=tuple(problems),
                    answered=described[group].answered,
                )
            )
        return Snapshot(
            cluster_id=cluster.cluster_id or UNKNOWN,
            polled_at_us=0,  # The parent sets both times.
            wall_us=0,
            groups=tuple(snapshots),
        )

    def _groups(self, listing: Future[ListConsumerGroupsResult]) -> list[str]:
        names = self._explicit | self._seen | {name for name in self._ours if self._wanted(name)}
        try:
            listed = _result(listing)
            names |= {group.group_id for group in listed.valid or () if self._wanted(group.group_id)}
        except KafkaException as error:
            if error.args[0].code() != KafkaError._UNSUPPORTED_FEATURE:
                raise
        return sorted(names)

    def _wanted(self, group: str) -> bool:
        return any(fnmatch.fnmatchcase(group, pattern) for pattern in self._patterns)

    def _describe(self, admin: AdminClient, groups: Sequence[str]) -> dict[str, _GroupDescription]:
        """Asks again while a cluster without any group creates its internal topic."""
        described: dict[str, _GroupDescription] = {}
        left, ends_s = list(groups), time.monotonic() + self._settings.request_timeout_s
        while True:
            # A request for several groups would end with the slowest coordinator.
            asked = {group: self._ask_description(admin, group) for group in left}
            described |= {group: _described(future) for group, future in asked.items()}
            left = [group for group in left if not described[group].answered and group not in self._unanswered]
            if not left or time.monotonic() >= ends_s:
                return described
            time.sleep(_COORDINATOR_RETRY_S)

    def _ask_description(self, admin: AdminClient, group: str) -> Future[ConsumerGroupDescription]:
        timeout_s = self._settings.request_timeout_s
        if group in self._unanswered:
            timeout_s = min(timeout_s, _UNANSWERED_TIMEOUT_S)
        return admin.describe_consumer_groups([group], request_timeout=timeout_s)[group]

    def _ask_committed(
        self, admin: AdminClient, cluster: ClusterMetadata, group: str
    ) -> Future[ConsumerGroupTopicPartitions]:
        asked: list[KafkaPartition] | None = None
        if group in self._ours and is_embedded(cluster):
            # The embedded cluster answers only for partitions that the request names.
            asked = [
                KafkaPartition(tp.topic, tp.partition) for tp in _partitions_of(cluster, self._ours[group])
            ] or None
        [future] = admin.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group, asked)], request_timeout=self._settings.request_timeout_s
        ).values()
        return future

    def _partitions(
        self, cluster: ClusterMetadata, group: str, described: _GroupDescription, offsets: Mapping[TopicPartition, int]
    ) -> tuple[list[TopicPartition], list[str]]:
        """Every partition of every topic of the group, and the topics with commits that no longer exist."""
        topics = {tp.topic for tp in offsets} | set(self._ours.get(group, ()))
        for member in described.members or ():
            topics |= {tp.topic for tp in member.partitions}
        gone = sorted({tp.topic for tp in offsets if not _exists(cluster, tp.topic)})
        return _partitions_of(cluster, sorted(topics)), gone

    def _ends(
        self, admin: AdminClient, partitions: Collection[TopicPartition]
    ) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int], dict[TopicPartition, str]]:
        """The ends and the starts of the logs, and why an end cannot be read."""
        if not partitions:
            return {}, {}, {}
        timeout_s = self._settings.request_timeout_s
        places = [KafkaPartition(tp.topic, tp.partition) for tp in partitions]
        latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        earliest: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
        first = admin.list_offsets(dict.fromkeys(places, earliest), request_timeout=timeout_s)
        last = admin.list_offsets(dict.fromkeys(places, latest), request_timeout=timeout_s)
        starts, _ = _offsets_of(first)
        ends, failures = _offsets_of(last)
        return ends, starts, failures


def _offsets_of(
    answers: Mapping[KafkaPartition, Future[ListOffsetsResultInfo]],
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, str]]:
    offsets: dict[TopicPartition, int] = {}
    failures: dict[TopicPartition, str] = {}
    for place, future in answers.items():
        tp = TopicPartition(place.topic, place.partition)
        try:
            offsets[tp] = _result(future).offset
        except KafkaException as error:
            failures[tp] = error.args[0].str()
    return offsets, failures


def _described(future: Future[ConsumerGroupDescription]) -> _GroupDescription:
    try:
        group = _result(future)
    except KafkaException as error:
        code = error.args[0].code()
        if code == KafkaError._UNSUPPORTED_FEATURE:
            return _GroupDescription(problem=_NO_GROUP_REQUESTS)
        if code == KafkaError.GROUP_ID_NOT_FOUND:
            return _GroupDescription(state="dead", members=())
        if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
            problem = "This user may not see the members of the group: grant it the right to describe the group"
            return _GroupDescription(problem=problem, refused=True)
        return _GroupDescription(problem=_not_answered(error), answered=False)
    members = tuple(
        GroupMember(
            member_id=member.member_id,
            client_id=member.client_id,
            host=member.host,
            instance_id=member.group_instance_id,
            partitions=frozenset(
                TopicPartition(tp.topic, tp.partition)
                for tp in (member.assignment.topic_partitions if member.assignment is not None else ())
            ),
        )
        for member in group.members
    )
    state = group.state.name.lower() if isinstance(group.state, ConsumerGroupState) else UNKNOWN
    return _GroupDescription(state, group.type.name.lower(), group.partition_assignor or "", members)


def _committed(future: Future[ConsumerGroupTopicPartitions]) -> tuple[dict[TopicPartition, int], str | None]:
    """The group's offsets, and a sentence if they cannot be read."""
    try:
        answer = _result(future)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
            return {}, None
        if error.args[0].code() in (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED):
            return {}, f"This user may not read the offsets of the group: {error.args[0].str()}"
        return {}, _not_answered(error)
    return {
        TopicPartition(tp.topic, tp.partition): tp.offset
        for tp in answer.topic_partitions or ()
        if tp.error is None and tp.offset >= 0
    }, None


def _not_answered(error: KafkaException) -> str:
    cause = error.args[0].str()
    if error.args[0].code() not in NO_COORDINATOR:
        return f"Kafka does not tell the state of the group: {cause}"
    remedy = "start the broker that is away, and give __consumer_offsets more replicas"
    return f"The coordinator of the group does not answer ({cause}): {remedy}"


def _is_known(described: _GroupDescription, offsets: Mapping[TopicPartition, int], *, has_topics: bool) -> bool:
    # Of an empty group without commits, such as that of a bridge which found no record, nobody knows the topics.
    without_topics = (UNKNOWN, "dead") if has_topics else (UNKNOWN, "dead", "empty")
    return bool(offsets or described.members) or described.state not in without_topics or described.refused


def _exists(cluster: ClusterMetadata, topic: str) -> bool:
    return topic in cluster.topics and cluster.topics[topic].error is None


def _partitions_of(cluster: ClusterMetadata, topics: Iterable[str]) -> list[TopicPartition]:
    return [
        TopicPartition(topic, partition)
        for topic in topics
        if _exists(cluster, topic)
        for partition in sorted(cluster.topics[topic].partitions)
    ]


def _result(future: Future[_T]) -> _T:
    return future.result(timeout=_FUTURE_TIMEOUT_S)
