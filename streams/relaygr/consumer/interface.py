"""What the consumer loop and its handler say to each other. Contract and threads: `relaygr.consumer.loop`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from confluent_kafka import KafkaException, Message

from relaygr.kafka.clients import make_admin
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.headers import RawHeaders


class LoopState(enum.StrEnum):
    """Where the loop is in its life. FENCED and FAILED are ends that nobody asked for."""

    NEW = "new"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"
    FENCED = "fenced"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Token:
    """What `finish` takes: which message, of which generation of its partition."""

    topic: str
    partition: int
    offset: int
    generation: int


@dataclass(frozen=True, slots=True)
class Received:
    """One message, handed over once. `message` is the client's own, for dead letters."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: RawHeaders
    timestamp_ms: int
    received_us: int
    """Monotonic."""
    assignment_epoch: int
    token: Token
    message: Message


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """For readiness and status messages. `assigned`: the group has answered, if only with no partition."""

    state: LoopState
    assigned: bool
    partitions: frozenset[int]
    assignment_epoch: int
    last_poll_us: int
    """Monotonic. Older than a second: the poll thread hangs."""
    broker_reachable: bool
    stalled: bool
    in_flight: int
    paused: int
    owner_split: frozenset[int]


@dataclass(frozen=True, slots=True)
class Membership:
    """What a member asks before it joins again after its membership was lost, and when it was stopped."""

    may_own: Callable[[], bool] = lambda: True
    """Whether this process is still the one that may own anything: it holds the lock of its id, say."""
    holder: Callable[[], str | None] = lambda: None
    """The member id that its static id has in the group now; None: not known. May take seconds."""


class Handler(Protocol):
    """Called on the poll thread; never computes, never blocks."""

    def on_message(self, message: Received) -> None:
        """New work. Sooner or later its token goes to `finish`."""

    def on_assigned(self, partitions: frozenset[int], assignment_epoch: int) -> None:
        """The whole of what this process owns now."""

    def on_revoked(self, partitions: frozenset[int]) -> None:
        """Taken in a rebalance, most of them to be given back in a moment."""

    def on_lost(self, partitions: frozenset[int]) -> None:
        """The membership expired: others may own them already."""

    def on_tick(self, now_us: int) -> None:
        """Between polls, every `tick_interval_ms`: producer polls, timers. Monotonic µs."""


log = structlog.get_logger()


def holder_of(kafka: KafkaSettings, group: str, instance_id: str, timeout_s: float) -> str | None:
    """The member id under which `instance_id` is in `group`; None: nobody's, or the broker does not say."""
    try:
        admin = make_admin(kafka, f"relaygr-{instance_id}-holder")
        answer: Future[Any] = admin.describe_consumer_groups([group], request_timeout=timeout_s)[group]
        members = answer.result(timeout_s).members
    except (KafkaException, TimeoutError) as error:
        log.info("the group's members are not known", group=group, cause=str(error))
        return None
    return next((str(member.member_id) for member in members if member.group_instance_id == instance_id), None)
