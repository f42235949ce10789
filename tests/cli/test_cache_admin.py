"""`relaygr cache show`: what it prints, and what it says if the worker cannot be reached."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.cli.texts import parse_size, printable, show_age, show_size
from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import PrefixSource
from relaygr.worker.admin_socket import SOCKET_NAME, AdminSocket
from relaygr.worker.cache import Tier
from relaygr.worker.cache.admin import CacheAdmin, EntryReport, ServingModel, UserReport
from relaygr.worker.cache.entries import EntryState, Holding
from tests.worlds.cache import CacheWorld, make_key

ANN = make_key("ann", 100)


class Worker:
    """A worker's cache and its socket, without the worker."""

    def __init__(self, shared_path: Path) -> None:
        self.shared_path = shared_path
        self.world = CacheWorld(hbm_pages=48)
        self.folder = shared_path / "relaygr.workers" / "w-00"
        self.folder.mkdir(parents=True)
        model = ServingModel("0123456789abcdef", ANN.namespace)
        admin = CacheAdmin("w-00", self.world.cache, lambda: model, ManualClock(90_000_000))
        self.socket = AdminSocket(self.folder / SOCKET_NAME, admin.answer)
        self.socket.start()

    def show(self, *arguments: str, worker_id: str = "w-00") -> Result:
        given = ["cache", "show", worker_id, *arguments, "--set", f"worker.shared_path={self.shared_path}"]
        return CliRunner().invoke(app, given)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.socket.close()


def test_show_prints_both_tiers_and_the_largest_users(worker: Worker) -> None:
    worker.world.spilled(ANN)
    worker.world.store(make_key("bob", 190), now_us=30_000_000)
    worker.world.cache.acquire(ANN, 30_000_000)
    shown = worker.show().stdout
    assert "w-00: model 0123456789ab, 2 users, 0 leases, 1 look-up\n" in shown
    lines = {line.split("  ")[0]: line.split() for line in shown.splitlines()}
    assert lines["evictable"] == ["evictable", "1.5", "KiB", "12", "896", "B", "7"]
    assert lines["capacity"] == ["capacity", "6.0", "KiB", "48", "8.0", "KiB", "64"]
    assert lines["found"] == ["found", "0.0%", "100.0%"]
    assert lines["bob"] == ["bob", "1.5", "KiB", "0", "B", "1", "1m", "00s", "1m", "00s"]


def test_show_of_a_user_prints_its_entries(worker: Worker) -> None:
    worker.world.store(ANN, now_us=1)
    worker.world.cache.transfers.spill(ANN)
    shown = worker.show("--user", "ann").stdout
    assert len(shown.splitlines()) == 3
    assert "spilling 01234567" in shown and "loading" in shown
    assert worker.show("--user", "nobody").stdout == "w-00 has no prefix of nobody.\n"


def test_the_widest_entries_fit_into_80_columns(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryReport(
        Tier.DRAM, EntryState.SPILLING, Holding.PINNED, "0123456789abcdef", 16_384, 32_768, 512, 1_073_000_000, 256,
        9_999, 9_999, PrefixSource.COMPUTED, 86_000.0, 86_000.0,
    )  # fmt: skip
    report = UserReport("w-00", "ann", (entry,))
    monkeypatch.setattr("relaygr.cli.cache._Worker.ask", lambda *_: report)
    lines = worker.show("--user", "ann").stdout.splitlines()
    assert len(lines) == 2
    assert max(len(line.rstrip()) for line in lines) <= 80


def test_reports_as_json_hold_bytes_and_pages(worker: Worker) -> None:
    worker.world.store(ANN, now_us=1)
    report = json.loads(worker.show("--json").stdout)
    assert report["tiers"][0]["pages"]["evictable"] == 7
    assert report["top"][0] == {
        "user_id": "ann", "entries": 1, "hbm_bytes": 896, "dram_bytes": 0, "age_s": 90.0, "idle_s": 90.0,
    }  # fmt: skip
    assert json.loads(worker.show("--user", "ann", "--json").stdout)["entries"][0]["tokens"] == 102


def test_a_worker_that_is_not_here_is_named_with_those_that_are(worker: Worker) -> None:
    done = worker.show(worker_id="w-07")
    assert done.exit_code == 1
    assert done.stderr.startswith("No worker w-07 runs here: there is no socket at ")
    assert "There are sockets of w-00." in done.stderr and "--socket" in done.stderr


def test_a_socket_that_a_dead_worker_left_is_said_to_be_one(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(worker.folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind("dead.sock")
    done = worker.show("--socket", "dead.sock")
    assert (done.exit_code, done.stderr) == (
        1,
        "w-00 does not run: its process has died and left dead.sock. Start it.\n",
    )


def test_a_file_that_is_no_socket_is_refused(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no socket")
    for path in (tmp_path / "file", tmp_path):
        done = worker.show("--socket", str(path))
        assert done.exit_code == 1
        assert str(path) in done.stderr


@pytest.mark.parametrize("user", ["", "u" * 257, "\udcff"])
def test_a_user_id_that_no_message_can_have_is_refused(worker: Worker, user: str) -> None:
    done = worker.show("--user", user)
    assert (done.exit_code, done.stderr[:6]) == (1, "--user")


def test_a_user_id_cannot_write_to_the_terminal(worker: Worker) -> None:
    worker.world.store(make_key("\x1b[31mred\r", 100))
    shown = worker.show().stdout
    assert "\x1b" not in shown and r"\x1b[31mred\r" in shown
    assert "\x1b" not in worker.show("--user", "\x1b[31mred\r").stdout


def test_sizes_and_ages_are_short() -> None:
    sizes = (0, 1023, 1024, 1 << 20, 1023 << 20, 3 << 30)
    assert [show_size(size) for size in sizes] == ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1023.0 MiB", "3.0 GiB"]
    ages = [show_age(age) for age in (None, 0.04, 59.96, 61, 3_700, 90_000)]
    assert ages == ["-", "0.0s", "60.0s", "1m 01s", "1h 01m", "1d 01h"]
    assert printable("grün 7\n") == r"grün 7\n"


def test_a_size_has_a_unit_or_is_bytes() -> None:
    assert (parse_size("--hbm", "512MiB"), parse_size("--hbm", "4096")) == (512 << 20, 4096)
    with pytest.raises(RelayError):
        parse_size("--hbm", "much")
