"""A consumer that fences itself: a commit from before the outage arrives after its membership has expired.

Seen on a real Kafka that was killed and started again after more than a session: librdkafka drops the member id,
the queued commit is sent without it, and the broker answers FENCED_INSTANCE_ID, which is fatal for the client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from relaygr.consumer.interface import LoopState, Membership
from relaygr.consumer.loop import ConsumerLoop
from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from tests.waiting import becomes

TOPIC = "t.ranking"
TIMEOUT_S = 30


class SteppingClock(ManualClock):
    """A clock that advances by a millisecond at each reading, and by a suspension when the test calls `stop`."""

    stops = 0

    def monotonic_us(self) -> int:
        self.advance_us(1_000)
        return super().monotonic_us()

    def stop(self) -> None:
        self.stops += 1
        self.advance_us(2_000_000)


class Scripted:
    """A consumer whose polls run one step of the script each, and then do nothing."""

    def __init__(self, script: list[Callable[[Scripted], None]]) -> None:
        self.script = script
        self.closed = False
        self.unsubscribed = False

    def memberid(self) -> str:
        return "our-member"

    def unsubscribe(self) -> None:
        self.unsubscribed = True

    def subscribe(self, topics: Any, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self.on_assign, self.on_lost = on_assign, on_lost

    def poll(self, timeout: float) -> None:
        if self.script and timeout:
            self.script.pop(0)(self)
        else:
            threading.Event().wait(timeout)

    def committed(self, partitions: list[KafkaPartition], timeout: float) -> list[KafkaPartition]:
        return [KafkaPartition(tp.topic, tp.partition, 5) for tp in partitions]

    def close(self) -> None:
        self.closed = True

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


PLACES = [KafkaPartition(TOPIC, 0)]


class Life:
    """A loop over scripted consumers, made one after the other. Steps are the names of methods."""

    def __init__(
        self,
        *scripts: list[str],
        membership: Membership | None = None,
        note: list[bool] | None = None,
        started: bool = True,
        on_make: Callable[[Life], None] = lambda _: None,
    ) -> None:
        """`on_make` is called before each consumer is made."""
        self.notes = note
        self.ticks = 0
        self.attempts = 0
        self.consumers: list[Scripted] = []
        self.reached = threading.Event()
        left = [[getattr(self, step) for step in script] for script in scripts]

        def make(on_error: Callable[[KafkaError], None]) -> Scripted:
            self.attempts += 1
            on_make(self)
            self.on_error = on_error
            self.consumers.append(Scripted(left.pop(0)))
            return self.consumers[-1]

        self.clock = SteppingClock()
        self.ticked_after_stops: set[int] = set()
        calls = {"on_tick": lambda *_: self.tick()}
        handler = type("Silent", (), calls | {"__getattr__": lambda self, name: lambda *_: None})()
        self.loop = ConsumerLoop(make, [TOPIC], handler, self.clock, membership=membership)  # type: ignore[arg-type]
        if started:
            self.loop.start()

    def tick(self) -> None:
        self.ticks += 1
        self.ticked_after_stops.add(self.clock.stops)

    def note(self, _: Scripted) -> None:
        assert self.notes is not None
        self.notes.append(True)

    def away(self, _: Scripted) -> None:
        self.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))

    def one_away(self, _: Scripted) -> None:
        self.on_error(KafkaError(KafkaError._TRANSPORT))

    def assigned(self, consumer: Scripted) -> None:
        consumer.on_assign(consumer, PLACES)

    def lost(self, consumer: Scripted) -> None:
        consumer.on_lost(consumer, PLACES)

    def stopped(self, _: Scripted) -> None:
        self.clock.stop()

    def fenced(self, _: Scripted) -> None:
        raise KafkaException(KafkaError(KafkaError.FENCED_INSTANCE_ID))

    def end(self, _: Scripted) -> None:
        self.reached.set()


def test_a_member_that_its_own_late_commit_fenced_joins_again_with_a_new_consumer() -> None:
    life = Life(["assigned", "away", "lost", "fenced"], ["assigned", "end"])
    assert life.reached.wait(TIMEOUT_S)
    assert len(life.consumers) == 2
    assert life.consumers[0].closed
    status = life.loop.status()
    assert (status.state, status.assigned, status.assignment_epoch) == (LoopState.RUNNING, True, 2)
    life.loop.stop(0)
    assert life.loop.join(TIMEOUT_S)
    assert life.loop.status().state is LoopState.STOPPED


def test_the_poll_thread_ticks_while_a_new_consumer_is_made() -> None:
    """With SASL/OAUTHBEARER a consumer takes a second, in which no delivery report was taken."""

    def slowly(life: Life) -> None:
        if life.attempts > 1:
            before = life.ticks
            ticked.append(becomes(lambda: life.ticks >= before + 3))

    ticked: list[bool] = []
    life = Life(["assigned", "away", "lost", "fenced"], ["assigned", "end"], on_make=slowly)
    assert life.reached.wait(TIMEOUT_S)
    assert ticked == [True]
    life.loop.stop(0)
    assert life.loop.join(TIMEOUT_S)


def test_a_new_consumer_that_cannot_be_made_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an expired token the worker ended."""
    monkeypatch.setattr("relaygr.consumer.membership.REMAKE_S", 0.01)

    def fail_twice(life: Life) -> None:
        if life.attempts in (2, 3):
            raise RelayError("the token has expired")

    life = Life(["assigned", "away", "lost", "fenced"], ["assigned", "end"], on_make=fail_twice)
    assert life.reached.wait(TIMEOUT_S)
    assert (life.attempts, life.loop.status().state) == (4, LoopState.RUNNING)
    life.loop.stop(0)
    assert life.loop.join(TIMEOUT_S)


def test_a_member_without_a_consumer_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaygr.consumer.membership.REMAKE_S", 0.01)
    failed = threading.Event()

    def fail(life: Life) -> None:
        if life.attempts > 1:
            failed.set()
            raise RelayError("the token has expired")

    life = Life(["assigned", "away", "lost", "fenced"], on_make=fail)
    assert failed.wait(TIMEOUT_S)
    assert not life.loop.status().assigned
    life.loop.stop(0)
    assert life.loop.join(TIMEOUT_S)
    assert life.loop.status().state is LoopState.STOPPED


def test_a_member_that_lost_the_coordinator_alone_of_three_brokers_joins_again() -> None:
    """The other brokers answered, so the member took its own late commit for that of another process, and ended."""
    life = Life(["assigned", "one_away", "lost", "fenced"], ["assigned", "end"])
    assert life.reached.wait(TIMEOUT_S)
    assert life.loop.status().broker_reachable
    assert life.loop.status().state is LoopState.RUNNING
    life.loop.stop(0)
    assert life.loop.join(TIMEOUT_S)


def test_a_member_that_was_starved_and_fenced_itself_joins_again_when_the_group_still_names_it() -> None:
    """On a busy machine a poll took more than a second, and the member ended for good."""
    scripts = (["assigned", "stopped", "lost", "fenced"], ["assigned", "end"])
    life = Life(*scripts, membership=Membership(holder=lambda: "our-member"))
    assert life.reached.wait(TIMEOUT_S)
    assert life.loop.status().state is LoopState.RUNNING
    life.loop.stop(0)
    assert life.loop.join(TIMEOUT_S)


@pytest.mark.parametrize(
    "scripts",
    [
        pytest.param([["assigned", "fenced"]], id="while it owns partitions"),
        pytest.param([["assigned", "stopped", "lost", "fenced"]], id="after a stop of its own, with the broker there"),
        pytest.param([["assigned", "away", "lost", "fenced"], ["fenced"]], id="twice without an assignment"),
        pytest.param([["assigned", "away", "lost", "assigned", "fenced"]], id="after it was back"),
    ],
)
def test_a_member_whose_place_another_took_ends(scripts: list[list[str]]) -> None:
    life = Life(*scripts)
    assert life.loop.join(TIMEOUT_S)
    assert life.loop.status().state is LoopState.FENCED
    assert len(life.consumers) == len(scripts)


def test_a_member_whose_membership_expired_joins_again_while_its_id_is_nobody_elses() -> None:
    life = Life(["assigned", "lost", "assigned", "end"], membership=Membership(holder=lambda: "our-member"))
    assert life.reached.wait(TIMEOUT_S)
    assert life.loop.status().assignment_epoch == 2
    assert not life.consumers[0].unsubscribed
    life.loop.stop(0)
    assert life.loop.join(TIMEOUT_S)


@pytest.mark.parametrize(
    "membership",
    [
        pytest.param(Membership(holder=lambda: "another-member"), id="its id is another's: it was stopped for long"),
        pytest.param(Membership(may_own=lambda: False), id="it does not hold its lock any more"),
    ],
)
@pytest.mark.parametrize("script", [["assigned", "lost"], ["assigned", "away", "lost"]], ids=" ".join)
def test_a_member_that_was_replaced_while_it_was_away_never_takes_the_id_back(
    script: list[str], membership: Membership
) -> None:
    """A suspended process that woke up after a take-over once joined again and fenced its successor."""
    life = Life(script, membership=membership)
    assert life.loop.join(TIMEOUT_S)
    assert life.loop.status().state is LoopState.FENCED
    assert life.consumers[0].unsubscribed


def test_a_member_that_wakes_up_from_a_stop_asks_before_it_does_anything() -> None:
    """A process that was replaced within a session once still published statuses under its successor's id."""
    membership = Membership(holder=lambda: "our-member" if not asked else "another-member")
    asked: list[bool] = []
    life = Life(["assigned", "stopped", "note", "stopped"], membership=membership, note=asked)
    assert life.loop.join(TIMEOUT_S)
    assert life.loop.status().state is LoopState.FENCED
    assert life.ticked_after_stops == {0, 1}, "it continues after the first stop, and does nothing after the second"


def test_a_member_that_runs_asks_nobody() -> None:
    asked: list[bool] = []
    membership = Membership(holder=lambda: asked.append(True) or "another-member")  # type: ignore[func-returns-value]
    life = Life(["assigned", "end"], membership=membership)
    assert life.reached.wait(TIMEOUT_S)
    life.loop.stop(0)
    assert life.loop.join(TIMEOUT_S)
    assert not asked


def test_a_member_that_is_fenced_after_an_outage_does_not_join_again_if_another_has_its_id() -> None:
    membership = Membership(holder=lambda: "our-member" if not asked else "another-member")
    asked: list[bool] = []
    life = Life(["assigned", "away", "lost", "note", "fenced"], membership=membership, note=asked)
    assert life.loop.join(TIMEOUT_S)
    assert life.loop.status().state is LoopState.FENCED
    assert len(life.consumers) == 1


def test_a_connected_loop_joins_with_the_client_that_is_warm() -> None:
    life = Life(["assigned", "end"], started=False)
    life.loop.connect(0.1)
    life.loop.connect(0.1)
    assert len(life.consumers) == 1 and life.loop.status().state is LoopState.NEW
    life.loop.start()
    assert life.reached.wait(TIMEOUT_S)
    assert len(life.consumers) == 1
    life.loop.stop(0)
    assert life.loop.join(TIMEOUT_S)


def test_a_broker_that_came_back_while_a_loop_waited_to_join_is_known_to_be_there() -> None:
    life = Life([], started=False)
    life.loop.connect(0.1)
    life.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    assert not life.loop.status().broker_reachable
    life.loop.connect(0.1)
    assert life.loop.status().broker_reachable
