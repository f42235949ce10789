"""Logs that cannot be trained on are refused with a sentence, and splits keep to the order of time."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.ingest.log_map import LogMap
from relaygr.ingest.reading import read_interactions
from relaygr.runtime.errors import RelayError
from relaygr.training.logs import MIN_BEHAVIOURS, Log, Ties, usable
from relaygr.training.options import Protocol
from relaygr.training.ranker import Size, ranker_config
from relaygr.training.splits import Part, Split, split_log
from tests.training.made_logs import cyclic_log


def log_of(lengths: list[int], items: list[int] | None = None) -> Log:
    total = sum(lengths)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    ids = np.arange(total) if items is None else np.array(items)
    times = np.concatenate([np.arange(count) for count in lengths]) * 1000
    actions = np.full(total, 8, np.uint16)
    return Log([f"u{i}" for i in range(len(lengths))], starts, ids.astype(np.int64), actions, times, True, True)


def test_a_log_without_times_is_refused() -> None:
    with pytest.raises(RelayError, match=r"no time of the behaviours.*--columns time=NAME"):
        usable(replace(log_of([9, 9]), has_times=False))


def test_a_log_with_one_row_for_each_user_is_refused() -> None:
    with pytest.raises(RelayError, match="4 behaviours of 4 users, and no user has 5"):
        usable(log_of([1, 1, 1, 1]))


def test_a_log_whose_times_say_nothing_is_refused() -> None:
    log = log_of([9, 9])
    with pytest.raises(RelayError, match="same time"):
        usable(replace(log, times_ms=np.zeros_like(log.times_ms)))


def test_users_with_few_behaviours_are_left_out_and_the_others_kept_whole() -> None:
    log = usable(log_of([4, 7, 1, 6]))
    assert log.users == ["u1", "u3"] and log.lengths.tolist() == [7, 6]
    assert log.items.tolist() == [*range(4, 11), *range(12, 18)]


def test_an_unsorted_log_is_sorted_and_ties_keep_the_order_of_the_file_if_asked(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "unsorted.inter"
    header = "user_id:token\titem_id:token\ttimestamp:float\n"
    path.write_text(header + "".join(f"a\t{item}\t{time}\n" for item, time in [(1, 9e8 + 5), (2, 9e8), (3, 9e8 + 5)]))
    read = read_interactions(path, log_map=LogMap(ties=Ties.FILE))
    assert read.behaviours.items.tolist() == [2, 1, 3]


def rated(counts: dict[int, int]) -> Split:
    """The split of one user with these codes, each so often."""
    codes = np.repeat(list(counts), list(counts.values())).astype(np.uint16)
    shuffled = np.random.default_rng(2).permutation(codes)
    return split_log(replace(log_of([codes.size]), actions=shuffled), Protocol.TIME)


@pytest.mark.parametrize(
    ("counts", "has_liked", "said"),
    [
        ({2: 40, 10: 40}, True, ""),
        ({0: 500, 2: 500}, False, "0.0% of the ratings"),
        ({40: 500, 200: 500}, False, "100.0% of the ratings"),
        ({0: 3999, 10: 1}, False, "ratings to train on are at least 4"),
        ({6: 20, 14: 20, 20: 20}, True, "Ratings go up to 10"),
    ],
    ids=["stars", "0 and 1", "20 to 100", "one stray", "ten stars"],
)
def test_liked_is_a_task_only_if_it_is_no_constant(counts: dict[int, int], has_liked: bool, said: str) -> None:
    split = rated(counts)
    assert split.has_liked == has_liked
    assert said in split.liked_note() and bool(said) == bool(split.liked_note())
    assert (
        "liked" in [task.name for task in ranker_config(split, Size(dim=16, heads=1, layers=1, max_history=64)).tasks]
    ) == has_liked


def test_a_note_says_that_most_behaviours_have_no_order_and_what_ordered_them() -> None:
    log = log_of([8, 8])
    assert log.ties_note() == ""
    tied = replace(log, times_ms=log.times_ms // 2000)
    assert "100% of the behaviours share" in tied.ties_note() and "by a hash of the row" in tied.ties_note()
    assert "as in the file" in replace(tied, ties=Ties.FILE).ties_note()
    half = replace(log, times_ms=np.array([0, 0, 1, 1, 2, 3, 4, 5] * 2))
    assert half.ties_share() == 0.5 and half.ties_note() == "", "not most"


OF_EACH_USER = (Protocol.TIME, Protocol.LEAVE_ONE_OUT)


@given(st.lists(st.integers(MIN_BEHAVIOURS, 60), min_size=1, max_size=8), st.sampled_from(OF_EACH_USER))
def test_the_parts_of_a_user_follow_each_other_and_none_is_empty(lengths: list[int], protocol: Protocol) -> None:
    split = split_log(log_of(lengths), protocol)
    for user, length in enumerate(lengths):
        start, end = int(split.starts[user]), int(split.starts[user + 1])
        train, validation = int(split.train_ends[user]), int(split.validation_ends[user])
        assert start < train < validation < end
        held = max(1, length // 10) if protocol is Protocol.TIME else 1
        assert (validation - train, end - validation) == (held, held)
        assert split.targets(user, Part.VALIDATION) == slice(train, validation)
        assert split.targets(user, Part.TEST) == slice(validation, end)
        assert split.history_end(user, Part.TEST) == validation
    assert all(split.judged_users(part).tolist() == list(range(len(lengths))) for part in Part)


def log_at(times_s: list[list[int]], items: list[int] | None = None) -> Log:
    """A log of users with these times, each in order."""
    log = log_of([len(own) for own in times_s], items)
    return replace(log, times_ms=1000 * np.concatenate([np.sort(own) for own in times_s]))


@given(
    st.lists(st.lists(st.integers(0, 40), min_size=MIN_BEHAVIOURS, max_size=60), min_size=2, max_size=8),
    st.integers(1, 5),
)
def test_at_one_time_for_all_nothing_learnt_or_in_a_history_is_as_late_as_what_judges_it(
    times_s: list[list[int]], step: int
) -> None:
    log = log_at([[each // step * step for each in own] for own in times_s])
    try:
        split = split_log(log, Protocol.GLOBAL_TIME)
    except RelayError:
        return
    users = range(len(log.users))
    trained = log.times_ms[split.training_places()]
    for part, cut_ms in zip(Part, split.cuts_ms or (), strict=True):
        histories = [log.times_ms[split.starts[user] : split.history_end(user, part)] for user in users]
        targets = np.concatenate([log.times_ms[split.targets(user, part)] for user in users])
        assert max(trained.max(), np.concatenate(histories).max()) < cut_ms <= targets.min()
        both = [user for user in users if histories[user].size and log.times_ms[split.targets(user, part)].size]
        assert split.judged_users(part).tolist() == both != []
    assert sorted(log.times_ms)[len(log.items) * 8 // 10] == split.cuts_ms[0]  # type: ignore[index]


def test_what_is_counted_of_a_log_split_at_one_time_does_not_depend_on_later_behaviours() -> None:
    times_s = [list(range(0, 100, 2)), list(range(1, 100, 2)), list(range(88, 98))]
    items = list(range(50)) + list(range(25, 75)) + list(range(10))
    log = log_at(times_s, items)
    before = split_log(log, Protocol.GLOBAL_TIME)
    later = log.times_ms >= before.cuts_ms[0]  # type: ignore[index]
    other = replace(log, items=np.where(later, 999, log.items), actions=np.where(later, 2, log.actions))
    after = split_log(other, Protocol.GLOBAL_TIME)
    assert before.item_ids.tolist() == after.item_ids.tolist() and 999 not in after.item_ids
    assert (before.liked_share, before.num_actions) == (after.liked_share, after.num_actions)
    assert before.rows[before.training_places()].tolist() == after.rows[after.training_places()].tolist()
    assert 2 not in before.judged_users(Part.VALIDATION), "who came later has no history there"


@pytest.mark.parametrize(
    ("times_s", "why"),
    [
        ([list(range(80)), list(range(80, 100))], "no user has behaviours in the validation part and before it"),
        ([[0] * 5 + [9] * 95, list(range(1, 6))], "no user has behaviours in the validation part and before it"),
        ([[7] * 50, [7] * 49 + [8]], "no user has two behaviours in the training part"),
        ([list(range(90)), *([at] for at in range(90, 105))], "no user has behaviours in the test part and before it"),
    ],
    ids=["two generations", "coarse", "one time", "none stays"],
)
def test_a_log_that_no_time_splits_is_refused_with_the_protocol_that_does(times_s: list[list[int]], why: str) -> None:
    with pytest.raises(RelayError, match=f"{why}.*use --protocol time"):
        split_log(log_at(times_s), Protocol.GLOBAL_TIME)


def test_items_outside_the_training_part_have_the_row_of_unknown_items() -> None:
    split = split_log(log_of([10], [5, 6, 5, 6, 5, 6, 5, 6, 7, 8]), Protocol.TIME)
    assert split.item_ids.tolist() == [5, 6]
    assert split.rows.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 2, 2]


def test_whether_users_repeat_items_is_counted_in_the_training_part() -> None:
    repeating = split_log(cyclic_log(), Protocol.TIME)
    assert repeating.repeats_share > 0.1 and not repeating.leaves_out_seen
    once = split_log(log_of([20, 20]), Protocol.TIME)
    assert once.repeats_share == 0.0 and once.leaves_out_seen


def test_the_digest_of_a_log_depends_on_every_column() -> None:
    log = log_of([6, 6])
    others = [
        replace(log, items=log.items + 1),
        replace(log, actions=log.actions + np.uint16(1)),
        replace(log, times_ms=log.times_ms + 1),
        replace(log, users=["a", "b"]),
    ]
    assert len({log.digest(), *(other.digest() for other in others)}) == 5
    assert log_of([6, 6]).digest() == log.digest()


def test_the_share_of_ties_counts_neighbours_of_the_same_user_only() -> None:
    log = log_of([3, 3])
    assert log.ties_share() == 0.0
    assert replace(log, times_ms=np.array([0, 0, 1, 1, 2, 3])).ties_share() == pytest.approx(2 / 6)


def test_the_memory_of_a_split_is_bounded_for_each_row() -> None:
    """Reading takes about 70 bytes a row (`relaygr.ingest`); the split stays near that."""
    log = log_of([1000] * 200, np.random.default_rng(0).integers(0, 5000, 200_000).tolist())
    tracemalloc.start()
    split = split_log(usable(log), Protocol.TIME)
    split.training_places()
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes / len(log.items) < 100
