"""This process as a member of its group: its client, its membership, and whether another process has replaced it.

| state | meaning | if the broker fences the client, the member joins again |
|---|---|---|
| JOINING | no assignment yet, or the loop has ended | never: another process has the id |
| ASSIGNED | the group sent an assignment, possibly an empty one | never: another process has the id |
| LOST | the membership expired; the client joins again | unless the coordinator names another member |
| LOST_SUSPENDED | as LOST, after a suspension of this process | if the coordinator names this member |

A client that was fenced or refused is unusable. `replace_client` makes another one on a thread of its own, because with
SASL/OAUTHBEARER that takes a second, or ten without a valid token.

`holder_of` asks the coordinator which member has a static `group.instance.id`. A worker asks just when the broker may
be away, so the request is made in a child process (`relaygr.cluster.admin_process`).
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import structlog
from confluent_kafka import Consumer, KafkaException
from confluent_kafka.admin import AdminClient

from relaygr.cluster.admin_process import ask
from relaygr.consumer.interface import Membership
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import Clock
from relaygr.runtime.errors import RelayError

log = structlog.get_logger()

# A running member learns from its heartbeats that it was replaced. A process that was suspended for longer must check.
_SUSPENSION_US: Final = 1_000_000
# A client that wakes up from a suspension learns within this time that its session has expired.
_AFTER_SUSPENSION_US: Final = 10_000_000
REMAKE_S: Final = 1.0
"""The time between two attempts to make a client."""
_MARGIN_S: Final = 2.0
"""A request to the coordinator ends by its own time-out. Its process has this much longer, for a client that hangs."""


class MemberState(enum.Enum):
    """See the table of the module."""

    JOINING = enum.auto()
    ASSIGNED = enum.auto()
    LOST = enum.auto()
    LOST_SUSPENDED = enum.auto()


class Member:
    """See the module docstring. The poll thread makes all calls; `connect` and `join` come before it."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        membership: Membership,
        make_client: Callable[[], Consumer],
        subscribe: Callable[[Consumer], None],
    ) -> None:
        self.state = MemberState.JOINING
        self.client: Consumer | None = None
        self.polled_us = 0
        """The monotonic time of the last poll."""
        self._name = name
        self._clock = clock
        self._membership = membership
        self._make_client = make_client
        self._subscribe = subscribe
        self._made: Consumer | None = None
        """A new client to join with, from the thread that made it."""
        self._has_ended = False
        self._member_id: str | None = None
        self._suspended_us = -_AFTER_SUSPENSION_US
        """When the last suspension ended."""
        self._log = log.bind(loop=name)

    def connect(self) -> Consumer:
        """The client, which does not join yet. Raises the errors of the factory."""
        if self.client is None:
            self.client = self._make_client()
        return self.client

    def join(self) -> None:
        """Joins the group. Raises the errors of the factory."""
        self._subscribe(self.connect())
        self.note_poll()

    def has_client(self) -> bool:
        """Whether there is a client. Joins with one that was made meanwhile."""
        if self.client is None and self._made is not None:
            self.client, self._made = self._made, None
            self._subscribe(self.client)
        return self.client is not None

    def replace_client(self, pause_s: float = 0.0) -> None:
        """Closes the client, and joins with a new one, which is made after the pause."""
        assert self.client is not None
        self.client.close()
        self.client = None
        threading.Thread(target=self._remake, args=(pause_s,), name=f"rejoin-{self._name}", daemon=True).start()

    def end(self) -> None:
        """The process is no member any more, and makes no other client."""
        self._has_ended = True
        self.state = MemberState.JOINING

    def note_poll(self) -> None:
        """The poll thread runs now."""
        self.polled_us = self._clock.monotonic_us()

    @property
    def is_assigned(self) -> bool:
        return self.state is MemberState.ASSIGNED

    @property
    def was_suspended(self) -> bool:
        """Whether the poll thread did not run for so long that this process may have lost its partitions."""
        return self.is_assigned and self._clock.monotonic_us() - self.polled_us > _SUSPENSION_US

    def note_suspension(self) -> None:
        """A suspension has ended."""
        self._suspended_us = self._clock.monotonic_us()

    def note_assigned(self, member_id: str | None) -> None:
        """The group sent an assignment to this member."""
        self._member_id = member_id
        self.state = MemberState.ASSIGNED

    def note_lost(self, *, is_broker_reachable: bool) -> None:
        """The membership expired: the coordinator was away, perhaps alone of all brokers, or this process was."""
        just_now = self._clock.monotonic_us() - self._suspended_us < _AFTER_SUSPENSION_US
        is_own_fault = (self.was_suspended or just_now) and is_broker_reachable
        self.state = MemberState.LOST_SUSPENDED if is_own_fault else MemberState.LOST

    def is_replaced(self) -> bool:
        """Whether another process has the right to own partitions, or the static id in the group."""
        if not self._membership.may_own():
            return True
        holder = self._membership.holder() if self._member_id is not None else None
        return holder is not None and holder != self._member_id

    def rejoin(self) -> bool:
        """Joins again after the client was fenced, if no other process did that. Returns whether it does.

        This happens when the coordinator was away for longer than a session: the client sends a pending commit without
        the member id, which it dropped with the membership, and the broker treats the commit as that of another holder.
        It is allowed once until the next assignment: a second fencing comes from another process.
        """
        if self.state not in (MemberState.LOST, MemberState.LOST_SUSPENDED) or not self._membership.may_own():
            return False
        holder = self._membership.holder()
        if holder != self._member_id and (holder is not None or self.state is MemberState.LOST_SUSPENDED):
            return False
        self.state = MemberState.JOINING
        self._log.warning("fenced by its own late commit: joins again with a new consumer")
        self.replace_client()
        return True

    def _remake(self, pause_s: float) -> None:
        while not self._has_ended:
            time.sleep(pause_s)
            pause_s = REMAKE_S
            try:
                self._made = self._make_client()
                return
            except RelayError as error:
                self._log.error("the group cannot be joined again yet", cause=str(error))


def holder_of(kafka: KafkaSettings, group: str, instance_id: str, timeout_s: float) -> str | None:
    """The member id of the static `instance_id` in `group`; None if there is none or the broker does not report it.

    The request may take `timeout_s`.
    """
    client_id = f"relaygr-{instance_id}-holder"
    try:
        return ask(kafka, client_id, timeout_s + _MARGIN_S, _holder, group, instance_id, timeout_s)
    except (KafkaException, OSError) as error:
        log.info("the members of the group are unknown", group=group, cause=str(error))
        return None


def _holder(admin: AdminClient, group: str, instance_id: str, timeout_s: float) -> str | None:
    answer: Future[Any] = admin.describe_consumer_groups([group], request_timeout=timeout_s)[group]
    members = answer.result(timeout_s + _MARGIN_S / 2).members
    return next((str(member.member_id) for member in members if member.group_instance_id == instance_id), None)
