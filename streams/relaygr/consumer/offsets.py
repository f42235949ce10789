"""The offsets of a consumer loop: where its partitions are read from, and what it commits.

The watermark of finished offsets (`relaygr.consumer.watermark`) goes to the client, which commits it once a second and
before partitions are revoked. The client commits in the background, so a broker that hangs never blocks the poll
thread. A commit made here could be followed by the client's commit of an older stored offset.

With a `FinishedLog`, finished offsets are also written there, and the offsets of the predecessor count as finished at
the first assignment, if they are plausible (`relaygr.consumer.finished`).

The poll thread makes all calls, but for `finish`. Errors of the client are counted and tried again later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import structlog
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from prometheus_client import Counter

from relaygr.consumer.finished import FinishedLog, is_plausible
from relaygr.consumer.interface import Token
from relaygr.consumer.settings import ConsumerSettings
from relaygr.consumer.watermark import Progress, TopicPartition, WatermarkTracker

# A new topic has partitions without a leader for some milliseconds.
_NO_LEADER_YET: Final = frozenset((KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE))
_POSITION_TRIES: Final = 3
_POSITION_RETRY_S: Final = 0.05

_TAKEN_UP = Counter(
    "relaygr_consumer_taken_up_total",
    "Offsets that the previous process finished without committing them, so that this process skips their messages",
    ["loop"],
)


class Offsets:
    """See the module docstring."""

    def __init__(
        self,
        name: str,
        settings: ConsumerSettings,
        finished_log: FinishedLog | None,
        note_error: Callable[[KafkaError], None],
    ) -> None:
        self.tracker = WatermarkTracker(settings.max_span)
        self._name = name
        self._timeout_s = settings.request_timeout_s
        self._finished_log = finished_log
        self._note_error = note_error
        self._finished: deque[Token] = deque()
        self._is_sealed = False
        self._log = structlog.get_logger().bind(loop=name)
        # It counts from 0, so that a process whose predecessor left nothing says so.
        _TAKEN_UP.labels(name)

    def finish(self, token: Token) -> None:
        """Marks a message as finished at the next `take_finished`. Any thread may call it."""
        self._finished.append(token)

    def seal(self) -> None:
        """Stores and notes nothing from now on, because another process owns the group's offsets."""
        self._is_sealed = True

    def take_finished(self) -> None:
        """Moves the watermarks past the messages that `finish` named."""
        moved = set()
        while self._finished:
            token = self._finished.popleft()
            tp = TopicPartition(token.topic, token.partition)
            self.tracker.finish(tp, token.offset, token.generation)
            moved.add(tp)
        if moved:
            self._note(moved)

    def store(self, client: Consumer) -> None:
        """Gives the watermarks to the client."""
        set_back = self.tracker.set_back()
        offsets = self.tracker.committable() | set_back
        if self._is_sealed or not offsets:
            return
        try:
            client.store_offsets(offsets=_to_kafka(offsets))
            if set_back:
                # The client itself never commits a lower offset than before.
                client.commit(offsets=_to_kafka(set_back), asynchronous=True)
                names = [f"{tp.topic} [{tp.partition}]" for tp in sorted(set_back)[:20]]
                self._log.warning("these logs are new ones, and are read again", partitions=names)
        except KafkaException as error:
            self._note_error(error.args[0])
            return
        self.tracker.committed(offsets)

    def assign(self, client: Consumer, partitions: Collection[TopicPartition], *, is_first: bool) -> None:
        """Adds owned partitions. `is_first`: this process had no assignment before."""
        positions = self._positions(client, partitions)
        self.tracker.assign(positions)
        if self._finished_log is not None and is_first:
            self._adopt_finished(client, self._finished_log.predecessor(), positions)
        self._note(positions)

    def revoke(self, partitions: Collection[TopicPartition]) -> None:
        """Removes owned partitions. Their state is kept for their next assignment."""
        self.tracker.revoke(partitions)
        if self._finished_log is not None:
            self._finished_log.forget(partitions)

    def begin_anew(self, client: Consumer | None, topics: Collection[str]) -> None:
        """Reads the owned partitions of these topics, whose logs are new ones, from their beginning."""
        for tp in self.tracker.begin_anew(topics):
            if client is None:
                continue  # The commit of `store` does the same for the next client.
            try:
                client.seek(KafkaPartition(*tp, OFFSET_BEGINNING))
            except KafkaException as error:
                # The client does not have the partition in a rebalance. The commit of `store` does the same then.
                self._note_error(error.args[0])

    def unread(self, client: Consumer, partitions: Collection[TopicPartition], timeout_s: float) -> int:
        """The number of messages of these owned partitions that were not delivered. Raises KafkaException."""
        wanted = [KafkaPartition(*tp, OFFSET_END) for tp in partitions]
        ends = _offsets(client.offsets_for_times(wanted, timeout=timeout_s))
        return sum(max(0, end - self.tracker.next_offset(tp)) for tp, end in ends.items())

    def _note(self, partitions: Iterable[TopicPartition]) -> None:
        if self._finished_log is not None and not self._is_sealed:
            self._finished_log.note(self.tracker.progress(partitions))

    def _positions(self, client: Consumer, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int | None]:
        """The committed offsets of the group. A partition without a commit gets one, at the start of its log.

        Otherwise the unfinished messages of an owner that dies before its first commit could be skipped. A position
        that cannot be known is None: the first message of the partition sets it then.
        """
        positions: dict[TopicPartition, int | None] = dict.fromkeys(partitions)
        for attempt in range(_POSITION_TRIES if partitions else 0):
            try:
                committed = client.committed([KafkaPartition(*tp) for tp in partitions], timeout=self._timeout_s)
                fresh = [KafkaPartition(tp.topic, tp.partition, OFFSET_BEGINNING) for tp in committed if tp.offset < 0]
                starts = client.offsets_for_times(fresh, timeout=self._timeout_s) if fresh else []
            except KafkaException as error:
                self._note_error(error.args[0])
                if error.args[0].code() not in _NO_LEADER_YET:
                    break
                time.sleep(_POSITION_RETRY_S * attempt)
                continue
            positions.update(_offsets(committed))
            if starts:
                positions.update(_offsets(starts))
                client.commit(offsets=_to_kafka(_offsets(starts)), asynchronous=True)
            break
        return positions

    def _adopt_finished(
        self,
        client: Consumer,
        predecessor: Mapping[TopicPartition, Progress],
        positions: Mapping[TopicPartition, int | None],
    ) -> None:
        """Marks messages as finished that the predecessor finished and did not commit, if its offsets are plausible."""
        ahead = {
            tp: (position, progress)
            for tp, progress in predecessor.items()
            if (position := positions.get(tp)) is not None and progress.finished > position
        }
        if not ahead:
            return
        try:
            found = client.offsets_for_times([KafkaPartition(*tp, OFFSET_END) for tp in ahead], timeout=self._timeout_s)
        except KafkaException as error:
            # The loop then repeats about a second of work.
            self._note_error(error.args[0])
            return
        ends = _offsets(found)
        finished = {
            tp: progress
            for tp, (position, progress) in ahead.items()
            if is_plausible(progress, position, ends.get(tp, -1))
        }
        self.tracker.assume_finished(finished)
        adopted = sum(progress.finished - ahead[tp][0] for tp, progress in finished.items())
        _TAKEN_UP.labels(self._name).inc(adopted)
        self._log.info(
            "took over the predecessor's finished offsets",
            offsets=adopted,
            implausible_partitions=len(ahead) - len(finished),
        )


def _to_kafka(offsets: Mapping[TopicPartition, int]) -> list[KafkaPartition]:
    return [KafkaPartition(*tp, offset) for tp, offset in offsets.items()]


def _offsets(partitions: Iterable[KafkaPartition]) -> dict[TopicPartition, int]:
    """The known offsets, without errors and logical offsets."""
    return {
        TopicPartition(tp.topic, tp.partition): tp.offset for tp in partitions if tp.error is None and tp.offset >= 0
    }
