"""What a worker with a pool refuses at its start, and how it connects."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from relaygr.devbroker.local import free_ports
from relaygr.runtime.errors import RelayError
from relaygr.settings import load_settings
from relaygr.worker.pool import build, mooncake
from relaygr.worker.pool.build import build_pool, read_secret
from relaygr.worker.pool.settings import PoolSettings, Transport
from relaygr.worker.pool.store import StoreDownError
from tests.worlds.pool import needs_mooncake
from tests.worlds.real_executor import RealExecutorWorld


def built(folder: Path, dram_pages: int = 8, **settings: Any):
    world = RealExecutorWorld("plain", dram_pages=dram_pages)
    try:
        pool = PoolSettings(**settings)
        return build_pool(pool, world.engine, world.built, None, world.corrector, world.clock, folder, bool)
    finally:
        world.cache.close()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"sixteen bytes at least\n")
    return path


def test_without_an_address_there_is_no_pool(tmp_path: Path) -> None:
    assert built(tmp_path) is None


def test_a_pool_needs_its_library_a_dram_tier_and_a_secret(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up = {"address": "pool:50051", "secret_file": secret}
    monkeypatch.setattr(build, "missing", lambda: "Mooncake needs libnuma.so.1: apt-get install libnuma1")
    with pytest.raises(RelayError, match=r"libnuma\.so\.1: apt-get install libnuma1"):
        built(tmp_path, **set_up)
    monkeypatch.setattr(build, "missing", lambda: None)
    with pytest.raises(RelayError, match=r"worker\.dram_bytes"):
        built(tmp_path, dram_pages=0, **set_up)
    assert built(tmp_path, **set_up) is not None


def test_a_secret_that_is_missing_or_short_is_refused(tmp_path: Path, secret: Path) -> None:
    assert read_secret(secret) == b"sixteen bytes at least"
    with pytest.raises(RelayError, match=r"secret_file.*cannot be read"):
        read_secret(tmp_path / "none")
    secret.write_bytes(b"short\n")
    with pytest.raises(RelayError, match="has 5 bytes: at least 16"):
        read_secret(secret)


def test_an_address_without_a_secret_is_refused() -> None:
    with pytest.raises(RelayError, match=r"worker\.pool.*secret_file"):
        load_settings(environment={"RELAYGR_WORKER__POOL__ADDRESS": "pool:50051"})


def test_libraries_that_are_missing_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_mooncake()
    monkeypatch.setattr(mooncake, "LIBRARIES", {"libno-such.so.1": "libno-such1", "libc.so.6": "libc6"})
    assert mooncake.missing() == "Mooncake needs libno-such.so.1: apt-get install libno-such1"
    monkeypatch.setitem(sys.modules, "mooncake", None)
    assert "pip install 'relaygr[pool]'" in (mooncake.missing() or "")


@pytest.mark.slow
@pytest.mark.parametrize("listens", [False, True], ids=["nobody listens", "it never answers"])
def test_a_master_that_does_not_answer_stops_no_other_thread(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_mooncake()
    monkeypatch.setattr(mooncake, "_TRIAL_S", 8.0)
    (port,) = free_ports(1)
    with socket.socket() as silent:
        if listens:
            silent.bind(("127.0.0.1", port))
            silent.listen()
        found: list[Exception] = []

        def run() -> None:
            try:
                mooncake.connect(f"127.0.0.1:{port}", Transport.TCP)
            except StoreDownError as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        longest_s, last_s = 0.0, time.monotonic()
        while thread.is_alive():
            time.sleep(0.01)
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        assert len(found) == 1 and longest_s < 2
