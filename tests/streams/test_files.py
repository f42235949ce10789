"""Files that are replaced as a whole: a full disk keeps the old content, and none of the new one's space."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest

from relaygr.runtime import files
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


def test_of_two_that_write_a_file_at_once_both_end_and_the_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sync = tmp_path / "known.json", files._sync
    others = [b"second" * 10]

    def another_comes(*arguments: object) -> None:
        if others:
            write_whole(path, others.pop())
        sync(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "_sync", another_comes)
    write_whole(path, b"first")
    assert path.read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["known.json"]


def test_what_is_no_file_is_written_and_not_replaced(tmp_path: Path) -> None:
    """A pipe here; of /dev/null, each process of the machine would miss it."""
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    write_whole(tmp_path / "pipe", b"content")
    reader.join()
    assert read == [b"content"]
    assert [each.is_fifo() for each in tmp_path.iterdir()] == [True]


def test_a_link_stays_and_its_file_gets_the_content(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "known.json").symlink_to("shared/known.json")
    for content in (b"first", b"second"):
        write_whole(tmp_path / "known.json", content)
        assert (tmp_path / "shared" / "known.json").read_bytes() == content
    assert (tmp_path / "known.json").is_symlink()


def test_what_a_block_wrote_stays_unless_it_fails(tmp_path: Path) -> None:
    with removed_on_failure(tmp_path / "good"):
        (tmp_path / "good").touch()
    with pytest.raises(KeyboardInterrupt), removed_on_failure(tmp_path / "bad"):
        (tmp_path / "bad").touch()
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="first"), removed_on_failure(tmp_path / "never"):
        raise OSError("first")
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
