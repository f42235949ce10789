"""Files that are replaced as a whole: a full disk keeps the old content, and none of the new one's space."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaygr.runtime.files import removed_on_failure, write_whole
from tests.worlds.disk import fill


def test_a_full_disk_leaves_the_old_file_and_no_part_of_the_new_one(small_disk: Path) -> None:
    write_whole(small_disk / "known.json", b"old")
    filler = fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        write_whole(small_disk / "known.json", bytes(70_000))
    assert {path.name for path in small_disk.iterdir()} == {"known.json", filler.name}
    assert (small_disk / "known.json").read_bytes() == b"old"
    filler.unlink()
    write_whole(small_disk / "known.json", bytes(70_000))
    assert [path.name for path in small_disk.iterdir()] == ["known.json"]


def test_what_a_block_wrote_stays_unless_it_fails(tmp_path: Path) -> None:
    with removed_on_failure(tmp_path / "good"):
        (tmp_path / "good").touch()
    with pytest.raises(KeyboardInterrupt), removed_on_failure(tmp_path / "bad"):
        (tmp_path / "bad").touch()
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="first"), removed_on_failure(tmp_path / "never"):
        raise OSError("first")
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
