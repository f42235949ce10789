"""Private folders and files: only this user can read them, and what another user made or linked is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import (
    make_private,
    open_private,
    private_folder,
    private_folders,
    write_private,
)
from relaygr.worker.history.store import LEAST_BYTES, HistoryStore

SETTING = "worker.shared_path"


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def as_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, everything that exists belongs to another user than this process's."""
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_every_part_of_a_new_folder_is_private_whatever_the_umask(tmp_path: Path) -> None:
    made = private_folders(tmp_path / "new", "group", "worker-00", setting=SETTING)
    assert made == tmp_path / "new" / "group" / "worker-00"
    assert [mode_of(path) for path in (tmp_path / "new", made.parent, made)] == [0o700] * 3


def test_a_part_that_others_may_read_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "group").mkdir(mode=0o775)
    private_folders(tmp_path, "group", setting=SETTING)
    assert mode_of(tmp_path / "group") == 0o700


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o1777)
    private_folders(tmp_path, "relaygr-me", setting=SETTING)
    as_another_user(monkeypatch)
    with pytest.raises(RelayError, match=rf"belongs to user \d+, not to user \d+ .*`{SETTING}`"):
        private_folder(tmp_path / "relaygr-me", SETTING)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_part_that_every_user_may_write_is_refused(tmp_path: Path, part: int) -> None:
    names = ("relaygr-me", "group", "worker-00")
    path = private_folders(tmp_path, *names[: part + 1], setting=SETTING)
    path.chmod(0o777)
    with pytest.raises(RelayError, match=rf"{names[part]} may be written by every user"):
        private_folders(tmp_path, *names, setting=SETTING)


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_is_a_link_is_refused_and_its_target_unchanged(tmp_path: Path, part: int) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    names = ("relaygr-me", "group")
    folder = private_folders(tmp_path, *names[:part], setting=SETTING)
    (folder / names[part]).symlink_to(victim)
    with pytest.raises(RelayError, match=f"{names[part]} is a symbolic link"):
        private_folders(tmp_path, *names, setting=SETTING)
    assert mode_of(victim) == 0o755 and list(victim.iterdir()) == []


def test_a_base_that_every_user_may_write_is_used_only_if_it_is_sticky(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    private_folders(tmp_path, "group", setting=SETTING)
    tmp_path.chmod(0o777)
    with pytest.raises(RelayError, match="may be written by every user"):
        private_folders(tmp_path, "group", setting=SETTING)


ANOTHER = 4321
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
USES: list[Callable[[Path], object]] = [
    lambda path: private_folder(path, SETTING),
    lambda path: private_folders(path.parent, path.name, setting=SETTING),
    lambda path: HistoryStore.open(path, LEAST_BYTES).close(),
]
"""Uses of a private folder."""


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("below", ["kept", "own/kept", "own/deeper/kept"])
def test_a_folder_below_one_that_every_user_may_write_is_refused(
    tmp_path: Path, below: str, use: Callable[[Path], object]
) -> None:
    """Any user could rename the folder, and put another in its place."""
    (tmp_path / "open").mkdir(mode=0o777)
    for each in reversed(Path(below).parents):
        (tmp_path / "open" / each).mkdir(mode=0o700, exist_ok=True)
    with pytest.raises(RelayError, match=r"/open may be written by every user.*set `worker\.\w+` to a folder"):
        use(tmp_path / "open" / below)
    assert not (tmp_path / "open" / below).exists()
    (tmp_path / "open").chmod(0o1777)
    use(tmp_path / "open" / below)


@NEEDS_ROOT
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777], ids=oct)
@pytest.mark.parametrize("below", ["kept", "own/kept"])
def test_a_folder_in_that_of_another_user_is_refused(
    tmp_path: Path, mode: int, below: str, use: Callable[[Path], object]
) -> None:
    theirs = tmp_path / "theirs"
    for each in (*reversed(Path(below).parents), Path(below)):
        (theirs / each).mkdir(mode=0o700)
    theirs.chmod(mode)
    os.chown(theirs, ANOTHER, ANOTHER)
    with pytest.raises(RelayError, match=f"/theirs belongs to user {ANOTHER}"):
        use(theirs / below)
    os.chown(theirs, 0, 0)
    theirs.chmod(0o755)
    use(theirs / below)


@NEEDS_ROOT
def test_a_folder_behind_the_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    private_folder(tmp_path / "link" / "kept", SETTING)
    os.chown(tmp_path / "link", ANOTHER, ANOTHER, follow_symlinks=False)
    with pytest.raises(RelayError, match=f"/link belongs to user {ANOTHER}"):
        private_folder(tmp_path / "link" / "kept", SETTING)


def test_a_folder_behind_a_link_that_every_user_may_exchange_is_refused(tmp_path: Path) -> None:
    """Of two links, the second one lies in an open folder, and neither the name nor the real folder shows it."""
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "open" / "hop").symlink_to("../real")
    (tmp_path / "link").symlink_to(tmp_path / "open" / "hop")
    private_folder(tmp_path / "link" / "kept", SETTING)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(RelayError, match="/open may be written by every user"):
        private_folder(tmp_path / "link" / "kept", SETTING)


def test_missing_folders_above_are_made_so_that_others_can_not_write_them(tmp_path: Path) -> None:
    private_folder(tmp_path / "new" / "deeper" / "kept", SETTING)
    assert [mode_of(path) for path in (tmp_path / "new", tmp_path / "new" / "deeper")] == [0o755] * 2


def test_a_folder_that_can_not_be_created_is_reported_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RelayError, match=rf"file/folder cannot be used .*`{SETTING}`"):
        private_folder(tmp_path / "file" / "folder", SETTING)


def test_a_file_is_private_and_its_content_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "epoch"
    path.write_text("a longer text than the next")
    path.chmod(0o644)
    write_private(path, "7\n")
    assert path.read_text() == "7\n" and mode_of(path) == 0o600


def linked(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def hard_linked(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def a_pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "fault"),
    [(linked, "is a symbolic link"), (hard_linked, "a hard link"), (a_pipe, "is not a regular file")],
)
def test_a_file_that_leads_elsewhere_is_refused_and_the_victim_unchanged(
    tmp_path: Path, make: Callable[[Path, Path], None], fault: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    make(tmp_path / "lock", victim)
    uses: list[Callable[[Path], object]] = [
        make_private,
        lambda path: write_private(path, "1\n"),
        lambda path: open_private(path, os.O_RDWR | os.O_CREAT),
    ]
    for use in uses:
        with pytest.raises(RelayError, match=fault):
            use(tmp_path / "lock")
    assert victim.read_text() == "precious" and mode_of(victim) == 0o666


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock").touch()
    as_another_user(monkeypatch)
    for use in (make_private, lambda path: open_private(path, os.O_RDWR)):
        with pytest.raises(RelayError, match="belongs to user"):
            use(tmp_path / "lock")
