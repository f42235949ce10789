"""The worker's consumer loop: one thread owns the Kafka consumer. docs/consumer.md describes its design.

* `start` subscribes and starts the poll thread, which makes all calls of the `Handler`; they must not block.
* The handler gets each message once, with a `token`. When its work is done, with any outcome, any thread calls
  `finish(token)`. A message that is unfinished when the process dies is delivered again to the next owner.
* `on_assigned` gets all owned partitions and the `assignment_epoch`, which counts this process's assignments.
  `status()` shows an assignment once `on_assigned` has returned.
* `pause`, `resume`, `read_anew` and `stop` may be called by any thread, and take effect within `POLL_WAIT_S`.
  `stop` waits for the work in flight, commits and closes. If a broker hangs, closing hangs too: call `join` with a
  time-out and then exit; the poll thread is a daemon.
* The loop ends by itself as FENCED (another process has the `group.instance.id`: exit at once, without a restart) or
  FAILED (`error` has the reason). An exception of the handler is a bug and ends the loop, since continuing would lose
  the message. An unreachable broker does not end it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, TypeVar

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaPartition
from prometheus_client import Counter, Gauge

from relaygr.consumer.finished import FinishedLog
from relaygr.consumer.health import Health
from relaygr.consumer.interface import Handler, LoopState, LoopStatus, Membership, Received, Token
from relaygr.consumer.membership import Member
from relaygr.consumer.offsets import Offsets
from relaygr.consumer.pauses import Pauses
from relaygr.consumer.settings import ConsumerSettings
from relaygr.consumer.watermark import Begin, TopicPartition, split_partitions
from relaygr.kafka.client_errors import GROUP_REFUSALS, ErrorCallback, LimitedLog, cause_of
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
# The text of UNRELEASED_INSTANCE_ID: the client reports only that the error is fatal.
_ID_IN_USE: Final = "still used by another member"
_ID_RETRY_S: Final = 0.2
POLL_WAIT_S: Final = 0.01
"""The longest wait for a message."""
TICK_INTERVAL_US: Final = 5_000
STORE_INTERVAL_US: Final = 100_000
"""Time between two updates of the offsets that the client commits."""
_BATCH_MESSAGES: Final = 64
"""The most messages that are read before commands are handled."""
_REPLACED: Final = "Another process took over this group.instance.id. This process must exit and must not be restarted"
_ALIVE: Final = frozenset((LoopState.RUNNING, LoopState.DRAINING))


# Metrics. `loop` is the name of the loop.
_MESSAGES = Counter("relaygr_consumer_messages_total", "Messages handed to the handler", ["loop", "topic"])
_IN_FLIGHT = Gauge("relaygr_consumer_in_flight_messages", "Messages read and not finished", ["loop"])
_OWNED = Gauge("relaygr_consumer_owned_partitions", "Partition numbers owned, counted once for all topics", ["loop"])


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
        """`is_incremental`: a rebalance of the group takes only the partitions that move, and another assignment need
        not follow. Then `on_assigned` is also called after a revocation.
        """
        self._topics = tuple(topics)
        self._handler = handler
        self._clock = clock or SystemClock()
        self._settings = settings or ConsumerSettings()
        self._name = name
        self._on_end = on_end
        self._is_incremental = is_incremental
        self._log = structlog.get_logger().bind(loop=name)
        self._limited_log = LimitedLog(self._clock)
        self._member = Member(
            name,
            self._clock,
            membership or Membership(),
            make_client=lambda: consumer_factory(self._on_client_error),
            subscribe=self._subscribe,
        )
        self._offsets = Offsets(name, self._settings, finished_log, self._note_error)
        self._tracker = self._offsets.tracker
        self._health = Health(name, self._settings, self._clock, self._topics[0])
        self._pauses = Pauses(name, self._tracker, self._settings.max_span)
        # Calls of a confluent consumer from other threads block for seconds, so the poll thread makes them all.
        self._commands: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"poll-{name}", daemon=True)

        self._state = LoopState.NEW
        self._error: BaseException | None = None
        self._partitions: frozenset[int] = frozenset()
        self._owner_split: frozenset[int] = frozenset()
        self._epoch = 0
        self._in_flight = 0

        self._received: Tally[str] = Tally()
        self._messages = {topic: _MESSAGES.labels(name, topic) for topic in topics}
        self._has_work = False
        self._tick_at_us = self._store_at_us = self._drain_until_us = 0

    # Called before `start`, by one thread.

    def connect(self, timeout_s: float) -> None:
        """Creates the client and opens its connections, the one to the group's coordinator included, without joining.

        A later `start` then owns its partitions within milliseconds. Until `start`, call this method again from time
        to time: it serves the client's callbacks and keeps brokers from closing idle connections. An unreachable broker
        is not an error here. Raises the errors of the factory.
        """
        client = self._member.connect()
        try:
            client.poll(0)
            for topic in self._topics:
                client.list_topics(topic, timeout=timeout_s)
            client.committed([KafkaPartition(topic, 0) for topic in self._topics], timeout=timeout_s)
            self._health.note_broker(True)
        except KafkaException as error:
            self._note_error(error.args[0])

    def start(self) -> None:
        """Subscribes, and starts the poll thread. Raises the errors of the factory."""
        self._member.join()
        self._health.start()
        self._state = LoopState.RUNNING
        self._pauses.show()
        self._thread.start()

    # Called by any thread.

    def finish(self, token: Token) -> None:
        """Marks the work of a message as done: its offset may be committed. Never blocks."""
        self._offsets.finish(token)

    def pause(self, topic: str, partitions: Iterable[int]) -> None:
        """Stops the delivery of these partitions until `resume`, also after rebalances."""
        asked = {TopicPartition(topic, partition) for partition in partitions}
        self._commands.append(lambda: self._pauses.asked.update(asked))

    def resume(self, topic: str, partitions: Iterable[int]) -> None:
        """Undoes `pause`."""
        asked = {TopicPartition(topic, partition) for partition in partitions}
        self._commands.append(lambda: self._pauses.asked.difference_update(asked))

    def read_anew(self, topics: Collection[str]) -> None:
        """Reads these topics from their beginning: they were deleted and created again."""
        self._commands.append(lambda: self._offsets.begin_anew(self._member.client, topics))

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
            assigned=self._member.is_assigned,
            partitions=self._partitions,
            assignment_epoch=self._epoch,
            last_poll_us=self._member.polled_us,
            broker_reachable=self._health.is_broker_reachable,
            stalled=self._health.is_stalled,
            in_flight=self._in_flight,
            paused=len(self._pauses.paused),
            owner_split=self._owner_split,
        )

    # The poll thread: turns and messages.

    def _subscribe(self, client: Consumer) -> None:
        client.subscribe(
            list(self._topics), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def _run(self) -> None:
        try:
            while self._state in _ALIVE:
                self._turn()
        except BaseException as error:
            self._fail(LoopState.FAILED, error)
            self._log.exception("consumer loop failed")
        if self._state is LoopState.FENCED:
            # The process must exit at once, so `on_end` is called before the consumer is closed.
            self._call_on_end()
            self._close()
        else:
            self._close()
            self._call_on_end()

    def _call_on_end(self) -> None:
        if self._on_end is not None:
            self._on_end(self._state)

    def _turn(self) -> None:
        message = self._poll(0 if self._has_work else POLL_WAIT_S)
        if self._member.was_suspended:
            self._member.note_suspension()
            if self._member.is_replaced():
                self._fail(LoopState.FENCED, RelayError(_REPLACED))
        if self._state not in _ALIVE:
            return
        if message is not None:
            self._receive(message)
            # poll() returns at the first message. consume() would wait for its whole time-out, but takes all messages
            # that are there with one release of the interpreter lock.
            if self._member.client is not None:
                count = _BATCH_MESSAGES - 1
                for another in self._call(self._member.client.consume, count, 0) or ():
                    self._receive(another)
        if self._has_work:
            self._has_work = self._handler.on_batch()
        self._offsets.take_finished()
        while self._commands:
            self._commands.popleft()()
        self._member.note_poll()
        now_us = self._member.polled_us
        if now_us >= self._tick_at_us and self._state in _ALIVE:
            self._tick_at_us = now_us + TICK_INTERVAL_US
            self._tick(now_us)

    def _poll(self, wait_s: float) -> Message | None:
        if self._member.has_client():
            assert self._member.client is not None
            return self._call(self._member.client.poll, wait_s)
        # Results and dead letters go on while a client is made.
        time.sleep(wait_s)
        return None

    def _call(self, call: Callable[..., T], *arguments: object) -> T | None:
        """The result of a call of the client; None after an error. No call of the handler goes through here."""
        try:
            return call(*arguments)
        except KafkaException as error:
            self._on_error(error.args[0])
            return None

    def _receive(self, message: Message) -> None:
        error = message.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            if error.code() in _UNKNOWN_TOPIC:
                self._tracker.suspect(message.topic() or "")
            self._on_error(error)
            return
        if self._state is not LoopState.RUNNING:
            # The tracker does not begin the message, so it is never committed, and the next owner reads it.
            return
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None and partition is not None and offset is not None
        tp = TopicPartition(topic, partition)
        if error is not None:
            self._tracker.reach_end(tp, offset)
            return
        epoch = message.leader_epoch()
        if self._tracker.begin(tp, offset, -1 if epoch is None else epoch, message.timestamp()[1]) is not Begin.NEW:
            return
        self._pauses.note_message(tp)
        self._health.note_message()
        self._received[topic] += 1
        self._has_work = True
        self._handler.on_message(
            Received(
                topic=topic,
                partition=partition,
                offset=offset,
                key=message.key(),
                value=message.value(),
                headers=headers_of(message),
                received_us=self._clock.monotonic_us(),
                assignment_epoch=self._epoch,
                token=Token(topic, partition, offset, self._tracker.generation(tp)),
                message=message,
            )
        )

    def _tick(self, now_us: int) -> None:
        self._handler.on_tick(now_us)
        # A tick polls producers, and delivery reports finish messages.
        self._offsets.take_finished()
        client = self._member.client
        if client is not None:
            try:
                self._pauses.apply(client, is_reading=self._state is LoopState.RUNNING)
            except KafkaException as error:
                # A rebalance is in progress. The next tick tries again with the new assignment.
                self._note_error(error.args[0])
        if self._received:
            self._health.note_broker(True)
            for topic, count in self._received.items():
                self._messages[topic].inc(count)
            self._received.clear()
        if now_us >= self._store_at_us:
            self._store_at_us = now_us + STORE_INTERVAL_US
            self._in_flight = self._tracker.in_flight()
            _IN_FLIGHT.labels(self._name).set(self._in_flight)
            if client is not None:
                self._offsets.store(client)
                self._check_health(client)
        if self._state is LoopState.DRAINING and (self._tracker.in_flight() == 0 or now_us >= self._drain_until_us):
            self._state = LoopState.STOPPED

    def _check_health(self, client: Consumer) -> None:
        if (missing := self._health.missing_topic()) is not None:
            sentence = f"Topic {missing} does not exist. Create it: relaygr topics create"
            self._fail(LoopState.FAILED, RelayError(sentence))
            return
        readable = self._tracker.owned() - self._pauses.paused if self._member.is_assigned else None
        try:
            self._health.check(client, self._offsets, readable)
        except KafkaException as error:
            if error.args[0].code() == KafkaError._FATAL:
                self._on_fatal(error.args[0])
            else:
                self._note_error(error.args[0])

    def _drain(self, drain_s: float) -> None:
        if self._state is LoopState.RUNNING:
            self._state = LoopState.DRAINING
            self._drain_until_us = self._clock.monotonic_us() + int(drain_s * 1e6)

    def _close(self) -> None:
        """Stores the watermark and closes the consumer. Takes long only if the broker hangs."""
        try:
            if self._member.client is not None:
                self._offsets.store(self._member.client)
                self._member.client.close()
        except (KafkaException, RuntimeError) as error:
            self._log.warning("consumer did not close cleanly", error=str(error))
        self._member.end()
        self._log.info("consumer loop ended", state=self._state.value, unfinished=self._tracker.in_flight())

    # Rebalances: called by the client inside poll() and consume(), on the poll thread.

    def _on_assign(self, client: Consumer, partitions: list[KafkaPartition]) -> None:
        self._handler.on_rebalance()
        was_suspended = self._member.was_suspended
        gained = _from_kafka(partitions)
        self._offsets.assign(client, gained, is_first=self._epoch == 0)
        self._health.note_assigned({tp.topic for tp in self._tracker.owned()})
        self._pauses.forget(gained)  # Newly assigned partitions are not paused.
        self._begin_epoch()
        self._member.note_assigned(client.memberid())
        if self._owner_split:
            self._log.error(
                "owner split: these partitions are owned on some topics only, so the jobs and requests of a user go to "
                "different workers; every member must subscribe to the same topics, with equal partition counts and "
                "the same `affinity`",
                partitions=sorted(self._owner_split)[:20],
            )
        self._log.info("assigned", partitions=len(self._partitions), assignment_epoch=self._epoch)
        if not was_suspended:
            # The requests above may take seconds while a coordinator is away, and are no suspension.
            self._member.note_poll()

    def _on_revoke(self, client: Consumer, partitions: list[KafkaPartition]) -> None:
        self._handler.on_rebalance()
        self._offsets.take_finished()
        self._offsets.store(client)
        gone = self._drop_partitions(partitions)
        self._log.info("revoked", partitions=len(partitions))
        self._handler.on_revoked(gone)
        if self._is_incremental and self._state in _ALIVE:
            self._begin_epoch()
        else:
            self._note_ownership()

    def _on_lost(self, client: Consumer, partitions: list[KafkaPartition]) -> None:
        self._handler.on_rebalance()
        gone = self._drop_partitions(partitions)
        self._member.note_lost(is_broker_reachable=self._health.is_broker_reachable)
        self._note_ownership()
        self._log.warning("lost the assignment: the membership expired", partitions=len(partitions))
        self._handler.on_lost(gone)
        if self._member.is_replaced():
            self._fail(LoopState.FENCED, RelayError(_REPLACED))
            # Without this call the client would join again without its member id, and take the static id from the
            # new holder. A client that the broker has fenced raises here.
            with contextlib.suppress(KafkaException, KafkaError):  # type: ignore[arg-type]  # It raises the latter bare.
                client.unsubscribe()

    def _drop_partitions(self, partitions: list[KafkaPartition]) -> frozenset[int]:
        gone = _from_kafka(partitions)
        self._offsets.revoke(gone)
        self._pauses.forget(gone)
        return frozenset(tp.partition for tp in gone)

    def _begin_epoch(self) -> None:
        """The process owns other partitions than before."""
        # The handler comes first: a thread that reads the new ownership from `status()` may rely on the handler.
        self._handler.on_assigned(frozenset(tp.partition for tp in self._tracker.owned()), self._epoch + 1)
        self._epoch += 1
        self._note_ownership()

    def _note_ownership(self) -> None:
        owned = self._tracker.owned()
        self._partitions = frozenset(tp.partition for tp in owned)
        self._owner_split = split_partitions(((tp, self._name) for tp in owned), self._topics)
        _OWNED.labels(self._name).set(len(self._partitions))

    # Errors.

    def _on_client_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._health.note_broker(False)
        elif error.code() not in _OF_ONE_BROKER:
            self._note_error(error)

    def _on_error(self, error: KafkaError) -> None:
        code = error.code()
        if code == KafkaError._FATAL or error.fatal() or code == KafkaError.FENCED_INSTANCE_ID:
            self._on_fatal(error)
        elif code in _UNKNOWN_TOPIC:
            self._health.note_missing(next((topic for topic in self._topics if topic in error.str()), self._topics[0]))
            self._note_error(error)
        elif code in _REFUSED:
            self._fail(LoopState.FAILED, RelayError(f"Kafka refuses the consumer: {cause_of(error)}. {_REFUSED[code]}"))
        elif code == KafkaError._ALL_BROKERS_DOWN:
            self._health.note_broker(False)
        else:
            self._note_error(error)

    def _on_fatal(self, error: KafkaError) -> None:
        if "fenced" in error.str().lower() or error.code() == KafkaError.FENCED_INSTANCE_ID:
            if not self._member.rejoin():
                self._fail(LoopState.FENCED, RelayError(_REPLACED))
        elif _ID_IN_USE in error.str():
            # `group.protocol=consumer` refuses a static id until the session of its holder has ended, also if the
            # holder is dead.
            self._limited_log.warning(
                "the group has another member with this group.instance.id: waits for the end of its session",
                KafkaError.UNRELEASED_INSTANCE_ID,
                loop=self._name,
            )
            self._member.replace_client(_ID_RETRY_S)
        else:
            self._fail(LoopState.FAILED, RelayError(f"The consumer cannot continue: {cause_of(error)}"))

    def _fail(self, state: LoopState, error: BaseException) -> None:
        self._state = state
        self._error = error
        if state is LoopState.FENCED:
            self._offsets.seal()
        self._log.error("consumer loop ends", state=state.value, error=str(error))

    def _note_error(self, error: KafkaError) -> None:
        self._limited_log.warning(
            "consumer error", error.code(), loop=self._name, error=error.name(), cause=cause_of(error)
        )


def _from_kafka(partitions: Iterable[KafkaPartition]) -> list[TopicPartition]:
    return [TopicPartition(tp.topic, tp.partition) for tp in partitions]
