"""The pool's store on Mooncake Store (`relaygr[pool]`). This process is a client without a part of the store's memory.

Seen with version 0.3.13: a call waits 30 s for a master that hangs, up to 60 s for a holder, 4 s for a dead master, and
1 s to write to a dead holder; other threads run meanwhile. A read that has failed after 60 s may still write into its
memory once the holder goes on. Only `setup` keeps the interpreter from running other threads, so another process tries
it first (`open_store`). A client outlives a restart of its master. It is never closed: that may take as long as a call,
and the end of the process frees it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from relaygr.runtime.errors import RelayError
from relaygr.worker.pool.stores.contract import (
    GetOutcome,
    Memory,
    ObjectKey,
    PutOutcome,
    StoredObject,
    StoreDownError,
    StoreUrl,
)

FORM: Final = "mooncake://HOST:PORT?protocol=tcp"
PROTOCOLS: Final = ("tcp", "rdma", "ascend")
"""How bytes travel between workers and holders. The first one is the default."""
LIBRARIES: Final = {"libibverbs.so.1": "libibverbs1", "libcurl.so.4": "libcurl4", "libnuma.so.1": "libnuma1"}
"""System libraries that the wheel needs and does not carry, with their Debian packages."""
_ADDRESS: Final = re.compile(r"[A-Za-z0-9._-]+:([0-9]{1,5})")
_BUFFER_BYTES: Final = 16 * 1024 * 1024
"""The client's own memory. It needs little, since objects are read and written in place."""
_TRIAL_S: Final = 10.0
_NO_ANSWER: Final = 3
_NO_ROOM, _ABSENT = -200, -704
_DOWN: Final = range(-999, -899)
"""Codes of calls that the master did not answer."""


def url_text(address: str, protocol: str | None = None) -> str:
    """The URL of the master at `address` (HOST:PORT)."""
    return f"mooncake://{address}?protocol={protocol or PROTOCOLS[0]}"


def check(url: StoreUrl) -> None:
    """See `StoreModule`."""
    address = _ADDRESS.fullmatch(url.address)
    if address is None or not 0 < int(address[1]) < 65_536 or url.path:
        raise ValueError(f"it must have HOST:PORT of the master, and no path: write {FORM}")
    for name, value in url.options.items():
        if name != "protocol":
            raise ValueError(f"`{name}` is no option of Mooncake: write {FORM}")
        if value not in PROTOCOLS:
            raise ValueError(f"its protocol is `{value}`: write one of {', '.join(PROTOCOLS)}")


def missing() -> str | None:
    """What keeps this machine from using the store, and the remedy; None if nothing does."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed: pip install 'relaygr[pool]' (Linux, Python below 3.14)"
    lacking = [name for name in LIBRARIES if not _loads(name)]
    if lacking:
        packages = " ".join(LIBRARIES[name] for name in lacking)
        return f"Mooncake needs {', '.join(lacking)}: apt-get install {packages}"
    return None


def program(name: str) -> str:
    """The path of a program of the wheel, such as `mooncake_master`. Raises RelayError without the wheel."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise RelayError(f"{missing()}.")
    return str(Path(spec.origin).parent / name)


def unreachable(url: StoreUrl, timeout_s: float) -> str | None:
    """See `StoreModule`."""
    host, _, port = url.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout_s):
            return None
    except OSError:
        return f"nothing listens at {url.address}: start mooncake_master there, and open its port to the workers"


def master_command(port: int, metrics_port: int) -> list[str]:
    """Starts a master that this machine reaches. Raises RelayError without the wheel."""
    return [
        program("mooncake_master"),
        f"--rpc_port={port}",
        "--rpc_address=127.0.0.1",
        f"--metrics_port={metrics_port}",
        "--metrics_host=127.0.0.1",
        "--logtostderr",
    ]


def holder_command(master_port: int, port: int, size_bytes: int) -> list[str]:
    """Starts a holder of that master, with so much memory for objects."""
    return [
        program("mooncake_client"),
        "--metadata_server=P2PHANDSHAKE",
        f"--master_server_address=127.0.0.1:{master_port}",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--global_segment_size={size_bytes}",
        "--protocol=tcp",
        "--logtostderr",
    ]


def open_store(url: StoreUrl, prefix: str, memory: Sequence[Memory]) -> MooncakeStore:
    """See `StoreModule`. The client is tried in another process first."""
    lack = missing()
    if lack is not None:
        raise RelayError(f"{lack}.")
    trial, no_answer = client_options(url), f"the master at {url.address} does not answer"
    code = (
        f"import os, mooncake.store as s\nos._exit({_NO_ANSWER} * bool(s.MooncakeDistributedStore().setup({trial!r})))"
    )
    try:
        tried = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, timeout=_TRIAL_S, env=_environment(), check=False
        )
    except subprocess.TimeoutExpired as error:
        raise StoreDownError(f"{no_answer} within {_TRIAL_S:.0f} s") from error
    if tried.returncode not in (0, _NO_ANSWER):
        raise RelayError(f"Mooncake can not run here: {tried.stderr.decode(errors='replace').strip()[-300:]}")
    if tried.returncode != 0:
        raise StoreDownError(no_answer)
    os.environ.update(_environment())
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if store.setup(client_options(url)) != 0:
        raise StoreDownError(no_answer)
    if any(store.register_buffer(each.ctypes.data, each.nbytes) != 0 for each in memory):
        raise StoreDownError("Mooncake can not register the memory")
    return MooncakeStore(store, prefix)


class MooncakeStore:
    """A `Store`. Made by `open_store`. The key of an object is PREFIX/MODEL/USER/DIGEST."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        codes = self._store.batch_is_exist([self._text(key) for key in keys])
        if any(code < 0 for code in codes):
            raise StoreDownError(f"is_exist: {min(codes)}")
        return [code == 1 for code in codes]

    def put(self, object: StoredObject) -> PutOutcome:
        addresses, sizes = _parts(object)
        (code,) = self._store.batch_put_from_multi_buffers([self._text(object.key)], [addresses], [sizes])
        _raise_if_down(code, "put")
        return PutOutcome.STORED if code == 0 else PutOutcome.NO_ROOM if code == _NO_ROOM else PutOutcome.FAILED

    def get(self, objects: Sequence[StoredObject]) -> list[GetOutcome]:
        parts = [_parts(each) for each in objects]
        codes = self._store.batch_get_into_multi_buffers(
            [self._text(each.key) for each in objects], [each for each, _ in parts], [each for _, each in parts]
        )
        outcomes: list[GetOutcome] = []
        for code, (_, sizes) in zip(codes, parts, strict=True):
            _raise_if_down(code, "get")
            # A smaller object leaves a part of the memory as it was.
            read = GetOutcome.FOUND if code == sum(sizes) else GetOutcome.UNREADABLE
            outcomes.append(GetOutcome.ABSENT if code == _ABSENT else read)
        return outcomes

    def remove(self, key: ObjectKey) -> bool:
        code = self._store.remove(self._text(key), True)
        _raise_if_down(code, "remove")
        return bool(code == 0)

    def forget(self, users: Collection[str] | None) -> int:
        # The master looks at all its keys, one pattern for all users, and searches at any place without the anchor.
        named = "[^/]+" if users is None else "|".join(map(re.escape, users))
        if not named:
            return 0
        code = self._store.remove_by_regex(f"^{re.escape(self._prefix)}/[^/]+/(?:{named})/", True)
        if code < 0:
            raise StoreDownError(f"remove_by_regex: {code}")
        return int(code)

    def _text(self, key: ObjectKey) -> str:
        return f"{self._prefix}/{key}"


def _raise_if_down(code: int, call: str) -> None:
    if code in _DOWN:
        raise StoreDownError(f"{call}: {code}")


def _parts(object: StoredObject) -> tuple[list[int], list[int]]:
    return [part.ctypes.data for part in object.parts], [part.nbytes for part in object.parts]


def client_options(url: StoreUrl) -> dict[str, str]:
    """Mooncake's settings of a client that holds no part of the store's memory. Raises StoreDownError."""
    return {
        "local_hostname": _own_address(url.address),
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "0",
        "local_buffer_size": str(_BUFFER_BYTES),
        "protocol": url.options.get("protocol", PROTOCOLS[0]),
        "rdma_devices": "",
        "master_server_addr": url.address,
    }


def _own_address(master: str) -> str:
    """This machine's address towards the master, with a free port. Raises StoreDownError without a route."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route, socket.socket() as free:
            route.connect((host, int(port)))
            own = route.getsockname()[0]
            free.bind((own, 0))
            return f"{own}:{free.getsockname()[1]}"
    except OSError as error:
        raise StoreDownError(f"no route to the master at {master}: {error}") from error


def _environment() -> dict[str, str]:
    """Mooncake's log would mix with ours. What goes wrong there is a result here."""
    return {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR", **os.environ}


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
