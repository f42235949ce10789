"""The finished offsets of a process, and whether its successor may use them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.cluster.topic_identity import TopicIdentity
from relaygr.consumer.finished import FinishedOffsets, is_plausible
from relaygr.consumer.watermark import Begin, Progress, TopicPartition, WatermarkTracker
from relaygr.runtime.errors import RelayError

IDENTITY = TopicIdentity("cluster-a", {"t.ranking": "id-1", "t.preinfer": "id-2"})
RANKING_0, RANKING_3 = TopicPartition("t.ranking", 0), TopicPartition("t.ranking", 3)


@dataclass
class Holder:
    """A lock with the members that `FinishedOffsets` uses."""

    arena_epoch: int
    holds: bool = True

    def is_held(self) -> bool:
        return self.holds


def open_log(folder: Path, epoch: int, identity: TopicIdentity = IDENTITY) -> FinishedOffsets:
    log = FinishedOffsets(folder / "finished", identity, 4, Holder(epoch))
    log.begin()
    return log


def leave(folder: Path, epoch: int = 1, finished: int = 120) -> None:
    """A process of this epoch notes an offset and dies without closing the file."""
    open_log(folder, epoch).note({RANKING_0: Progress(100, finished)})


def test_the_next_process_reads_what_the_one_before_noted(tmp_path: Path) -> None:
    log = open_log(tmp_path, 1)
    log.note({RANKING_0: Progress(100, 110), RANKING_3: Progress(7, 7)})
    log.note({RANKING_0: Progress(100, 120, 2**31 - 1, 2**40)})
    noted = {RANKING_0: Progress(100, 120, 2**31 - 1, 2**40), RANKING_3: Progress(7, 7)}
    assert open_log(tmp_path, 2).predecessor() == noted


def test_the_first_process_has_no_predecessor(tmp_path: Path) -> None:
    assert open_log(tmp_path, 1).predecessor() == {}


@pytest.mark.parametrize("epoch", [1, 3, 4])
def test_only_the_epoch_directly_before_expected(tmp_path: Path, epoch: int) -> None:
    leave(tmp_path, epoch=1)
    assert open_log(tmp_path, epoch).predecessor() == {}


def test_a_holder_that_noted_nothing_ends_the_line(tmp_path: Path) -> None:
    leave(tmp_path, epoch=1)
    open_log(tmp_path, 2)
    assert open_log(tmp_path, 3).predecessor() == {}


@pytest.mark.parametrize(
    "other",
    [
        replace(IDENTITY, cluster_id="cluster-b"),
        replace(IDENTITY, topic_ids={**IDENTITY.topic_ids, "t.ranking": "made anew"}),
        replace(IDENTITY, topic_ids={"other.ranking": "id-1", "t.preinfer": "id-2"}),
    ],
)
def test_another_cluster_or_topic_is_not_plausible(tmp_path: Path, other: TopicIdentity) -> None:
    leave(tmp_path)
    assert open_log(tmp_path, 2, other).predecessor() == {}
    # The offsets do not come back for the original cluster and topics either.
    assert open_log(tmp_path, 2).predecessor() == {}


def test_one_note_in_a_file_of_other_topics_is_enough_for_the_next(tmp_path: Path) -> None:
    """The note was once taken for older than a hundred notes for the other topics."""
    log = open_log(tmp_path, 1)
    for finished in range(100, 200):
        log.note({RANKING_0: Progress(100, finished)})
    others = replace(IDENTITY, cluster_id="cluster-b")
    open_log(tmp_path, 2, others).note({RANKING_0: Progress(5, 6)})
    assert open_log(tmp_path, 3, others).predecessor() == {RANKING_0: Progress(5, 6)}


def test_a_partition_that_went_to_another_owner_is_forgotten(tmp_path: Path) -> None:
    log = open_log(tmp_path, 1)
    log.note({RANKING_0: Progress(100, 120), RANKING_3: Progress(7, 9)})
    log.forget([RANKING_0])
    assert open_log(tmp_path, 2).predecessor() == {RANKING_3: Progress(7, 9)}


def test_a_process_without_the_lock_writes_nothing(tmp_path: Path) -> None:
    leave(tmp_path, epoch=1)
    woken = FinishedOffsets(tmp_path / "finished", IDENTITY, 4, Holder(2, holds=False))
    woken.note({RANKING_0: Progress(100, 999)})
    woken.forget([RANKING_0])
    with pytest.raises(ValueError, match="only the writer"):
        woken.begin()
    assert open_log(tmp_path, 2).predecessor() == {RANKING_0: Progress(100, 120)}


@given(torn=st.binary(min_size=0, max_size=47), finished=st.integers(121, 2**40))
def test_a_write_that_was_cut_short_leaves_the_one_before(
    tmp_path_factory: pytest.TempPathFactory, torn: bytes, finished: int
) -> None:
    """The copy that a dying process was writing starts with bytes of the new values and ends with old bytes."""
    folder = tmp_path_factory.mktemp("torn")
    leave(folder, finished=120)
    before = (folder / "finished").read_bytes()
    log = open_log(folder, 1)
    log.note({RANKING_0: Progress(100, finished)})
    after = (folder / "finished").read_bytes()
    [start, *_] = [at for at in range(len(before)) if before[at : at + 1] != after[at : at + 1]]
    at = start - (start - 4096) % 48
    (folder / "finished").write_bytes(before[:at] + after[at : at + len(torn)] + before[at + len(torn) :])
    found = open_log(folder, 2).predecessor()[RANKING_0]
    assert found in (Progress(100, 120), Progress(100, finished))


@given(st.binary(max_size=5000))
def test_foreign_bytes_are_read_as_nothing(tmp_path_factory: pytest.TempPathFactory, garbage: bytes) -> None:
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "finished").write_bytes(garbage)
    assert open_log(folder, 2).predecessor() == {}


def test_a_file_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "finished").symlink_to(tmp_path / "victim")
    with pytest.raises(RelayError, match="is a symbolic link"):
        open_log(tmp_path, 1)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_folder_that_is_not_there_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match=r"worker\.shared_path"):
        open_log(tmp_path / "nowhere", 1)


@pytest.mark.parametrize(
    ("committed", "end", "expected"),
    [
        (100, 200, True),
        (110, 120, True),
        (120, 120, True),
        (99, 200, False),  # The offset of the group was reset to before `start`.
        (121, 200, False),  # Another owner committed past it.
        (100, 119, False),  # The log ends earlier: it was truncated, or it is another log.
    ],
)
def test_it_must_lie_between_commit_and_end(committed: int, end: int, expected: bool) -> None:
    assert is_plausible(Progress(100, 120), committed, end) is expected


def test_a_file_of_an_earlier_version_is_no_predecessor(tmp_path: Path) -> None:
    """It has neither a leader epoch nor the time of a message."""
    leave(tmp_path)
    file = tmp_path / "finished"
    file.write_bytes(file.read_bytes().replace(b"relaygr.finish.3", b"relaygr.finish.2"))
    assert open_log(tmp_path, 2).predecessor() == {}
    leave(tmp_path, epoch=2)
    assert open_log(tmp_path, 3).predecessor() == {RANKING_0: Progress(100, 120)}


def test_offsets_assumed_finished_are_delivered_and_skipped() -> None:
    tracker = WatermarkTracker(100)
    tracker.assign({RANKING_0: 100})
    tracker.assume_finished({RANKING_0: Progress(100, 103)})
    assert [tracker.begin(RANKING_0, offset) for offset in range(100, 105)] == [Begin.FINISHED] * 3 + [Begin.NEW] * 2
    assert tracker.in_flight() == 2


def test_offsets_assumed_finished_are_committed_though_nothing_follows() -> None:
    tracker = WatermarkTracker(100)
    tracker.assign({RANKING_0: 100})
    tracker.assume_finished({RANKING_0: Progress(100, 103)})
    assert tracker.committable() == {RANKING_0: 103}
    assert tracker.progress([RANKING_0]) == {RANKING_0: Progress(100, 103)}


@pytest.mark.parametrize(
    ("leader_epoch", "time_ms", "begun"),
    [(4, 900, Begin.FINISHED), (3, 900, Begin.FINISHED), (5, 900, Begin.NEW), (4, 901, Begin.NEW)],
)
def test_a_message_that_came_after_those_of_the_predecessor_is_not_finished(
    leader_epoch: int, time_ms: int, begun: Begin
) -> None:
    """The log came back shorter, and grew beyond the finished offset."""
    tracker = WatermarkTracker(100)
    tracker.assign({RANKING_0: 100})
    tracker.assume_finished({RANKING_0: Progress(90, 103, 4, 900)})
    assert tracker.begin(RANKING_0, 100, 4, 900) is Begin.FINISHED
    assert tracker.begin(RANKING_0, 101, leader_epoch, time_ms) is begun
    assert tracker.begin(RANKING_0, 102, leader_epoch, time_ms) is begun
    assert tracker.begin(RANKING_0, 103, 9, 999) is Begin.NEW
    assert tracker.set_back() == ({RANKING_0: 101} if begun is Begin.NEW else {})


def test_progress_tells_the_highest_leader_epoch_and_the_latest_time_of_the_messages() -> None:
    """A successor's successor is told those of the predecessor, too: they may not be delivered again in between."""
    tracker = WatermarkTracker(100)
    tracker.assign({RANKING_0: 100, RANKING_3: 5})
    tracker.assume_finished({RANKING_0: Progress(90, 103, 4, 900)})
    assert tracker.progress([RANKING_0])[RANKING_0] == Progress(100, 103, 4, 900)
    for offset, epoch, time_ms in ((5, 1, 70), (6, 2, 60)):
        tracker.begin(RANKING_3, offset, epoch, time_ms)
    assert tracker.progress([RANKING_3])[RANKING_3] == Progress(5, 5, 2, 70)


def test_progress_is_the_contiguous_watermark_of_owned_partitions() -> None:
    tracker = WatermarkTracker(100)
    tracker.assign({RANKING_0: 5, RANKING_3: None})
    for offset in (5, 6, 7):
        tracker.begin(RANKING_0, offset)
    tracker.finish(RANKING_0, 5, 0)
    tracker.finish(RANKING_0, 7, 0)
    assert tracker.progress([RANKING_0, RANKING_3]) == {RANKING_0: Progress(5, 6)}
    tracker.revoke([RANKING_0])
    assert tracker.progress([RANKING_0]) == {}
