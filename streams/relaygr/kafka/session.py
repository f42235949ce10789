"""One process's use of a Kafka cluster. A process makes one `KafkaSession` and hands it to its parts.

* The session makes the clients of the parts, and their statistics become metrics (`relaygr_kafka_*`).
* `note` hears of each error of a client, a message or a fetch. A right of the process's role that Kafka refuses is in
  `refusal`, for the readiness probe, until the brokers answer that the process has every right, twice: a process that
  gets no work while it is not ready could not find out by itself. Where they cannot be asked, until no refusal follows.
* `rejection`: why a broker lately refused the certificate or the user.
* New files of `security` (certificates, passwords) are read by new clients: `on_new_files` gets what makes them. A
  process whose other clients Kafka refuses then ends, so that whatever started it starts it again. It does not end
  before: its connections go on, and its caches are worth more.
* `dead_letters` writes the messages that the process cannot use.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakMethod

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, ShareConsumer
from confluent_kafka.admin import ClusterMetadata
from prometheus_client import REGISTRY, CollectorRegistry

from relaygr.kafka.client_errors import (
    ClientErrors,
    ErrorCallback,
    LimitedLog,
    cause_of,
    is_final,
    is_refusal,
    why_undelivered,
)
from relaygr.kafka.clients import (
    Options,
    ProducerKind,
    make_assigned_consumer,
    make_group_consumer,
    make_producer,
    make_share_consumer,
    require_broker,
)
from relaygr.kafka.security import SecurityFiles
from relaygr.kafka.settings import KafkaSettings
from relaygr.kafka.statistics import kafka_statistics
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.loggers import Logger

if TYPE_CHECKING:
    # Both need numpy, which `relaygr lag` does without.
    from relaygr.kafka.dead_letters import DeadLetterWriter
    from relaygr.kafka.durable import DurableProducer

ASK_S: Final = 5.0
"""How often the brokers are asked for rights while one is missing."""
LOOK_S: Final = 2.0
"""How often the files of `security` are compared with those that the clients have read."""
REJECTION_MEMORY_US: Final = 45_000_000
"""librdkafka repeats an equal error of a connection after 30 s."""
_JOIN_S: Final = 2.0
_UNAUTHORIZED: Final = frozenset(
    (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    )
)

_log = Logger(__name__)


class Rights(Protocol):
    """The rights of the process's role; `relaygr.cluster.rights.RoleRights` asks the brokers."""

    advice: str
    """What grants them."""
    topics: frozenset[str]
    """The topics that the role uses. Refusals of others are logged only: nobody asks for their rights."""

    def missing(self) -> tuple[str, ...]:
        """A sentence for each right that the process lacks; none if nobody can ask. Raises RelayError and OSError."""

    def close(self) -> None:
        """Ends a call of `missing`, on another thread, too."""


class KafkaSession:
    """See the module docstring. No I/O and no thread before `follow_files`, `ends_for_new_files` or the first refusal.
    Any thread may call every method.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        name: str,
        rights: Rights | None = None,
        clock: Clock | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """`name`: the ids of the process's clients begin with it. `rights`: None: refused messages are logged only."""
        self.kafka = kafka
        self.name = name
        self.reporting: Options = kafka_statistics(registry).options(kafka.statistics_interval_ms)
        """librdkafka's settings of a client whose statistics become metrics."""
        self._rights = rights
        self._clock = clock or SystemClock()
        self._limited = LimitedLog(clock)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._asking: threading.Thread | None = None
        self._is_refused_again = False
        self._missing: tuple[str, ...] = ()
        self._rejected: tuple[int, str, int] | None = None
        """When, why, and the number of `_files_changed` when the refused client was made."""
        self._files_changed = 0
        """How often the files of `security` have changed."""
        self._renewals: list[WeakMethod[Callable[[], None]]] = []
        self._following: threading.Thread | None = None
        self._is_outdated = False
        self._dead_letters: DeadLetterWriter | None = None

    # -- clients: see `relaygr.kafka.clients` ------------------------------------------------------------------------

    def producer(
        self,
        kind: ProducerKind,
        client_id: str,
        on_error: ErrorCallback | None = None,
        options: Options | None = None,
    ) -> Producer:
        """A producer. `note` hears of each message that it does not deliver."""
        # A durable producer may have the client id of another one.
        reporting = {} if kind is ProducerKind.DURABLE else self.reporting
        return make_producer(
            self.kafka,
            kind,
            client_id,
            self._errors(client_id, None, on_error),
            {**reporting, **(options or {})},
            self._note_undelivered,
        )

    def durable_producer(self, client_id: str) -> DurableProducer:
        """A producer of durable messages, whose client is made anew for new files."""
        from relaygr.kafka.durable import DurableProducer

        producer = DurableProducer(self, client_id)
        self.on_new_files(producer.renew)
        return producer

    def group_consumer(
        self,
        group: str,
        client_id: str,
        topic: str,
        instance_id: str | None = None,
        on_error: ErrorCallback | None = None,
        options: Options | None = None,
    ) -> Consumer:
        """A consumer in `group`. `topic`: the one that an error of the client is about."""
        errors = self._errors(client_id, topic, on_error)
        return make_group_consumer(
            self.kafka, group, client_id, instance_id, errors, {**self.reporting, **(options or {})}
        )

    def assigned_consumer(
        self,
        client_id: str,
        topic: str | None = None,
        on_error: ErrorCallback | None = None,
        options: Options | None = None,
    ) -> Consumer:
        """A consumer for `assign()`. `topic`: the one that an error of the client is about; None: of no one topic."""
        return make_assigned_consumer(self.kafka, client_id, self._errors(client_id, topic, on_error), options)

    def share_consumer(self, group: str, client_id: str, on_statistics: Callable[[str], None]) -> ShareConsumer:
        """A member of a share group. librdkafka tells no errors of such a client."""
        return make_share_consumer(self.kafka, group, client_id, on_statistics)

    @property
    def dead_letters(self) -> DeadLetterWriter:
        """The one writer of the process."""
        if self._dead_letters is None:
            from relaygr.kafka.dead_letters import DeadLetterWriter

            with self._lock:
                self._dead_letters = self._dead_letters or DeadLetterWriter(self, self._clock)
        return self._dead_letters

    def require_broker(self, stopping: threading.Event | None = None) -> ClusterMetadata:
        """The cluster's metadata. Raises RelayError with the address and the cause; early once `stopping` is set."""
        return require_broker(self.kafka, stopping, partial(self._note_rejection, self._files_changed))

    def _errors(self, client_id: str, topic: str | None, on_error: ErrorCallback | None) -> ClientErrors:
        files = self._files_changed

        def heard(error: KafkaError) -> None:
            self._note_rejection(files, error)
            if topic is not None:
                # A consumer whose metadata lack the right to describe its topic says so here, and not in `poll`.
                self.note(topic, error)
            if on_error is not None:
                on_error(error)

        return ClientErrors(client_id, heard, self._limited)

    # -- rejected certificates and users -----------------------------------------------------------------------------

    @property
    def rejection(self) -> str | None:
        """Why a broker refused a connection for its certificate or user; None if none did lately."""
        rejected = self._rejected
        if rejected is None or self._clock.monotonic_us() - rejected[0] > REJECTION_MEMORY_US:
            return None
        return rejected[1]

    def accepted(self) -> None:
        """A broker has accepted a client since."""
        self._rejected = None

    def _note_rejection(self, files: int, error: KafkaError) -> None:
        if is_refusal(error):
            self._rejected = self._clock.monotonic_us(), cause_of(error), files

    # -- refused rights ----------------------------------------------------------------------------------------------

    @property
    def refusal(self) -> str | None:
        """What this process may not do, as a sentence; None while Kafka refuses nothing."""
        return "; ".join(self._missing) or None

    def _note_undelivered(self, topic: str, error: KafkaError) -> None:
        if self._rights is None:
            self._warn(topic, error)
        self.note(topic, error)

    def _warn(self, topic: str, error: KafkaError) -> None:
        if is_final(error):
            cause = why_undelivered(error)
            self._limited.warning("kafka refuses messages", error.code(), topic=topic, error=error.name(), cause=cause)

    def note(self, topic: str, error: KafkaError) -> None:
        """The error of a message or a fetch of this topic. Never blocks."""
        rights = self._rights
        if rights is None:
            return
        if error.code() not in _UNAUTHORIZED or topic not in rights.topics:
            self._warn(topic, error)
            return
        with self._lock:
            self._is_refused_again = True
            if self._asking is not None or self._stopping.is_set():
                return
            self._missing = (f"Kafka refuses this process the topic {topic} ({cause_of(error)}): {rights.advice}",)
            _log.error("Kafka refuses this process, so it is not ready", cause=self.refusal)
            self._asking = threading.Thread(target=self._ask, args=(rights,), name="rights-watch", daemon=True)
            self._asking.start()

    def _ask(self, rights: Rights) -> None:
        # One answer is not enough: librdkafka tells once that fetches are refused, and not again if the right is taken
        # away within seconds after it was given.
        was_allowed = False
        while not self._stopping.wait(ASK_S):
            self._is_refused_again = False
            try:
                missing = rights.missing()
            except (RelayError, OSError):
                continue  # Not known: the last answer holds.
            with self._lock:
                if missing:
                    self._missing = missing
                elif was_allowed and not self._is_refused_again:
                    self._missing, self._asking = (), None
                    _log.info("Kafka refuses this process nothing any more")
                    return
            was_allowed = not missing

    # -- new files ---------------------------------------------------------------------------------------------------

    def on_new_files(self, renew: Callable[[], None]) -> None:
        """`renew` makes a client anew. The session's thread calls it, and again after RelayError or KafkaException.

        It is a method. The session does not keep its object alive: a client that is closed must not stay connected.
        """
        self._renewals = [*(each for each in self._renewals if each() is not None), WeakMethod(renew)]

    def follow_files(self, ends_process: bool = False) -> None:
        """Watches the files of `security`, if there are any. Call it before the first client is made.

        `ends_process`: sends SIGTERM to this process once Kafka refuses it and the files are others than at the start.
        """
        files = SecurityFiles(self.kafka.security)
        if files.paths:
            self._following = threading.Thread(
                target=self._follow_files, args=(files, ends_process), name="security-files", daemon=True
            )
            self._following.start()

    @contextmanager
    def ends_for_new_files(self) -> Iterator[None]:
        """For a process whose clients cannot all be made anew. Closes the session after the block, and raises
        RelayError if the process ended because of new files.
        """
        self.follow_files(ends_process=True)
        try:
            yield
        finally:
            self.close()
        if self._is_outdated:
            files = ", ".join(map(str, SecurityFiles(self.kafka.security).paths))
            raise RelayError(
                f"Kafka refused this process, whose files of `security` ({files}) have changed since its start: "
                "start it again."
            )

    def close(self) -> None:
        """Ends the threads. The parts close their clients."""
        self._stopping.set()
        if self._rights is not None:
            self._rights.close()
        for thread in (self._asking, self._following):
            if thread is not None:
                thread.join(_JOIN_S)

    def _follow_files(self, files: SecurityFiles, ends_process: bool) -> None:
        waiting = list[Callable[[], None]]()
        while not self._stopping.wait(LOOK_S):
            if files.changed():
                # Read before the new clients read them.
                files, self._files_changed = SecurityFiles(self.kafka.security), self._files_changed + 1
                waiting = [renew for each in self._renewals if (renew := each()) is not None]
            waiting = [renew for renew in waiting if not self._is_renewed(renew)]
            # A client of the new files may be refused, too. Those before it go on, so the process does.
            cause, rejected = self.rejection, self._rejected
            if ends_process and cause is not None and rejected is not None and rejected[2] < self._files_changed:
                self._is_outdated = True
                _log.error("ends, so that its successor reads the new files of `security`", kafka_refuses=cause)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _is_renewed(self, renew: Callable[[], None]) -> bool:
        try:
            renew()
        except (RelayError, KafkaException) as error:
            _log.warning("no connection with the new files of `security`: tries again", cause=str(error))
            return False
        return True
