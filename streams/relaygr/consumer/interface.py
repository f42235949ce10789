"""The types between the consumer loop and its handler. For contract and threads see `relaygr.consumer.loop`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from confluent_kafka import Message

from relaygr.schemas.headers import RawHeaders
from relaygr.schemas.record import record


class LoopState(enum.StrEnum):
    """The state of a loop. FENCED and FAILED are final states without a call of `stop`."""

    NEW = "new"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"
    FENCED = "fenced"
    FAILED = "failed"


@record(frozen=True, slots=True)
class Token:
    """Identifies a message for `finish`, with the generation of its partition."""

    topic: str
    partition: int
    offset: int
    generation: int


@record(frozen=True, slots=True)
class Received:
    """One message, passed to the handler once. `message` is the Kafka client's object, for dead letters."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: RawHeaders
    received_us: int
    """Monotonic."""
    assignment_epoch: int
    token: Token
    message: Message


@record(frozen=True, slots=True)
class LoopStatus:
    """The state for readiness and status messages. `assigned`: the group sent an assignment, possibly an empty one."""

    state: LoopState
    assigned: bool
    partitions: frozenset[int]
    assignment_epoch: int
    last_poll_us: int
    """Monotonic time of the last poll. It grows old while the poll thread hangs or serves a rebalance."""
    broker_reachable: bool
    stalled: bool
    in_flight: int
    paused: int
    owner_split: frozenset[int]


@record(frozen=True, slots=True)
class Membership:
    """Shows whether this process was replaced. The loop checks it after a lost membership or a suspension."""

    may_own: Callable[[], bool] = lambda: True
    """Whether this process may own partitions, for example because it holds the lock of its worker id."""
    holder: Callable[[], str | None] = lambda: None
    """The member id that the static id has in the group; None if it is not known. May take seconds."""


class Loop(Protocol):
    """What a worker needs of the threads that read its messages: `relaygr.consumer.loop.ConsumerLoop` describes it."""

    def connect(self, timeout_s: float) -> None: ...

    def start(self) -> None: ...

    def finish(self, token: Token) -> None: ...

    def pause(self, topic: str, partitions: Iterable[int]) -> None: ...

    def resume(self, topic: str, partitions: Iterable[int]) -> None: ...

    def read_anew(self, topics: Collection[str]) -> None: ...

    def stop(self, drain_s: float) -> None: ...

    def join(self, timeout_s: float | None = None) -> bool: ...

    @property
    def error(self) -> BaseException | None: ...

    def status(self) -> LoopStatus: ...


class Handler(Protocol):
    """Callbacks on the poll thread. They must not block, and their work must be short."""

    def on_message(self, message: Received) -> None:
        """Takes a new message. The handler must pass its token to `finish` when the work is done."""

    def on_batch(self) -> bool:
        """Called after the messages of one poll. True: work is left for this thread, so the loop polls without a wait
        and calls again, with or without new messages.
        """

    def on_rebalance(self) -> None:
        """A rebalance begins, which may take seconds. Other threads must do what `on_batch` left."""

    def on_assigned(self, partitions: frozenset[int], assignment_epoch: int) -> None:
        """Takes all partitions that this process owns now."""

    def on_revoked(self, partitions: frozenset[int]) -> None:
        """Takes the partitions that a rebalance revoked. The next assignment usually contains most of them."""

    def on_lost(self, partitions: frozenset[int]) -> None:
        """Takes the partitions of an expired membership. Other members may own them already."""

    def on_tick(self, now_us: int) -> None:
        """Called between polls, every 5 ms, for producer polls and timers. `now_us` is monotonic."""
