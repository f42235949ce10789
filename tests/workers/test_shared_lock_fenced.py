"""The note of a holder that was fenced: who heeds it, and who does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaygr.worker.shared.lock import ArenaLock, note_fenced, predecessor_was_fenced


def next_holder(folder: Path, *, is_fenced: bool = False) -> bool:
    """One life; whether its predecessor had left a note."""
    lock = ArenaLock(folder)
    lock.acquire()
    found = predecessor_was_fenced(folder, lock)
    if is_fenced:
        note_fenced(folder, lock)
    lock.release()
    return found


def test_the_one_directly_after_a_fenced_holder_knows_and_nobody_later(tmp_path: Path) -> None:
    assert not next_holder(tmp_path, is_fenced=True)
    assert next_holder(tmp_path)
    assert not next_holder(tmp_path)


def test_who_does_not_hold_the_lock_leaves_no_note(tmp_path: Path) -> None:
    note_fenced(tmp_path, ArenaLock(tmp_path))
    assert not next_holder(tmp_path)


@pytest.mark.parametrize("torn", [b"", b"\xff", b"two"])
def test_a_note_that_can_not_be_read_is_none(tmp_path: Path, torn: bytes) -> None:
    next_holder(tmp_path, is_fenced=True)
    (tmp_path / "fenced").write_bytes(torn)
    assert not next_holder(tmp_path)
