"""Stores of the pool for tests: one in this process that passes the contract, and Mooncake's real processes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relaygr.devbroker.local import free_ports
from relaygr.worker.pool.stores import store_url
from relaygr.worker.pool.stores.contract import (
    GetOutcome,
    Memory,
    ObjectKey,
    PutOutcome,
    Store,
    StoredObject,
    StoreDownError,
    StoreUrl,
)
from relaygr.worker.pool.stores.mooncake import missing, open_store, program, url_text
from tests.promised import unavailable
from tests.waiting import until

HOLDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
from relaygr.worker.pool.stores import store_url
from relaygr.worker.pool.stores.mooncake import client_options

holder = MooncakeDistributedStore()
assert holder.setup({**client_options(store_url(sys.argv[1])), "global_segment_size": sys.argv[2]}) == 0
print("up", flush=True)
time.sleep(3600)
"""


def needs_mooncake() -> None:
    """Ends the test on a machine without Mooncake."""
    lack = missing()
    if lack is not None:
        unavailable("mooncake", lack)


def unknown_options(name: str, arguments: Sequence[str]) -> list[str]:
    """The options that a program of Mooncake does not know."""
    done = subprocess.run([program(name), "--help"], capture_output=True, text=True, check=False)
    return [each for each in arguments if f" -{each[2:].partition('=')[0]} " not in done.stdout]


class TwinStore:
    """A `Store` in this process. `down`, `hung`, `late` and `capacity` are the faults that a test asks for."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.objects: OrderedDict[ObjectKey, bytes] = OrderedDict()
        self.capacity = capacity
        self.registered: list[tuple[int, int]] = []
        self.down = False
        self.running = threading.Event()
        self.running.set()
        self.waiting = 0
        self.calls: list[str] = []
        self._lock = threading.Lock()
        self._late: list[StoredObject] | None = None

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        """No call of `put` or `get` ends within the block."""
        self.running.clear()
        try:
            yield
        finally:
            self.running.set()

    @contextlib.contextmanager
    def late(self) -> Iterator[None]:
        """Each `get` within the block fails, and what it was to read arrives at the end of the block."""
        self._late = []
        try:
            yield
        finally:
            late, self._late = self._late, None
            for each in late:
                self._read(each)

    def open(self, memory: Sequence[Memory]) -> Store:
        """The store, for this memory too."""
        self.registered += [(each.ctypes.data, each.ctypes.data + each.nbytes) for each in memory]
        return self

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._answer("has")
        with self._lock:
            return [key in self.objects for key in keys]

    def put(self, object: StoredObject) -> PutOutcome:
        self._answer("put")
        self._wait()
        written = b"".join(part.tobytes() for part in self._own(object))
        with self._lock:
            if object.key in self.objects:
                return PutOutcome.STORED
            if sum(map(len, self.objects.values())) + len(written) > self.capacity:
                return PutOutcome.NO_ROOM
            self.objects[object.key] = written
            return PutOutcome.STORED

    def get(self, objects: Sequence[StoredObject]) -> list[GetOutcome]:
        self._answer("get")
        self._wait()
        if self._late is not None:
            self._late += objects
            return [GetOutcome.UNREADABLE] * len(objects)
        return [self._read(each) for each in objects]

    def remove(self, key: ObjectKey) -> bool:
        self._answer("remove")
        with self._lock:
            return self.objects.pop(key, None) is not None

    def forget(self, users: Collection[str] | None) -> int:
        self._answer("forget")
        with self._lock:
            gone = [key for key in self.objects if users is None or key.user in users]
            for key in gone:
                del self.objects[key]
            return len(gone)

    def _read(self, object: StoredObject) -> GetOutcome:
        with self._lock:
            stored = self.objects.get(object.key)
        if stored is None:
            return GetOutcome.ABSENT
        if len(stored) != sum(part.nbytes for part in self._own(object)):
            return GetOutcome.UNREADABLE
        at = 0
        for part in object.parts:
            part[:] = memoryview(stored)[at : at + part.nbytes]
            at += part.nbytes
        return GetOutcome.FOUND

    def _answer(self, call: str) -> None:
        self.calls.append(call)
        if self.down:
            raise StoreDownError("down")

    def _wait(self) -> None:
        self.waiting += 1
        self.running.wait()
        self.waiting -= 1

    def _own(self, object: StoredObject) -> tuple[Memory, ...]:
        for part in object.parts:
            start = part.ctypes.data
            assert any(low <= start and start + part.nbytes <= high for low, high in self.registered)
            assert part.flags.c_contiguous
        return object.parts


class MemoryStores:
    """The module of stores in this process, which a test puts into the table of stores: `memory://NAME?bytes=SIZE`.

    Stores with one name and prefix share their objects.
    """

    FORM = "memory://NAME?bytes=SIZE"

    def __init__(self) -> None:
        self._opened: dict[tuple[str, str], TwinStore] = {}

    def check(self, url: StoreUrl) -> None:
        if not url.options.get("bytes", "1").isdigit():
            raise ValueError(f"its bytes must be a number: write {self.FORM}")

    def missing(self) -> str | None:
        return None

    def unreachable(self, url: StoreUrl, timeout_s: float) -> str | None:
        return None

    def open_store(self, url: StoreUrl, prefix: str, memory: Sequence[Memory]) -> Store:
        store = self._opened.setdefault((url.address, prefix), TwinStore(int(url.options.get("bytes", 1 << 30))))
        return store.open(memory)


@dataclass
class Mooncake:
    """A master and its holders on this machine."""

    folder: Path
    forgets_s: int
    """How long the master keeps a holder that is silent."""
    port: int = field(default_factory=lambda: free_ports(1)[0])
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return url_text(f"127.0.0.1:{self.port}")

    def start_master(self) -> subprocess.Popen[bytes]:
        master = self._start(
            program("mooncake_master"), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1",
            f"--metrics_port={free_ports(1)[0]}", "--default_kv_lease_ttl=500", f"--client_ttl={self.forgets_s}",
        )  # fmt: skip

        def accepts_connections() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2):
                return True
            return False

        until(accepts_connections, "the master accepts connections")
        return master

    def start_holder(self, size_bytes: int = 64 << 20) -> subprocess.Popen[bytes]:
        holder = self._start(sys.executable, "-c", HOLDER, self.url, str(size_bytes))
        assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
        return holder

    def open(self, memory: Sequence[Memory] = (), prefix: str = "relaygr") -> Store:
        return open_store(store_url(self.url), prefix, memory)

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "mooncake.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=dict(os.environ))
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def mooncake(folder: Path, holders: int = 1, size_bytes: int = 64 << 20, forgets_s: int = 3) -> Iterator[Mooncake]:
    """A running master with its holders."""
    needs_mooncake()
    folder.mkdir(exist_ok=True, parents=True)
    store = Mooncake(folder, forgets_s)
    try:
        store.start_master()
        for _ in range(holders):
            store.start_holder(size_bytes)
        yield store
    finally:
        store.stop()
