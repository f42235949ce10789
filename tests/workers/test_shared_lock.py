"""The lock of a worker's shared folder: one holder, freed by release or death, and counted."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from relaygr.runtime.errors import RelayError
from relaygr.worker.shared.lock import ArenaLock, memory_folder, note_fenced, predecessor_was_fenced

HOLDER = """
import sys, time
from pathlib import Path
from relaygr.worker.shared.lock import ArenaLock
lock = ArenaLock(Path(sys.argv[1]))
print(lock.acquire(), flush=True)
time.sleep(60)
"""


def another_process(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdigit()
    return process


def test_each_holder_has_the_next_epoch(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        lock = ArenaLock(tmp_path / "worker-00")
        assert lock.acquire() == epoch == lock.arena_epoch
        assert lock.is_held()
        lock.release()
        assert not lock.is_held()


def test_only_the_owner_may_read_the_folder(tmp_path: Path) -> None:
    ArenaLock(tmp_path / "worker-00")
    assert (tmp_path / "worker-00").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["lock", "epoch.new", "fenced"])
def test_a_link_that_another_user_left_is_refused_and_its_target_unchanged(tmp_path: Path, name: str) -> None:
    """The lock once wrote its process id into the file of a victim."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "worker-00").mkdir(mode=0o700)
    (tmp_path / "worker-00" / name).symlink_to(victim)
    with pytest.raises(RelayError, match="is a symbolic link"):
        lock = ArenaLock(tmp_path / "worker-00")
        lock.acquire()
        note_fenced(tmp_path / "worker-00", lock)
    assert victim.read_text() == "precious"


def test_a_second_process_does_not_get_the_lock_and_learns_the_holder(tmp_path: Path) -> None:
    holder = another_process(tmp_path)
    try:
        lock = ArenaLock(tmp_path)
        assert lock.try_acquire() is None
        assert lock.acquire(timeout_s=0.01) is None
        assert not lock.is_held()
        assert lock.holder() == str(holder.pid)
    finally:
        holder.kill()
        holder.wait()


def test_a_stopped_process_keeps_the_lock_and_a_killed_one_does_not(tmp_path: Path) -> None:
    """A stopped process may wake up and write, so no other process may hold the lock before it is dead."""
    holder = another_process(tmp_path)
    lock = ArenaLock(tmp_path)
    try:
        os.kill(holder.pid, signal.SIGSTOP)
        assert lock.acquire(timeout_s=0.05) is None
        got: list[int | None] = []
        waiter = threading.Thread(target=lambda: got.append(lock.acquire(timeout_s=30)))
        waiter.start()
        os.kill(holder.pid, signal.SIGKILL)
        waiter.join(30)
        assert got == [2]
    finally:
        holder.kill()
        holder.wait()


def test_a_wait_can_be_cancelled(tmp_path: Path) -> None:
    first, second = ArenaLock(tmp_path), ArenaLock(tmp_path)
    first.acquire()
    cancel = threading.Event()
    threading.Timer(0.02, cancel.set).start()
    assert second.acquire(cancel) is None
    assert second.arena_epoch == 0


def test_a_holder_whose_lock_file_was_replaced_may_not_write(tmp_path: Path) -> None:
    """The folder of a running worker was deleted; the next process locks another file."""
    first = ArenaLock(tmp_path / "a")
    first.acquire()
    shutil.rmtree(tmp_path / "a")
    assert not first.is_held()
    second = ArenaLock(tmp_path / "a")
    assert second.acquire() == 1
    assert second.is_held()
    assert not first.is_held()


def test_a_holder_puts_a_removed_lock_back_and_no_standby_gets_it_meanwhile(tmp_path: Path) -> None:
    """A standby made the folder again, took the lock of a new file, and fenced the active worker beside it."""
    folder = tmp_path / "group" / "worker-03"
    holder = ArenaLock(folder)
    assert holder.acquire() == 1
    standby, stopping = ArenaLock(folder, is_standby=True), threading.Event()
    got: list[int | None] = []
    waiting = threading.Thread(target=lambda: got.append(standby.acquire(stopping)))
    waiting.start()
    for _ in range(40):
        shutil.rmtree(tmp_path / "group")
        assert not holder.is_held()
        folder.mkdir(parents=True)
        assert holder.put_back() and holder.is_held()
    assert got == [] and holder.holder() == str(os.getpid())
    assert ArenaLock(folder).try_acquire() is None
    holder.release()
    waiting.join(30)
    assert got == [2]


def test_a_standby_takes_the_lock_of_an_emptied_folder_if_nobody_puts_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder is dead, too."""
    monkeypatch.setattr("relaygr.worker.shared.lock.PUT_BACK_S", 0.2)
    standby = ArenaLock(tmp_path / "worker-03", is_standby=True)
    shutil.rmtree(tmp_path / "worker-03")
    assert standby.try_acquire() is None
    assert not (tmp_path / "worker-03").exists()
    assert standby.acquire(timeout_s=30) == 1


def test_a_lock_that_another_process_took_meanwhile_is_not_put_back(tmp_path: Path) -> None:
    first, folder = ArenaLock(tmp_path / "a"), tmp_path / "a"
    for _ in range(2):
        first.release()
        first.acquire()
    shutil.rmtree(folder)
    second = ArenaLock(folder)
    assert second.acquire() == 1
    assert not first.put_back() and second.is_held()
    second.release()
    assert not first.put_back(), "it has written since"


def test_a_file_that_is_replaced_while_it_is_being_locked_is_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes would each hold one of the files."""
    lock, locks = ArenaLock(tmp_path), fcntl.flock

    def replaced_meanwhile(file: int, operation: int) -> None:
        (tmp_path / "lock").rename(tmp_path / "old")
        (tmp_path / "lock").touch()
        locks(file, operation)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", replaced_meanwhile)
        assert lock.try_acquire() is None
    assert lock.try_acquire() == 1


@pytest.mark.parametrize("torn", [b"", b"\xff\xfe", b"seven"])
def test_after_an_unreadable_epoch_counting_begins_at_1(tmp_path: Path, torn: bytes) -> None:
    lock = ArenaLock(tmp_path)
    (tmp_path / "epoch").write_bytes(torn)
    assert lock.acquire() == 1


def test_a_check_whether_the_lock_is_free_does_not_count_as_a_holder(tmp_path: Path) -> None:
    first, second = ArenaLock(tmp_path), ArenaLock(tmp_path)
    with second.unclaimed() as free:
        assert free
        assert first.try_acquire() is None
    assert first.acquire() == 1
    with second.unclaimed() as free:
        assert not free


def test_a_full_file_system_does_not_prevent_a_take_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "epoch").write_text("9\n")
    monkeypatch.setattr("relaygr.worker.shared.lock.write_private", no_room)
    lock = ArenaLock(tmp_path / "other")
    with pytest.raises(RelayError, match=r"No space left on device.*free space.*`worker\.shared_path`"):
        lock.acquire()  # There is no number to count on from.
    first = ArenaLock(tmp_path)
    assert first.acquire() == 10
    assert (tmp_path / "epoch").read_text() == "10\n"
    assert first.holder() == str(os.getpid())


def test_a_new_folder_on_a_full_file_system_is_reported(tmp_path: Path) -> None:
    """No file can grow under this limit, as on a full file system: the process id does not fit into the lock."""
    lock = ArenaLock(tmp_path / "worker-00")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(RelayError, match=r"worker-00 cannot be written .*free space.*`worker\.shared_path`"):
            lock.acquire()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert lock.acquire() == 1


def test_one_object_acquires_the_lock_once(tmp_path: Path) -> None:
    lock = ArenaLock(tmp_path)
    lock.acquire()
    with pytest.raises(ValueError, match="already holds the lock"):
        lock.acquire()


def test_a_folder_that_can_not_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RelayError, match=r"worker\.shared_path"):
        ArenaLock(tmp_path / "file" / "worker-00")


def next_holder(folder: Path, *, is_fenced: bool = False) -> bool:
    """Acquires and releases the lock. Returns whether the previous holder left a note."""
    lock = ArenaLock(folder)
    lock.acquire()
    found = predecessor_was_fenced(folder, lock)
    if is_fenced:
        note_fenced(folder, lock)
    lock.release()
    return found


def test_only_the_next_holder_obeys_the_note_of_a_fenced_one(tmp_path: Path) -> None:
    assert not next_holder(tmp_path, is_fenced=True)
    assert next_holder(tmp_path)
    assert not next_holder(tmp_path)


def test_a_process_without_the_lock_leaves_no_note(tmp_path: Path) -> None:
    note_fenced(tmp_path, ArenaLock(tmp_path))
    assert not next_holder(tmp_path)


@pytest.mark.parametrize("torn", [b"", b"\xff", b"two"])
def test_a_note_that_can_not_be_read_is_ignored(tmp_path: Path, torn: bytes) -> None:
    next_holder(tmp_path, is_fenced=True)
    (tmp_path / "fenced").write_bytes(torn)
    assert not next_holder(tmp_path)


def test_without_a_folder_in_memory_and_a_temporary_one_the_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("relaygr.worker.shared.lock._TMPFS", tmp_path / "missing")
    monkeypatch.setattr("tempfile.gettempdir", missing)
    with pytest.raises(RelayError, match=r"set `worker\.shared_path`"):
        memory_folder()
