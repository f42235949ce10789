"""Which requests an overloaded worker passes on, to whom, and with how much history."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.admission.divert import (
    BURST,
    CACHED_FOR_US,
    CALM_US,
    EXAMINED_PEERS,
    MOST_PEERS,
    NEAR_US,
    PLACES_OF_A_USER,
    SHORT_REQUESTS,
    SHORT_WITHIN_US,
    USED_SHARE,
    DivertOutcome,
    DivertPolicy,
    Need,
    Peers,
    Placements,
    Target,
)
from relaygr.admission.worker_table import NoRoomError
from relaygr.schemas.fields import Other
from relaygr.schemas.messages import FullPathReport, LatencyCoefficients, WorkerState, WorkerStatus

NOW_US = 1_700_000_000_000_000
STALE_US = 1_500_000
HOUR_US = 3_600_000_000
TOKEN_US = 10
LATENCY = LatencyCoefficients(0, TOKEN_US, 0, 0, TOKEN_US, 0, 0, 0, 0, 0, 0)
STATUS = WorkerStatus(
    worker_id="peer-1", state=WorkerState.READY, written_at_us=NOW_US, assignment_epoch=1, partitions=(),
    model_revision="model", kv_bytes_per_token=1, contextual_tokens=0, tokens_per_behaviour=1,
    max_prefix_behaviours=4096, hbm_capacity_bytes=1, hbm_free_bytes=1, dram_capacity_bytes=0, dram_free_bytes=0,
    ranking_queue_p99_us=0, preinfer_queue_us=0, latency=LATENCY, ranking_backlog_us=0, overflow_partitions=(4, 9),
)  # fmt: skip
NEED = Need(
    user_id="u", left_us=50_000, transit_us=5_000, behaviours=1_000, most_behaviours=10_000, kept_behaviours=0,
    suffix=0, candidates=0,
)  # fmt: skip
"""Full inference takes 10 ms at a peer of the usual speed."""
NEED_WAY_US = 5_000


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

    def choose(self, need: Need = NEED, received: int = 0, *, is_delivered: bool = True) -> Target | DivertOutcome:
        """One more request, and so many others, were received."""
        self.received += 1 + received
        chosen = self.policy.choose(need, "model", self.received, self.now_us)
        if is_delivered and isinstance(chosen, Target) and chosen.placed is not None:
            self.policy.placements.note(need.user_id, chosen.placed)
        return chosen


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
    assert world.policy.objection("model", 1, NOW_US) is DivertOutcome.NO_PEER, name
    assert world.choose() is DivertOutcome.NO_PEER


def test_a_tombstone_ends_a_peer() -> None:
    world = World(STATUS)
    world.peers.apply("peer-1", None, NOW_US)
    assert world.choose() is DivertOutcome.NO_PEER


@pytest.mark.parametrize(
    ("changes", "is_diverted"),
    [
        ({}, True),
        # 5 ms of way, 10 ms of work, and at most three quarters of 50 ms in all.
        ({"ranking_backlog_us": 22_500}, True),
        ({"ranking_backlog_us": 22_501}, False),
        ({"latency": replace(LATENCY, a1=32.0, b1=32.0)}, True),
        ({"latency": replace(LATENCY, a1=33.0, b1=33.0)}, False),
        ({"full_path": FullPathReport(0, (0.0,) * 10 + (3.0,), (), (), ()), "ranking_backlog_us": 2_000}, True),
        ({"full_path": FullPathReport(0, (0.0,) * 10 + (3.5,), (), (), ()), "ranking_backlog_us": 2_000}, False),
    ],
)
def test_a_request_goes_only_where_three_quarters_of_its_time_are_enough(
    changes: dict[str, object], is_diverted: bool
) -> None:
    chosen = World(peer("peer-1", **changes)).choose()
    assert isinstance(chosen, Target) is is_diverted
    assert is_diverted or chosen is DivertOutcome.NO_TIME


def test_a_request_without_time_for_the_way_is_not_diverted() -> None:
    assert World(STATUS).choose(replace(NEED, left_us=4_999)) is DivertOutcome.NO_TIME


@pytest.mark.parametrize("kept", [0, 600])
def test_a_history_is_never_cut_to_save_time(kept: int) -> None:
    assert World(STATUS).choose(replace(NEED, left_us=19_999, kept_behaviours=kept)) is DivertOutcome.NO_TIME
    assert isinstance(World(STATUS).choose(replace(NEED, left_us=20_000, kept_behaviours=kept)), Target)


def test_a_history_that_is_larger_than_the_message_may_be_is_cut_to_its_newest_part() -> None:
    chosen = World(STATUS).choose(replace(NEED, most_behaviours=700))
    assert isinstance(chosen, Target) and chosen.behaviours == 700


@pytest.mark.parametrize(
    ("fits", "kept", "is_diverted"), [(200, 0, True), (199, 0, False), (600, 599, True), (600, 600, False)]
)
def test_a_cut_history_is_diverted_if_enough_is_left_and_more_than_here(
    fits: int, kept: int, is_diverted: bool
) -> None:
    chosen = World(STATUS).choose(replace(NEED, most_behaviours=fits, kept_behaviours=kept))
    assert isinstance(chosen, Target) if is_diverted else chosen is DivertOutcome.TOO_LARGE


def test_a_user_without_a_history_is_diverted_too() -> None:
    chosen = World(STATUS).choose(replace(NEED, behaviours=0))
    assert isinstance(chosen, Target) and chosen.behaviours == 0


def sending(world: World) -> Iterator[bool]:
    """Whether the request of one further user after the other is diverted."""
    for number in itertools.count():
        yield isinstance(world.choose(replace(NEED, user_id=f"u{number}")), Target)


def test_what_was_sent_to_a_peer_counts_until_its_next_status_or_until_it_can_be_done() -> None:
    """Of 37.5 ms, 5 are the way. Full inference of another user takes 10."""
    world = World(STATUS, share=1.0)
    sent = sending(world)
    assert [next(sent) for _ in range(4)] == [True, True, True, False]
    world.now_us += NEED_WAY_US + 7_500
    assert next(sent) and not next(sent)
    world.now_us += NEED_WAY_US
    world.hear(peer("peer-1", written_at_us=world.now_us))
    assert [next(sent) for _ in range(4)] == [True, True, True, False]


def test_what_was_sent_before_the_clock_was_set_back_counts_no_more() -> None:
    world = World(STATUS, share=1.0)
    sent = sending(world)
    assert [next(sent) for _ in range(4)] == [True, True, True, False]
    world.now_us -= HOUR_US
    for _ in range(3):
        world.hear(peer("peer-1", written_at_us=world.now_us))
        assert [next(sent) for _ in range(4)] == [True, True, True, False]
        world.now_us += 1_000_000


# -- prefixes that a peer has ----------------------------------------------------------------------


HIT = replace(LATENCY, b1=TOKEN_US, c0=1_000.0)
"""A hit takes 1 ms, full inference 11."""


def lightly(world: World, need: Need = NEED) -> bool:
    """Whether a request fits that has time for a hit, and not for full inference."""
    return isinstance(world.choose(replace(need, left_us=10_000)), Target)


def settled(world: World, **changes: object) -> None:
    """A second later: what was sent is done, and the peer says so."""
    world.now_us += 1_000_000
    world.hear(peer("peer-1", **({"written_at_us": world.now_us, "latency": HIT, "active_since_us": 7} | changes)))


def world_with_a_prefix() -> World:
    world = World(peer("peer-1", latency=HIT, active_since_us=7), share=1.0)
    assert not lightly(world)
    assert isinstance(world.choose(), Target)
    settled(world)
    return world


def test_a_users_prefix_counts_as_a_hit_at_the_peer_that_it_was_sent_to() -> None:
    world = world_with_a_prefix()
    assert lightly(world)
    assert not lightly(world, replace(NEED, user_id="another"))


def test_a_burst_of_a_user_is_charged_once_in_full_and_then_as_hits() -> None:
    world = World(peer("peer-1", latency=HIT), share=1.0)
    assert [isinstance(world.choose(), Target) for _ in range(23)] == [True] * 22 + [False]


@pytest.mark.parametrize(("more", "is_in_time"), [(150, True), (151, False)])
def test_a_history_that_grew_is_charged_as_an_append(more: int, is_in_time: bool) -> None:
    """7.5 ms: 5 for the way, 1 for the hit, and 10 µs for each new behaviour."""
    world = world_with_a_prefix()
    assert lightly(world, replace(NEED, behaviours=NEED.behaviours + more)) is is_in_time


@pytest.mark.parametrize(
    "changes",
    [{"active_since_us": 8}, {"active_since_us": None}, {"reuses_prefixes": False}],
    ids=["its process is another", "its process is not known", "its model keeps no prefixes"],
)
def test_a_peer_has_no_prefix_any_more_if(changes: dict[str, object]) -> None:
    world = world_with_a_prefix()
    settled(world, **changes)
    assert not lightly(world)


def test_a_peer_that_serves_another_model_has_no_prefix() -> None:
    world = world_with_a_prefix()
    settled(world, model_revision="other")
    world.received += 1
    need = replace(NEED, left_us=10_000)
    assert world.policy.choose(need, "other", world.received, world.now_us) is DivertOutcome.NO_TIME


def test_a_prefix_of_another_lineage_or_of_a_cut_history_is_no_hit() -> None:
    world = world_with_a_prefix()
    assert not lightly(world, replace(NEED, lineage=b"other features"))
    world = World(peer("peer-1", latency=HIT, active_since_us=7), share=1.0)
    assert isinstance(world.choose(replace(NEED, most_behaviours=900)), Target)
    settled(world)
    assert not lightly(world)


def test_a_prefix_counts_for_a_while_only_however_often_it_is_used() -> None:
    """A peer may have evicted it, or may have refused the request that it came with."""
    world = world_with_a_prefix()
    for _ in range(3):
        world.now_us += CACHED_FOR_US // 3 - 2_000_000
        settled(world)
        assert lightly(world)
    world.now_us += 5_000_000
    settled(world)
    assert not lightly(world)


def test_a_prefix_from_before_the_clock_was_set_back_counts_no_more() -> None:
    """Its age is not known."""
    world = world_with_a_prefix()
    world.now_us -= HOUR_US
    settled(world)
    assert not lightly(world)
    assert isinstance(world.choose(), Target)
    settled(world)
    assert lightly(world)


def test_a_request_that_was_not_delivered_leaves_no_prefix() -> None:
    world = World(peer("peer-1", latency=HIT, active_since_us=7), share=1.0)
    assert isinstance(world.choose(is_delivered=False), Target)
    settled(world)
    assert not lightly(world)


def test_a_users_next_requests_go_to_the_peer_with_the_prefix_also_if_another_is_idle() -> None:
    world = World(peer("peer-1", latency=HIT), peer("peer-2", ranking_backlog_us=20_000, latency=HIT), share=1.0)
    assert isinstance(first := world.choose(), Target) and first.worker_id == "peer-1"
    world.now_us += 500_000
    for name, backlog_us in (("peer-1", 25_000), ("peer-2", 0)):
        world.hear(peer(name, written_at_us=world.now_us, ranking_backlog_us=backlog_us, latency=HIT))
    assert isinstance(second := world.choose(), Target) and second.worker_id == "peer-1"
    for name, backlog_us in (("peer-1", 40_000), ("peer-2", 0)):
        world.hear(peer(name, written_at_us=world.now_us, ranking_backlog_us=backlog_us, latency=HIT))
    assert isinstance(third := world.choose(), Target) and third.worker_id == "peer-2"


def test_a_peer_with_the_prefix_is_found_among_many_idle_ones() -> None:
    idle = [peer(f"idle-{number}", ranking_backlog_us=1, latency=HIT) for number in range(2 * EXAMINED_PEERS)]
    world = World(peer("peer-1", latency=HIT), share=1.0)
    assert isinstance(world.choose(), Target)
    world.now_us += 100_000
    for each in (*idle, peer("peer-1", ranking_backlog_us=10_000, latency=HIT)):
        world.hear(replace(each, written_at_us=world.now_us))
    assert isinstance(chosen := world.choose(), Target) and chosen.worker_id == "peer-1"


def test_made_up_peers_leave_no_place_empty_and_keep_no_real_one_out_once_they_are_silent() -> None:
    """A peer that was once heard kept its place for ever, also when it was gone."""
    peers, refused = Peers("own", STALE_US), 0
    peers.apply("peer-1", peer("peer-1"), NOW_US)
    for number in range(MOST_PEERS + 60):
        try:
            peers.apply(f"made-up-{number}", peer(f"made-up-{number}", partitions=tuple(range(900))), NOW_US)
        except NoRoomError:
            refused += 1
    assert refused == 61 and len(alive := peers.alive("model", NOW_US)) == MOST_PEERS
    assert "peer-1" in {each.view.worker_id for each in alive}
    assert not any(each.view.partitions for each in alive), "they are not needed, and may be many"
    later_us = NOW_US + STALE_US + 1
    peers.apply("peer-2", peer("peer-2", written_at_us=later_us), later_us)
    assert [each.view.worker_id for each in peers.alive("model", later_us)] == ["peer-2"]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=300))
def test_what_is_remembered_of_users_is_bounded_and_the_oldest_goes_first(sent: list[tuple[int, int]]) -> None:
    most = 8
    placements = Placements(most)
    peers = Peers("own", STALE_US)
    for number in range(6):
        peers.apply(f"peer-{number}", peer(f"peer-{number}"), NOW_US)
    alive = peers.alive("model", NOW_US)
    for user, number in sent:
        placements.note(str(user), placements.placed(replace(NEED, user_id=str(user)), alive[number], NOW_US))
        assert len(placements) <= most
        assert placements.workers(str(user))[0] == f"peer-{number}"
        assert len(set(placements.workers(str(user)))) <= PLACES_OF_A_USER
    last = list(dict.fromkeys(str(user) for user, _ in reversed(sent)))[:most]
    assert all(placements.workers(user) for user in last)


needs = st.builds(
    Need,
    user_id=st.sampled_from(["a", "b", "c"]),
    left_us=st.floats(0, 200_000),
    transit_us=st.floats(0, 20_000),
    behaviours=st.integers(0, 4_096),
    most_behaviours=st.integers(0, 8_192),
    kept_behaviours=st.integers(0, 4_096),
    suffix=st.integers(0, 64),
    candidates=st.integers(0, 512),
    lineage=st.sampled_from([b"x", b"y"]),
)


@given(
    st.lists(st.tuples(needs, st.integers(0, 300_000)), max_size=40),
    st.lists(st.integers(0, 100_000), min_size=1, max_size=6),
)
def test_no_peer_is_sent_more_than_it_can_do_in_time(requests: list[tuple[Need, int]], backlogs_us: list[int]) -> None:
    """Whatever is asked: the chosen peer could do all the backlog it told of and the request as a hit, within three
    quarters of the time, and no history is cut but for the size of the message.
    """
    world = World(share=1.0)
    told = {f"peer-{number}": backlog_us for number, backlog_us in enumerate(backlogs_us)}
    for need, later_us in requests:
        world.now_us += later_us
        for name, backlog_us in told.items():
            status = peer(name, written_at_us=world.now_us, ranking_backlog_us=backlog_us, latency=HIT)
            world.hear(status)
        chosen = world.choose(need, received=1_000)
        if isinstance(chosen, Target):
            assert chosen.behaviours == min(need.behaviours, need.most_behaviours)
            assert need.transit_us + told[chosen.worker_id] + 1_000 <= USED_SHARE * need.left_us


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
    assert DivertOutcome.SHARE in [world.choose() for _ in range(2)]
    assert world.policy.objection("model", world.received, world.now_us) is DivertOutcome.SHARE


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
    assert world.choose() is DivertOutcome.NO_PEER
    world.hear(STATUS)
    assert isinstance(world.choose(), Target)
