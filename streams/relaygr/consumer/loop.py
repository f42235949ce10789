"""The worker's consumer loop: one thread owns the Kafka consumer.

Contract:

* `start()` subscribes and starts the poll thread. That thread makes all calls of the `Handler`, so they must not
  block: they queue work for other threads, or do it at once if it is short.
* The loop hands over each message once (`on_message`), with a `token`, and calls `on_batch` after those of one poll.
  While the handler has work left for this thread, the loop polls without a wait and calls `on_batch` each time.
  When the work is done, with any outcome, any thread calls `finish(token)`. The loop gives the contiguous watermark of
  finished offsets (`relaygr.consumer.watermark`) to the client's auto-commit a few times a second.
* In a rebalance the loop commits the watermark before the partitions are revoked, and keeps their state. If a
  partition is assigned again, messages that are in flight or finished here are skipped. Work for lost partitions may
  go on, but never changes an offset. A message that is unfinished when the process dies is delivered again to the
  next owner of its partition.
* If a `FinishedLog` is given, the loop also writes finished offsets there. At the first assignment it treats the
  offsets of the predecessor as finished, if they are plausible (`relaygr.consumer.finished`).
* `on_assigned` gets all owned partitions and the `assignment_epoch`, which counts this process's assignments. In a
  group whose rebalances are incremental (`is_incremental`), the loop also calls it after a revocation: the group takes
  only the partitions that move, and another assignment need not follow.
  `status()` shows an assignment once `on_assigned` has returned: a worker whose handler does not have its partitions
  yet is not ready. Partitions that are not owned on all topics alike (an owner split) are counted and logged.
* Any thread may call `pause` and `resume`. They take effect within `poll_timeout_ms` and persist over rebalances.
  The loop itself pauses a partition whose span reaches `max_span`, until half of the span is finished.
* `stop(drain_s)` stops reading, waits for the work in flight, commits and closes. `join` waits for the end. If a
  broker hangs, closing hangs too: call `join` with a time-out and then exit; the poll thread is a daemon.
* The loop ends without a call of `stop` in two states. FENCED: another process took over the `group.instance.id`;
  this process must exit at once, with an exit code on which it is not restarted. FAILED: a topic stays unknown, a
  permission is missing, or the handler raised; `error` has the reason. A handler must write a bad message to dead
  letters and finish it. An exception of the handler is a bug, and continuing would lose the message or block its
  partition.
* An unreachable broker does not end the loop; `status().broker_reachable` is false until it is back. If the outage is
  longer than the session time-out, the membership is lost, and the loop joins again, with a new consumer if necessary.
  The same happens after this process was suspended. Before it joins, the loop checks `membership`: if this process may
  not own partitions any more, or if its static id has another member id in the group, the loop ends as FENCED. After
  a shorter suspension the loop makes the same check before it hands over a message or commits.

Calls of a confluent consumer from other threads block for seconds, so other threads put commands into a queue that
the poll thread reads between polls.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import structlog
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaPartition
from prometheus_client import Counter, Gauge

from relaygr.consumer.finished import FinishedLog, is_plausible
from relaygr.consumer.interface import Handler, LoopState, LoopStatus, Membership, Received, Token
from relaygr.consumer.settings import ConsumerSettings
from relaygr.consumer.watermark import Begin, Progress, TopicPartition, WatermarkTracker, split_partitions
from relaygr.kafka.client_errors import GROUP_REFUSALS, ErrorCallback, cause_of
from relaygr.kafka.message_headers import headers_of
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError

T = TypeVar("T")

ConsumerFactory = Callable[[ErrorCallback], Consumer]

_UNKNOWN_TOPIC: Final = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC))
# `ClientErrors` logs these; the other brokers may answer.
_OF_ONE_BROKER: Final = frozenset((KafkaError._TRANSPORT, KafkaError._RESOLVE))
_REFUSED: Final = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "give this user the right to read the topics",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "give this user the right to read as this group",
    **GROUP_REFUSALS,
}
_PROBE_INTERVAL_US: Final = 1_000_000
# While the broker is away the poll thread has nothing to read, and may wait this long for metadata.
# The broker answers after the fetch that is under way (`asking_fetch_wait_ms`).
_PROBE_TIMEOUT_S: Final = 0.15
_LOG_INTERVAL_US: Final = 10_000_000
# A new topic has partitions without a leader for some milliseconds.
_NO_LEADER_YET: Final = frozenset((KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE))
# A running member learns from its heartbeats that it was replaced. A process that was suspended for longer must check.
_ABSENCE_US: Final = 1_000_000
# A client that wakes up from a suspension learns within this time that its session has expired.
_AFTER_ABSENCE_US: Final = 10_000_000
_POSITION_TRIES: Final = 3
_POSITION_RETRY_S: Final = 0.05
# The text of UNRELEASED_INSTANCE_ID: the client reports only that the error is fatal.
_ID_IN_USE: Final = "still used by another member"
_ID_RETRY_S: Final = 0.2
_REPLACED: Final = "Another process took over this group.instance.id. This process must exit and must not be restarted"
_ALIVE: Final = frozenset((LoopState.RUNNING, LoopState.DRAINING))


# Metrics. `loop` is the name of the loop.
_MESSAGES = Counter("relaygr_consumer_messages_total", "Messages handed to the handler", ["loop", "topic"])
_SKIPPED = Counter(
    "relaygr_consumer_redelivered_skipped_total",
    "Messages delivered again and skipped, because they are in flight or finished in this process",
    ["loop", "state"],
)
_TAKEN_UP = Counter(
    "relaygr_consumer_taken_up_total",
    "Messages that the previous process finished without committing them, so that this process skips them",
    ["loop"],
)
_ERRORS = Counter("relaygr_consumer_errors_total", "Errors reported by the Kafka consumer", ["loop", "error"])
_COMMITS = Counter("relaygr_consumer_commits_total", "Updates of the offsets that the client commits", ["loop", "kind"])
_REJOINS = Counter(
    "relaygr_consumer_rejoins_total", "New consumers created to join the group again after an outage", ["loop"]
)
_IN_FLIGHT = Gauge("relaygr_consumer_in_flight_messages", "Messages read and not finished", ["loop"])
_PAUSED = Gauge("relaygr_consumer_paused_partitions", "Partitions paused now", ["loop"])
_OWNED = Gauge("relaygr_consumer_owned_partitions", "Partition numbers owned, counted once for all topics", ["loop"])
_EPOCH = Gauge("relaygr_consumer_assignment_epoch", "Number of assignments that this process has received", ["loop"])
_OWNER_SPLIT = Gauge(
    "relaygr_consumer_owner_split_partitions", "Partition numbers owned on some topics, but not on all", ["loop"]
)
_BROKER_REACHABLE = Gauge("relaygr_consumer_broker_reachable", "1 while the Kafka cluster answers", ["loop"])
_STALLED = Gauge("relaygr_consumer_stalled", "1 while unread messages of owned partitions do not arrive", ["loop"])


class ConsumerLoop:
    """See the module docstring. `topics` are co-partitioned: one member must own the same partitions of all of them."""

    def __init__(
        self,
        consumer_factory: ConsumerFactory,
        topics: Sequence[str],
        handler: Handler,
        clock: Clock | None = None,
        settings: ConsumerSettings | None = None,
        name: str = "workers",
        on_end: Callable[[LoopState], None] | None = None,
        finished_log: FinishedLog | None = None,
        membership: Membership | None = None,
        is_incremental: bool = False,
    ) -> None:
        self._factory = consumer_factory
        self._is_incremental = is_incremental
        self._membership = membership or Membership()
        self._finished_log = finished_log
        self._topics = tuple(topics)
        self._handler = handler
        self._clock = clock or SystemClock()
        self._settings = settings or ConsumerSettings()
        self._name = name
        self._on_end = on_end
        self._log = structlog.get_logger().bind(loop=name)
        self._tracker = WatermarkTracker(self._settings.max_span)
        self._finished: deque[Token] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"poll-{name}", daemon=True)
        self._consumer: Consumer | None = None
        self._member_id: str | None = None

        self._state = LoopState.NEW
        self._error: BaseException | None = None
        self._assigned = False
        self._may_rejoin = self._rejoin_needs_answer = False
        self._partitions: frozenset[int] = frozenset()
        self._owner_split: frozenset[int] = frozenset()
        self._epoch = 0
        self._broker_reachable = True
        self._stalled = False
        self._in_flight = 0

        self._asked: set[TopicPartition] = set()
        self._full: set[TopicPartition] = set()
        self._paused: set[TopicPartition] = set()

        self._received: Tally[str] = Tally()
        self._messages = {topic: _MESSAGES.labels(name, topic) for topic in topics}
        self._has_work = False
        self._last_poll_us = self._tick_at_us = self._store_at_us = self._probe_at_us = 0
        self._absent_us = -_AFTER_ABSENCE_US
        self._message_at_us = self._drain_until_us = 0
        self._missing_topic: str | None = None
        self._missing_since_us = 0
        self._logged_at_us: dict[int, int] = {}

    # Called before `start`, by one thread.

    def connect(self, timeout_s: float) -> None:
        """Creates the client and opens its connections, the one to the group's coordinator included, without joining.

        A later `start` then owns its partitions within milliseconds. Until `start`, call this method again from time
        to time: it serves the client's callbacks and keeps brokers from closing idle connections. An unreachable broker
        is not an error here. Raises the errors of the factory.
        """
        if self._consumer is None:
            self._consumer = self._factory(self._on_client_error)
        try:
            self._consumer.poll(0)
            for topic in self._topics:
                self._consumer.list_topics(topic, timeout=timeout_s)
            self._consumer.committed([KafkaPartition(topic, 0) for topic in self._topics], timeout=timeout_s)
            self._broker_is(True)
        except KafkaException as error:
            self._count_error(error.args[0])

    def start(self) -> None:
        """Subscribes, and starts the poll thread. Raises the errors of the factory."""
        self._subscribe()
        self._last_poll_us = self._message_at_us = self._clock.monotonic_us()
        self._state = LoopState.RUNNING
        _BROKER_REACHABLE.labels(self._name).set(int(self._broker_reachable))
        _PAUSED.labels(self._name).set(0)
        self._thread.start()

    # Called by any thread.

    def finish(self, token: Token) -> None:
        """Marks the work of a message as done: its offset may be committed. Never blocks."""
        self._finished.append(token)

    def pause(self, topic: str, partitions: Iterable[int]) -> None:
        """Stops the delivery of these partitions until `resume`."""
        asked = {TopicPartition(topic, partition) for partition in partitions}
        self._commands.append(lambda: self._asked.update(asked))

    def resume(self, topic: str, partitions: Iterable[int]) -> None:
        """Undoes `pause`."""
        asked = {TopicPartition(topic, partition) for partition in partitions}
        self._commands.append(lambda: self._asked.difference_update(asked))

    def stop(self, drain_s: float) -> None:
        """Stops reading, waits at most `drain_s` for the work in flight, commits and closes. Returns at once."""
        self._commands.append(lambda: self._drain(drain_s))

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the end of the poll thread. Returns whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """Why the loop is FENCED or FAILED; a RelayError if the user can fix it."""
        return self._error

    def status(self) -> LoopStatus:
        """The state at the last tick."""
        return LoopStatus(
            state=self._state,
            assigned=self._assigned,
            partitions=self._partitions,
            assignment_epoch=self._epoch,
            last_poll_us=self._last_poll_us,
            broker_reachable=self._broker_reachable,
            stalled=self._stalled,
            in_flight=self._in_flight,
            paused=len(self._paused),
            owner_split=self._owner_split,
        )

    # Called by the poll thread.

    def _subscribe(self) -> None:
        if self._consumer is None:
            self._consumer = self._factory(self._on_client_error)
        self._consumer.subscribe(
            list(self._topics), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    @property
    def _client(self) -> Consumer:
        assert self._consumer is not None
        return self._consumer

    def _run(self) -> None:
        try:
            while self._state in _ALIVE:
                self._step()
        except BaseException as error:
            self._fail(LoopState.FAILED, error)
            self._log.exception("consumer loop failed")
        if self._state is LoopState.FENCED:
            # The process must exit at once, so `on_end` is called before the consumer is closed.
            self._tell_end()
            self._close()
        else:
            self._close()
            self._tell_end()

    def _tell_end(self) -> None:
        if self._on_end is not None:
            self._on_end(self._state)

    def _step(self) -> None:
        message = self._call(self._client.poll, 0 if self._has_work else self._settings.poll_timeout_ms / 1000)
        if self._was_absent():
            self._absent_us = self._clock.monotonic_us()
            if self._is_replaced():
                self._fail(LoopState.FENCED, RelayError(_REPLACED))
        if self._state not in _ALIVE:
            return
        if message is not None:
            self._receive(message)
            # poll() returns at the first message. consume() would wait for its whole time-out, but takes all messages
            # that are there with one release of the interpreter lock.
            for another in self._call(self._client.consume, self._settings.batch_messages - 1, 0) or ():
                self._receive(another)
        if message is not None or self._has_work:
            self._has_work = self._handler.on_batch()
        self._take_finished()
        while self._commands:
            self._commands.popleft()()
        now_us = self._last_poll_us = self._clock.monotonic_us()
        if now_us >= self._tick_at_us and self._state in _ALIVE:
            self._tick_at_us = now_us + self._settings.tick_interval_ms * 1000
            self._tick(now_us)

    def _call(self, call: Callable[..., T], *arguments: float) -> T | None:
        """The result of a call of the client; None after an error. No call of the handler goes through here."""
        try:
            return call(*arguments)
        except KafkaException as error:
            self._on_error(error.args[0])
            return None

    def _receive(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            self._on_error(error)
            return
        if self._state is not LoopState.RUNNING:
            # The tracker does not begin the message, so it is never committed, and the next owner reads it.
            return
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None and partition is not None and offset is not None
        tp = TopicPartition(topic, partition)
        begin = self._tracker.begin(tp, offset)
        if begin is not Begin.NEW:
            _SKIPPED.labels(self._name, begin.value).inc()
            return
        if self._tracker.is_full(tp):
            self._full.add(tp)
        now_us = self._message_at_us = self._clock.monotonic_us()
        self._received[topic] += 1
        self._handler.on_message(
            Received(
                topic=topic,
                partition=partition,
                offset=offset,
                key=_as_bytes(message.key()),
                value=_as_bytes(message.value()),
                headers=headers_of(message),
                received_us=now_us,
                assignment_epoch=self._epoch,
                token=Token(topic, partition, offset, self._tracker.generation(tp)),
                message=message,
            )
        )

    def _tick(self, now_us: int) -> None:
        self._handler.on_tick(now_us)
        # A tick polls producers, and delivery reports finish messages.
        self._take_finished()
        self._full = {tp for tp in self._full if self._tracker.span(tp) * 2 > self._settings.max_span}
        self._apply_pauses()
        if self._received:
            self._broker_is(True)
            for topic, count in self._received.items():
                self._messages[topic].inc(count)
            self._received.clear()
        if now_us >= self._store_at_us:
            self._store_at_us = now_us + self._settings.store_interval_ms * 1000
            self._store()
            self._in_flight = self._tracker.in_flight()
            _IN_FLIGHT.labels(self._name).set(self._in_flight)
            self._watch(now_us)
        if self._state is LoopState.DRAINING and (self._tracker.in_flight() == 0 or now_us >= self._drain_until_us):
            self._state = LoopState.STOPPED

    def _drain(self, drain_s: float) -> None:
        if self._state is LoopState.RUNNING:
            self._state = LoopState.DRAINING
            self._drain_until_us = self._clock.monotonic_us() + int(drain_s * 1e6)

    def _close(self) -> None:
        """Stores the watermark and closes the consumer. Takes long only if the broker hangs."""
        try:
            self._store()
            self._client.close()
        except (KafkaException, RuntimeError) as error:
            self._log.warning("consumer did not close cleanly", error=str(error))
        self._assigned = False
        self._log.info("consumer loop ended", state=self._state.value, unfinished=self._tracker.in_flight())

    # Offsets.

    def _take_finished(self) -> None:
        moved = set()
        while self._finished:
            token = self._finished.popleft()
            tp = TopicPartition(token.topic, token.partition)
            self._tracker.finish(tp, token.offset, token.generation)
            moved.add(tp)
        if moved and self._finished_log is not None and self._state is not LoopState.FENCED:
            self._finished_log.note(self._tracker.progress(moved))

    def _store(self) -> None:
        """Gives the watermark to the client, which commits it once a second and before partitions are revoked.

        The client commits in the background, so a broker that hangs never blocks this thread. A commit made here could
        be followed by the client's commit of an older stored offset. A fenced consumer commits nothing, because
        another process owns the id and its offsets.
        """
        offsets = self._tracker.committable() if self._state is not LoopState.FENCED else {}
        if not offsets:
            return
        try:
            self._client.store_offsets(offsets=_to_kafka(offsets))
        except KafkaException as error:
            self._count_error(error.args[0])
            return
        self._tracker.committed(offsets)
        _COMMITS.labels(self._name, "stored").inc()

    # Rebalances: called by the client inside poll() and consume(), on the poll thread.

    def _on_assign(self, consumer: Consumer, partitions: list[KafkaPartition]) -> None:
        self._handler.on_rebalance()
        was_absent = self._was_absent()
        positions = self._positions(consumer, partitions)
        self._tracker.assign(positions)
        if self._finished_log is not None:
            if self._epoch == 0:
                self._adopt_finished(consumer, self._finished_log.predecessor(), positions)
            self._finished_log.note(self._tracker.progress(positions))
        self._member_id = consumer.memberid()
        self._may_rejoin = False
        self._stall_is(False)
        self._message_at_us = self._clock.monotonic_us()
        self._pauses_are(self._paused.difference(_from_kafka(partitions)))  # Newly assigned partitions are not paused.
        if self._missing_topic in {tp.topic for tp in self._tracker.owned()}:
            self._missing_topic = None
        self._begin_epoch()
        self._assigned = True
        if self._owner_split:
            self._log.error(
                "owner split: these partitions are owned on some topics only, so the jobs and requests of a user go to "
                "different workers; every member must subscribe to the same topics, with equal partition counts and "
                "the same `affinity`",
                partitions=sorted(self._owner_split)[:20],
            )
        self._log.info("assigned", partitions=len(self._partitions), assignment_epoch=self._epoch)
        if not was_absent:
            # The requests above may take seconds while a coordinator is away, and are no suspension.
            self._last_poll_us = self._clock.monotonic_us()

    def _on_revoke(self, _consumer: Consumer, partitions: list[KafkaPartition]) -> None:
        self._handler.on_rebalance()
        gone = _from_kafka(partitions)
        self._take_finished()
        self._store()
        self._let_go(gone)
        self._pauses_are(self._paused.difference(gone))
        self._log.info("revoked", partitions=len(partitions))
        self._handler.on_revoked(frozenset(tp.partition for tp in gone))
        if self._is_incremental and self._state in _ALIVE:
            self._begin_epoch()
        else:
            self._note_ownership()

    def _on_lost(self, consumer: Consumer, partitions: list[KafkaPartition]) -> None:
        self._handler.on_rebalance()
        gone = _from_kafka(partitions)
        self._let_go(gone)
        self._pauses_are(self._paused.difference(gone))
        # The coordinator was away, perhaps alone of all brokers; or this process was suspended.
        suspended = self._was_absent() or self._clock.monotonic_us() - self._absent_us < _AFTER_ABSENCE_US
        self._rejoin_needs_answer = suspended and self._broker_reachable
        self._may_rejoin = True
        self._assigned = False
        self._note_ownership()
        self._log.warning("lost the assignment: the membership expired", partitions=len(partitions))
        self._handler.on_lost(frozenset(tp.partition for tp in gone))
        if self._is_replaced():
            self._fail(LoopState.FENCED, RelayError(_REPLACED))
            # Without this call the client would join again without its member id, and take the static id from the
            # new holder. A client that the broker has fenced raises here.
            with contextlib.suppress(KafkaException, KafkaError):  # type: ignore[arg-type]  # It raises the latter bare.
                consumer.unsubscribe()

    def _positions(self, consumer: Consumer, partitions: list[KafkaPartition]) -> dict[TopicPartition, int | None]:
        """The committed offsets of the group. A partition without a commit gets one, at the start of its log.

        Otherwise the unfinished messages of an owner that dies before its first commit could be skipped.
        """
        positions: dict[TopicPartition, int | None] = dict.fromkeys(_from_kafka(partitions))
        for attempt in range(_POSITION_TRIES if partitions else 0):
            try:
                committed = consumer.committed(partitions, timeout=self._settings.request_timeout_s)
                fresh = [KafkaPartition(tp.topic, tp.partition, OFFSET_BEGINNING) for tp in committed if tp.offset < 0]
                starts = consumer.offsets_for_times(fresh, timeout=self._settings.request_timeout_s) if fresh else []
            except KafkaException as error:
                self._count_error(error.args[0])
                if error.args[0].code() not in _NO_LEADER_YET:
                    break  # The first message of each partition sets the position then.
                time.sleep(_POSITION_RETRY_S * attempt)
                continue
            positions.update(_offsets(committed))
            if starts:
                positions.update(_offsets(starts))
                consumer.commit(offsets=_to_kafka(_offsets(starts)), asynchronous=True)
                _COMMITS.labels(self._name, "start").inc()
            break
        return positions

    def _adopt_finished(
        self,
        consumer: Consumer,
        predecessor: Mapping[TopicPartition, Progress],
        positions: Mapping[TopicPartition, int | None],
    ) -> None:
        """Marks messages as finished that the predecessor finished and did not commit, if its offsets are plausible."""
        ahead = {
            tp: progress
            for tp, progress in predecessor.items()
            if (position := positions.get(tp)) is not None and progress.finished > position
        }
        if not ahead:
            return
        try:
            found = consumer.offsets_for_times(
                [KafkaPartition(*tp, OFFSET_END) for tp in ahead], timeout=self._settings.request_timeout_s
            )
        except KafkaException as error:
            # The loop then repeats about a second of work.
            self._count_error(error.args[0])
            return
        ends = _offsets(found)
        finished = {
            tp: progress.finished
            for tp, progress in ahead.items()
            if (position := positions[tp]) is not None and is_plausible(progress, position, ends.get(tp, -1))
        }
        self._tracker.assume_finished(finished)
        adopted = sum(offset - (positions[tp] or 0) for tp, offset in finished.items())
        _TAKEN_UP.labels(self._name).inc(adopted)
        self._log.info(
            "took over the predecessor's finished offsets",
            messages=adopted,
            implausible_partitions=len(ahead) - len(finished),
        )

    def _begin_epoch(self) -> None:
        """The process owns other partitions than before."""
        # The handler comes first: a thread that reads the new ownership from `status()` may rely on the handler.
        self._handler.on_assigned(frozenset(tp.partition for tp in self._tracker.owned()), self._epoch + 1)
        self._epoch += 1
        self._note_ownership()

    def _let_go(self, gone: list[TopicPartition]) -> None:
        self._tracker.revoke(gone)
        if self._finished_log is not None:
            self._finished_log.forget(gone)

    def _note_ownership(self) -> None:
        owned = self._tracker.owned()
        self._partitions = frozenset(tp.partition for tp in owned)
        self._owner_split = split_partitions(owned, self._topics) if owned else frozenset()
        _EPOCH.labels(self._name).set(self._epoch)
        _OWNED.labels(self._name).set(len(self._partitions))
        _OWNER_SPLIT.labels(self._name).set(len(self._owner_split))

    # Pauses.

    def _apply_pauses(self) -> None:
        wanted = self._asked | self._full
        if wanted == self._paused and self._state is LoopState.RUNNING:
            return
        owned = self._tracker.owned()
        wanted = set(owned) if self._state is not LoopState.RUNNING else wanted & owned
        try:
            if pause := wanted - self._paused:
                self._client.pause([KafkaPartition(*tp) for tp in pause])
            if resume := self._paused - wanted:
                self._client.resume([KafkaPartition(*tp) for tp in resume])
        except KafkaException as error:
            # A rebalance is in progress. The next tick tries again with the new assignment.
            self._count_error(error.args[0])
            return
        self._pauses_are(wanted)

    def _pauses_are(self, paused: set[TopicPartition]) -> None:
        self._paused = paused
        _PAUSED.labels(self._name).set(len(paused))

    # Errors.

    def _on_client_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._broker_is(False)
        elif error.code() not in _OF_ONE_BROKER:
            self._count_error(error)

    def _on_error(self, error: KafkaError) -> None:
        code = error.code()
        if code == KafkaError._FATAL or error.fatal() or code == KafkaError.FENCED_INSTANCE_ID:
            self._on_fatal(error)
        elif code in _UNKNOWN_TOPIC:
            if self._missing_topic is None:
                self._missing_since_us = self._clock.monotonic_us()
                self._missing_topic = next((topic for topic in self._topics if topic in error.str()), self._topics[0])
            self._count_error(error)
        elif code in _REFUSED:
            self._fail(LoopState.FAILED, RelayError(f"Kafka refuses the consumer: {cause_of(error)}. {_REFUSED[code]}"))
        elif code == KafkaError._ALL_BROKERS_DOWN:
            self._broker_is(False)
        else:
            self._count_error(error)

    def _on_fatal(self, error: KafkaError) -> None:
        if "fenced" in error.str().lower() or error.code() == KafkaError.FENCED_INSTANCE_ID:
            if self._may_rejoin and self._fenced_itself():
                self._rejoin()
                return
            self._fail(LoopState.FENCED, RelayError(_REPLACED))
        elif _ID_IN_USE in error.str():
            self._join_later()
        else:
            self._fail(LoopState.FAILED, RelayError(f"The consumer cannot continue: {cause_of(error)}"))

    def _was_absent(self) -> bool:
        """Whether the poll thread was suspended for so long that this process may have lost its partitions."""
        return self._assigned and self._clock.monotonic_us() - self._last_poll_us > _ABSENCE_US

    def _is_replaced(self) -> bool:
        """Whether another process has the right to own partitions, or the static id in the group."""
        if not self._membership.may_own():
            return True
        holder = self._membership.holder() if self._member_id is not None else None
        return holder is not None and holder != self._member_id

    def _fenced_itself(self) -> bool:
        """Whether no other process has the static id. After a suspension this must be known for sure."""
        if not self._membership.may_own():
            return False
        holder = self._membership.holder()
        return holder == self._member_id or (holder is None and not self._rejoin_needs_answer)

    def _rejoin(self) -> None:
        """Joins again with a new consumer, after the old one was fenced by its own late commit.

        This happens when the coordinator was away for longer than a session: the client sends a pending commit without
        the member id, which it dropped with the membership, and the broker treats the commit as that of another holder.
        The client is unusable then. Allowed once until the next assignment: a second fencing comes from another
        process.
        """
        self._may_rejoin = False
        self._log.warning("fenced by its own late commit: joins again with a new consumer")
        _REJOINS.labels(self._name).inc()
        self._client.close()
        self._consumer = None
        self._subscribe()

    def _join_later(self) -> None:
        """Joins with a new consumer after a pause.

        `group.protocol=consumer` refuses a static id until the session of its holder has ended, also if the holder is
        dead, and the client that was refused is unusable.
        """
        now_us = self._clock.monotonic_us()
        if now_us - self._logged_at_us.get(KafkaError.UNRELEASED_INSTANCE_ID, -_LOG_INTERVAL_US) >= _LOG_INTERVAL_US:
            self._logged_at_us[KafkaError.UNRELEASED_INSTANCE_ID] = now_us
            self._log.warning(
                "the group has another member with this group.instance.id: waits for the end of its session"
            )
        self._client.close()
        self._consumer = None
        time.sleep(_ID_RETRY_S)
        self._subscribe()

    def _fail(self, state: LoopState, error: BaseException) -> None:
        self._state = state
        self._error = error
        self._log.error("consumer loop ends", state=state.value, error=str(error))

    def _count_error(self, error: KafkaError) -> None:
        _ERRORS.labels(self._name, error.name()).inc()
        now_us = self._clock.monotonic_us()
        if now_us - self._logged_at_us.get(error.code(), -_LOG_INTERVAL_US) >= _LOG_INTERVAL_US:
            self._logged_at_us[error.code()] = now_us
            self._log.warning("consumer error", error=error.name(), cause=cause_of(error))

    def _broker_is(self, reachable: bool) -> None:
        if reachable != self._broker_reachable:
            self._broker_reachable = reachable
            _BROKER_REACHABLE.labels(self._name).set(int(reachable))
            self._log.warning("broker is back" if reachable else "broker is away")

    # Watches.

    def _watch(self, now_us: int) -> None:
        if (
            self._missing_topic is not None
            and now_us - self._missing_since_us >= self._settings.missing_topic_grace_s * 1e6
        ):
            sentence = f"Topic {self._missing_topic} does not exist. Create it: relaygr topics create"
            self._fail(LoopState.FAILED, RelayError(sentence))
            return
        if now_us < self._probe_at_us:
            return
        self._probe_at_us = now_us + _PROBE_INTERVAL_US
        if not self._broker_reachable:
            self._probe()
        elif self._assigned and now_us - self._message_at_us >= self._settings.stall_s * 1e6:
            self._probe_at_us = now_us + int(self._settings.stall_s * 1e6)
            self._look_for_unread()
        elif self._stalled:
            self._stall_is(False)

    def _probe(self) -> None:
        try:
            self._client.list_topics(self._topics[0], timeout=_PROBE_TIMEOUT_S)
        except KafkaException:
            return
        self._broker_is(True)

    def _look_for_unread(self) -> None:
        """Checks whether there are unread messages. A fenced consumer raises no error; its polls just return None."""
        readable = [KafkaPartition(*tp, OFFSET_END) for tp in self._tracker.owned() - self._paused]
        if not readable:
            # A rebalance may have taken the partitions that stalled, without another assignment.
            self._stall_is(False)
            return
        try:
            ends = _offsets(self._client.offsets_for_times(readable, timeout=_PROBE_TIMEOUT_S))
        except KafkaException as error:
            if error.args[0].code() == KafkaError._FATAL:
                self._on_fatal(error.args[0])
            else:
                self._count_error(error.args[0])
            return
        unread = sum(max(0, end - self._tracker.next_offset(tp)) for tp, end in ends.items())
        self._stall_is(unread > 0)
        if unread:
            self._log.error("unread messages are not delivered", unread=unread, quiet_s=self._settings.stall_s)

    def _stall_is(self, stalled: bool) -> None:
        self._stalled = stalled
        _STALLED.labels(self._name).set(int(stalled))


def _as_bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _to_kafka(offsets: Mapping[TopicPartition, int]) -> list[KafkaPartition]:
    return [KafkaPartition(tp.topic, tp.partition, offset) for tp, offset in offsets.items()]


def _from_kafka(partitions: Iterable[KafkaPartition]) -> list[TopicPartition]:
    return [TopicPartition(tp.topic, tp.partition) for tp in partitions]


def _offsets(partitions: Iterable[KafkaPartition]) -> dict[TopicPartition, int]:
    """The known offsets, without errors and logical offsets."""
    return {
        TopicPartition(tp.topic, tp.partition): tp.offset for tp in partitions if tp.error is None and tp.offset >= 0
    }
