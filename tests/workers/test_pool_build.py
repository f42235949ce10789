"""What a worker with a pool refuses at its start, and how it connects."""

from __future__ import annotations

import re
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
from relaygr.worker.pool.build import build_pool, read_secret
from relaygr.worker.pool.settings import PoolSettings
from relaygr.worker.pool.stores import STORES, mooncake, store_url
from relaygr.worker.pool.stores.contract import StoreDownError
from tests.worlds.pool import MemoryStores, needs_mooncake
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


def test_without_a_store_there_is_no_pool(tmp_path: Path) -> None:
    assert built(tmp_path) is None


def test_a_pool_needs_its_library_a_dram_tier_and_a_secret(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up = {"store": "mooncake://pool:50051", "secret_file": secret}
    monkeypatch.setattr(mooncake, "missing", lambda: "Mooncake needs libnuma.so.1: apt-get install libnuma1")
    with pytest.raises(RelayError, match=r"libnuma\.so\.1: apt-get install libnuma1"):
        built(tmp_path, **set_up)
    monkeypatch.setattr(mooncake, "missing", lambda: None)
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


def refused(**settings: str) -> str:
    """What the settings say about a pool with these."""
    with pytest.raises(RelayError) as found:
        load_settings(environment={f"RELAYGR_WORKER__POOL__{name.upper()}": each for name, each in settings.items()})
    return str(found.value)


def test_a_store_without_a_secret_is_refused() -> None:
    for form in ({"store": "mooncake://pool:50051"}, {"address": "pool:50051"}):
        assert re.search(r"worker\.pool.*secret_file", refused(**form))


@pytest.mark.parametrize(
    ("store", "says"),
    [
        ("pool:50051", "it has no scheme"),
        ("://pool:50051", "no store has the scheme ``"),
        ("mooncake://[::1:5", "nvalid IPv6 URL"),
        ("redis://pool:6379", "no store has the scheme `redis`"),
        ("mooncake://pool", "HOST:PORT of the master"),
        ("mooncake://pool:65536", "HOST:PORT of the master"),
        ("mooncake://pool:50051/0", "no path"),
        ("mooncake://ann:secret@pool:50051", "no user, password or fragment"),
        ("mooncake://pool:50051#x", "no user, password or fragment"),
        ("mooncake://pool:50051?protocol", "must be NAME=VALUE"),
        ("mooncake://pool:50051?protocol=tcp&protocol=rdma", "an option is given twice"),
        ("mooncake://pool:50051?timeout=3", "`timeout` is no option of Mooncake"),
    ],
)
def test_a_url_that_names_no_store_is_refused_with_the_form(store: str, says: str) -> None:
    told = refused(store=store, secret_file="/none")
    assert "worker.pool.store" in told and says in told
    assert "write mooncake://HOST:PORT?protocol=tcp" in told and "ann:secret" not in told


def test_a_protocol_that_does_not_exist_is_refused_with_those_that_do() -> None:
    told = refused(store="mooncake://pool:50051?protocol=udp", secret_file="/none")
    assert "`udp`: write one of tcp, rdma, ascend" in told
    assert "`udp`: write one of tcp, rdma, ascend" in refused(address="pool:50051", protocol="udp", secret_file="/none")


def test_the_earlier_form_is_read_with_one_line_that_says_the_new_one(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mooncake, "missing", lambda: None)
    set_up = {"address": "pool:50051", "protocol": "rdma", "secret_file": secret}
    assert PoolSettings(**set_up).url == store_url("mooncake://pool:50051?protocol=rdma")
    assert built(tmp_path, **set_up) is not None
    assert capsys.readouterr().err.count("mooncake://pool:50051?protocol=rdma") == 1
    del set_up["protocol"]
    assert PoolSettings(**set_up).url == store_url("mooncake://pool:50051?protocol=tcp")


@pytest.mark.parametrize("earlier", [{"address": "pool:50051"}, {"protocol": "tcp"}])
def test_both_forms_together_are_refused(earlier: dict[str, str]) -> None:
    told = refused(store="mooncake://pool:50051", secret_file="/none", **earlier)
    assert "remove them, and keep store" in told


def test_another_store_is_an_entry_of_the_table(tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORES, "memory", MemoryStores())
    pool = built(tmp_path, store="memory://here?bytes=1000000", secret_file=secret)
    assert pool is not None
    pool.start()
    pool.await_connection(30)
    assert not pool.is_away and pool.close()
    assert "mooncake://HOST:PORT?protocol=tcp or memory://NAME?bytes=SIZE" in refused(store="x://", secret_file="/none")
    assert "must be a number" in refused(store="memory://here?bytes=many", secret_file="/none")


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
                mooncake.open_store(store_url(f"mooncake://127.0.0.1:{port}"), "relaygr", ())
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
