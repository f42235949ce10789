"""`relaygr demo --pool`: prefixes that survive their worker, in a store on this machine.

    master and holders -> relay on -> new workers with empty caches, same schedule -> reference scores -> share

The workers of the second run share nothing with those of the first one but the store: their topics, folders and tiers
are new.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from relaygr.demo.board import print_gates
from relaygr.demo.plan import DemoPlan
from relaygr.demo.stack import DemoStack, show_phase
from relaygr.demo.summary import Gate, RunSummary, ScoreComparison, compare_scores
from relaygr.devbroker import LocalBroker
from relaygr.devbroker.local import free_ports
from relaygr.processes import STOP_TIMEOUT_S, die_with_the_parent
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings
from relaygr.traffic.records import read_records
from relaygr.ui.page import Page
from relaygr.worker.pool.settings import PoolSettings
from relaygr.worker.pool.stores import store_url
from relaygr.worker.pool.stores.contract import ObjectKey, PutOutcome, StoredObject, StoreDownError
from relaygr.worker.pool.stores.mooncake import holder_command, master_command, missing, open_store, url_text

HOLDERS = 2
HOLDER_BYTES = 512 * 1024 * 1024
_START_S = 30.0
_WRITES = ("objects_written", "outcome"), ("writes_dropped", "reason")
_FETCHES = ("fetches", "outcome"), ("fetches_declined", "reason")


@dataclass(frozen=True, slots=True)
class PoolDemo:
    """The second run, and the gates. `loaded` of `users` users' prefixes came from the store."""

    run: RunSummary
    comparison: ScoreComparison
    loaded: int
    users: int
    gates: tuple[Gate, ...]

    @property
    def passed(self) -> bool:
        return not any(gate.failed for gate in self.gates)


def require_pool() -> None:
    """Raises RelayError if the store can not run here."""
    lack = missing()
    if lack is not None:
        raise RelayError(f"A pool cannot run on this machine: {lack}.")


@contextmanager
def local_pool(folder: Path) -> Iterator[PoolSettings]:
    """A store on this machine: a master and holders. Raises RelayError if they do not start."""
    folder.mkdir()
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(16), encoding="utf-8")
    rpc, metrics, *ports = free_ports(2 + HOLDERS)
    url = url_text(f"127.0.0.1:{rpc}")
    with ExitStack() as running:

        def start(name: str, command: list[str]) -> None:
            with (folder / f"{name}.log").open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    preexec_fn=die_with_the_parent if sys.platform == "linux" else None,
                )
            running.callback(_stop, process)

        start("master", master_command(rpc, metrics))
        _await_master(rpc)
        for port in ports:
            start("holder", holder_command(rpc, port, HOLDER_BYTES))
        _await_holders(url, folder)
        # In a short run few users come twice.
        yield PoolSettings(store=url, secret_file=secret, visits=1)


def run_pool(
    console: Console,
    settings: Settings,
    broker: LocalBroker,
    prefix: str,
    folder: Path,
    plan: DemoPlan,
    page: Page | None = None,
) -> PoolDemo:
    """Plays the schedule twice, with new workers the second time, and prints the result. `page` shows both runs."""

    first_file, second_file, reference_file = (folder / f"{name}.jsonl" for name in ("first", "second", "reference"))
    show_phase(page, "starting the pool")
    with local_pool(folder / "pool") as pool:
        # A warm-up would compute the prefixes before their users come.
        worker = settings.worker.model_copy(update={"pool": pool, "warm_up_users": 0})
        pooled = settings.model_copy(update={"worker": worker})

        def stack(name: str, of: Settings, *, reuse: bool = True) -> DemoStack:
            show_phase(page, "starting the workers")
            own = f"{prefix}-{name}"
            named = of.model_copy(update={"topic_prefix": own, "group_prefix": own})
            return DemoStack(
                console, folder, broker, named, relay=True, workers=plan.workers, observed=reuse, reuse=reuse, page=page
            )

        console.print(f"pool       {pool.store}, {HOLDERS} holders")
        with stack("first", pooled) as running:
            running.play("workers that fill the pool", first_file)
            console.print(f"           {_counts(running, *_WRITES)}")
        with stack("second", pooled) as running:
            run = running.play("new workers", second_file)
            console.print(f"           {_counts(running, *_FETCHES)}")
            told = [each.total("relaygr_pool_fetches_total", outcome="loaded") for each in running.worker_readings()]
        with stack("reference", settings, reuse=False) as running:
            running.play_reference(reference_file, second_file)
    records = list(read_records(second_file))
    loaded, users = int(sum(told)), len({record.user_id for record in records})
    comparison = compare_scores(records, read_records(reference_file))
    judged = (
        Gate("no request lost", run.lost == 0, f"{run.lost} in the second run"),
        Gate(
            "scores on prefixes from the pool equal full scores",
            comparison.compared > 0 and comparison.different == 0,
            f"{comparison.different} of {comparison.compared} differ, worst error {comparison.worst_error:.1e}",
        ),
        Gate("prefixes came from the pool", loaded > 0, f"{loaded} of {users} users'"),
    )
    print_gates(console, judged, [run])
    share = min(1.0, loaded / users) if users else 0.0
    console.print(
        f"New workers loaded {loaded} prefixes of {users} users ({share:.0%}) from the pool instead of computing them."
    )
    return PoolDemo(run, comparison, loaded, users, judged)


def _counts(stack: DemoStack, *counters: tuple[str, str]) -> str:
    """The pool's counters with these names and labels, of all workers."""
    found: Counter[str] = Counter()
    for reading, (name, label) in itertools.product(stack.worker_readings(), counters):
        for value, count in reading.by_label(f"relaygr_pool_{name}_total", label).items():
            found[f"{name} {value}"] += int(count)
    return ", ".join(f"{name} {count}" for name, count in found.items()) or "nothing was asked for"


def _await_master(port: int) -> None:
    ends_s = time.monotonic() + _START_S
    while time.monotonic() < ends_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RelayError(f"The pool's master did not start within {_START_S:.0f} s.")


def _await_holders(url: str, folder: Path) -> None:
    key, probe = ObjectKey("probe", "demo", "0"), np.ones(1024, np.uint8)
    ends_s = time.monotonic() + _START_S
    with suppress(StoreDownError):
        store = open_store(store_url(url), "relaygr", [probe])
        while time.monotonic() < ends_s:
            if store.put(StoredObject(key, (probe,))) is PutOutcome.STORED:
                store.remove(key)
                return
            time.sleep(0.1)
    raise RelayError(f"The pool's holders did not start within {_START_S:.0f} s: see {folder}/holder.log.")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
