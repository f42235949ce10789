"""Which requests an overloaded worker passes on, to whom, and with how much history."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relaygr.admission.divert import (
    BURST,
    CALM_US,
    NEAR_US,
    SHORT_REQUESTS,
    SHORT_WITHIN_US,
    DivertPolicy,
    Need,
    NotDiverted,
    Peers,
    Target,
)
from relaygr.schemas.fields import Other
from relaygr.schemas.messages import FullPathReport, LatencyCoefficients, WorkerState, WorkerStatus

NOW_US = 1_700_000_000_000_000
STALE_US = 1_500_000
TOKEN_US = 10
LATENCY = LatencyCoefficients(0, TOKEN_US, 0, 0, TOKEN_US, 0, 0, 0, 0, 0, 0)
STATUS = WorkerStatus(
    worker_id="peer-1", state=WorkerState.READY, written_at_us=NOW_US, assignment_epoch=1, partitions=(),
    model_revision="model", kv_bytes_per_token=1, contextual_tokens=0, tokens_per_behaviour=1,
    max_prefix_behaviours=4096, hbm_capacity_bytes=1, hbm_free_bytes=1, dram_capacity_bytes=0, dram_free_bytes=0,
    ranking_queue_p99_us=0, preinfer_queue_us=0, latency=LATENCY, ranking_backlog_us=0, overflow_partitions=(4, 9),
)  # fmt: skip
NEED = Need(
    user_id="u", left_us=50_000, way_us=5_000, behaviours=1_000, most_behaviours=10_000, kept_behaviours=0, suffix=0,
    candidates=0,
)  # fmt: skip
"""Full inference takes 10 ms at a peer of the usual speed."""


class World:
    """A worker and its peers, at a time that the test moves."""

    def __init__(self, *peers: WorkerStatus, share: float = 0.5) -> None:
        self.now_us = NOW_US
        self.peers = Peers("own", STALE_US)
        self.policy = DivertPolicy(self.peers, share)
        self.received = 0
        for status in peers:
            self.hear(status)

    def hear(self, status: WorkerStatus) -> None:
        self.peers.apply(status.worker_id, status, self.now_us)

    def choose(self, need: Need = NEED, received: int = 0) -> Target | NotDiverted:
        """One more request, and so many others, were received."""
        self.received += 1 + received
        return self.policy.choose(need, "model", self.received, self.now_us)


def peer(worker_id: str, **changes: object) -> WorkerStatus:
    return replace(STATUS, worker_id=worker_id, **changes)


def test_the_least_loaded_peer_gets_the_whole_history_on_one_of_its_partitions() -> None:
    world = World(peer("peer-1", ranking_backlog_us=20_000), peer("peer-2", overflow_partitions=(7,)))
    assert world.choose() == Target("peer-2", 7, 1_000)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("of another model", peer("peer-1", model_revision="other")),
        ("that starts", peer("peer-1", state=WorkerState.STARTING)),
        ("that stops", peer("peer-1", state=WorkerState.STOPPING)),
        ("in a state of a later version", peer("peer-1", state=Other("draining"))),
        ("of a version that does not read the topic", peer("peer-1", overflow_partitions=None)),
        ("that is short of time itself", peer("peer-1", overflow_partitions=())),
        ("that is silent", peer("peer-1", written_at_us=NOW_US - STALE_US - 1)),
        ("that is this worker", peer("own")),
    ],
)
def test_no_request_goes_to_a_worker(name: str, status: WorkerStatus) -> None:
    world = World(status)
    assert world.policy.objection("model", 1, NOW_US) is NotDiverted.NO_PEER, name
    assert world.choose() is NotDiverted.NO_PEER


def test_a_tombstone_ends_a_peer() -> None:
    world = World(STATUS)
    world.peers.apply("peer-1", None, NOW_US)
    assert world.choose() is NotDiverted.NO_PEER


@pytest.mark.parametrize(
    ("changes", "is_diverted"),
    [
        ({}, True),
        ({"ranking_backlog_us": 35_000}, True),
        ({"ranking_backlog_us": 45_001}, False),
        ({"latency": replace(LATENCY, a1=44.0, b1=44.0)}, True),
        # With a fixed part of the time, no shorter history helps.
        ({"latency": replace(LATENCY, a0=45_001.0)}, False),
        ({"full_path": FullPathReport(0, (0.0,) * 10 + (9.0,), (), (), ()), "ranking_backlog_us": 43_500}, False),
    ],
)
def test_a_request_goes_only_where_it_can_be_answered_in_time(changes: dict[str, object], is_diverted: bool) -> None:
    chosen = World(peer("peer-1", **changes)).choose()
    assert isinstance(chosen, Target) is is_diverted
    assert is_diverted or chosen is NotDiverted.NO_TIME


def test_a_request_without_time_for_the_way_is_not_diverted() -> None:
    assert World(STATUS).choose(replace(NEED, left_us=4_999)) is NotDiverted.NO_TIME


def test_of_a_history_that_takes_too_long_the_newest_part_that_fits_is_attached() -> None:
    chosen = World(STATUS).choose(replace(NEED, left_us=11_000))
    assert chosen == replace(chosen, behaviours=600)  # 5 ms of way, and 6 ms for 600 tokens.


def test_a_history_that_is_larger_than_the_message_may_be_is_cut_to_its_newest_part() -> None:
    chosen = World(STATUS).choose(replace(NEED, most_behaviours=700))
    assert isinstance(chosen, Target) and chosen.behaviours == 700


@pytest.mark.parametrize(("left_us", "is_diverted"), [(7_000, True), (6_980, False)])
def test_less_than_a_fifth_of_the_history_is_not_worth_the_way(left_us: int, is_diverted: bool) -> None:
    assert isinstance(World(STATUS).choose(replace(NEED, left_us=left_us)), Target) is is_diverted


@pytest.mark.parametrize(("kept", "is_diverted"), [(599, True), (600, False)])
def test_a_request_stays_where_as_much_of_its_history_can_be_ranked(kept: int, is_diverted: bool) -> None:
    chosen = World(STATUS).choose(replace(NEED, left_us=11_000, kept_behaviours=kept))
    assert isinstance(chosen, Target) is is_diverted


def test_a_user_without_a_history_is_diverted_too() -> None:
    chosen = World(STATUS).choose(replace(NEED, behaviours=0))
    assert isinstance(chosen, Target) and chosen.behaviours == 0


def test_what_was_sent_to_a_peer_counts_until_its_next_status_or_until_it_can_be_done() -> None:
    world = World(STATUS, share=1.0)
    assert [type(world.choose()) for _ in range(4)] == [Target] * 4
    assert isinstance(cut := world.choose(), Target) and cut.behaviours == 500
    assert world.choose() is NotDiverted.NO_TIME
    world.now_us += 10_000
    assert isinstance(cut := world.choose(), Target) and cut.behaviours == 1_000
    world.now_us += 6_000
    world.hear(peer("peer-1", written_at_us=world.now_us))
    assert isinstance(chosen := world.choose(), Target) and chosen.behaviours == 1_000


def test_a_burst_is_spread_over_the_peers() -> None:
    world = World(peer("peer-1"), peer("peer-2"), peer("peer-3"), share=1.0)
    targets = [world.choose(replace(NEED, user_id=f"u{number}")) for number in range(9)]
    chosen = [target.worker_id for target in targets if isinstance(target, Target)]
    assert sorted(chosen.count(name) for name in ("peer-1", "peer-2", "peer-3")) == [3, 3, 3]


def test_among_nearly_equal_peers_a_user_stays_with_one_and_users_are_spread() -> None:
    near = int(NEAR_US) - 1
    first: dict[str, str] = {}
    for loaded in (0, near):
        for number in range(30):
            user = f"user-{number}"
            world = World(peer("peer-1", ranking_backlog_us=loaded), peer("peer-2", ranking_backlog_us=near - loaded))
            chosen = world.choose(replace(NEED, user_id=user))
            assert isinstance(chosen, Target)
            assert first.setdefault(user, chosen.worker_id) == chosen.worker_id
    assert set(first.values()) == {"peer-1", "peer-2"}


def test_at_most_the_share_of_the_received_requests_is_diverted_after_a_burst() -> None:
    world = World(share=0.25)
    count = 4_000
    diverted = 0
    for _ in range(count):
        world.now_us += 100_000
        world.hear(peer("peer-1", written_at_us=world.now_us))
        diverted += isinstance(world.choose(), Target)
    assert diverted == pytest.approx(BURST + 0.25 * count, abs=1)
    assert NotDiverted.SHARE in [world.choose() for _ in range(2)]
    assert world.policy.objection("model", world.received, world.now_us) is NotDiverted.SHARE


def test_a_worker_takes_no_diverted_requests_while_it_is_short_of_time() -> None:
    policy = World().policy
    for _ in range(SHORT_REQUESTS - 1):
        policy.note_short(NOW_US)
    assert policy.takes_diverted(NOW_US)
    policy.note_short(NOW_US)
    assert not policy.takes_diverted(NOW_US)
    assert not policy.takes_diverted(NOW_US + CALM_US - 1)
    assert policy.takes_diverted(NOW_US + CALM_US)


def test_it_stays_short_of_time_while_single_requests_find_none() -> None:
    policy = World().policy
    for _ in range(SHORT_REQUESTS):
        policy.note_short(NOW_US)
    later_us = NOW_US + CALM_US - 1
    policy.note_short(later_us)
    assert not policy.takes_diverted(later_us + CALM_US - 1)
    assert policy.takes_diverted(later_us + CALM_US)


def test_single_requests_that_find_no_time_now_and_then_make_no_worker_short_of_time() -> None:
    policy = World().policy
    for number in range(20):
        at_us = NOW_US + number * (SHORT_WITHIN_US // 2 + 1)
        policy.note_short(at_us)
        assert policy.takes_diverted(at_us)


def test_a_fleet_that_is_overloaded_everywhere_diverts_nothing() -> None:
    """Three workers that hear of each other twice a second, each with more requests than it can answer."""
    worlds = {name: World(share=1.0) for name in ("a", "b", "c")}
    for name, world in worlds.items():
        world.peers = Peers(name, STALE_US)
        world.policy = DivertPolicy(world.peers, 1.0)
    diverted = []
    for step in range(40):
        now_us = NOW_US + step * 100_000
        for name, world in worlds.items():
            world.now_us = now_us
            if step % 5 == 0:
                partitions = (1,) if world.policy.takes_diverted(now_us) else ()
                status = peer(name, written_at_us=now_us, overflow_partitions=partitions)
                for other in worlds.values():
                    other.now_us = now_us
                    other.hear(status)
        for world in worlds.values():
            world.policy.note_short(now_us)
            diverted.append((step, isinstance(world.choose(), Target)))
    assert any(is_so for step, is_so in diverted if step < 5)
    assert not any(is_so for step, is_so in diverted if step >= 5)


def test_when_one_has_time_again_it_takes_requests_again() -> None:
    world = World(peer("peer-1", overflow_partitions=()))
    assert world.choose() is NotDiverted.NO_PEER
    world.hear(STATUS)
    assert isinstance(world.choose(), Target)
