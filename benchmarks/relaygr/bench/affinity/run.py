"""The changes of one fleet after the other, and the output of their figures. `__main__` describes the figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from relaygr.bench.affinity import FleetMode
from relaygr.bench.affinity.fleet import Fleet, Owners, best_new_id, fewest_moves, moved
from relaygr.bench.affinity.load import Load, residents
from relaygr.bench.rows import append_rows, machine, now
from relaygr.bench.small_relay import own_prefix
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.kafka.settings import Affinity, KafkaSettings
from relaygr.runtime.errors import RelayError

PREFIX_MIB: Final = 16
"""K,V of a resident user: 4,096 tokens in 4 layers of 256 dimensions, bfloat16."""
RESIDENTS: Final = 4
"""Resident users of each partition."""
SETTLE_S: Final = 90.0
TABLE_WIDTH: Final = 130
_QUIET_S: Final = 3.0
_BEFORE_S: Final = 1.0
_AFTER_S: Final = 1.0
_ANSWER_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The fleet and its load."""

    members: int
    partitions: int
    rate_per_s: float
    budget_ms: float


@dataclass(frozen=True, slots=True)
class ChangeFigures:
    """The figures of one change."""

    measured_at: str
    machine: str
    broker: str
    mode: str
    change: str
    members_before: int
    members_after: int
    partitions: int
    moved: int
    needed: int
    kv_held_mib: int
    """K,V of all resident users."""
    kv_lost_mib: int
    kv_of_changed_mib: int
    """K,V of the resident users whose owner changed or was killed: no more may be lost."""
    requests: int
    apart: int
    late: int
    late_share: float
    unanswered: int
    longest_ms: float
    settled_ms: float


def measure_affinity(
    modes: Sequence[FleetMode], plan: Plan, broker: str, out: Path, json_file: Path | None
) -> list[ChangeFigures]:
    """Measures each mode, prints the figures, appends them to `out`. Raises RelayError if a fleet does not settle."""
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    figures: list[ChangeFigures] = []
    with local_broker(broker) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        for mode in modes:
            found = measure_mode(started, mode, plan)
            append_rows(out, [asdict(each) for each in found])
            figures += found
            console.print(_table(found))
    console.print(f"appended to {out}")
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(each) for each in figures], indent=2))
    return figures


def measure_mode(broker: LocalBroker, mode: FleetMode, plan: Plan) -> list[ChangeFigures]:
    """The figures of each change of a fleet in this mode, on topics of its own."""
    prefix = own_prefix(broker, f"affinity-{mode.value.replace('_', '-')}")
    affinity = Affinity.RANGE if mode is FleetMode.RANGE_PLACED else Affinity(mode.value)
    kafka = broker.settings(
        KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=plan.partitions, affinity=affinity)
    )
    broker.create_topics(kafka)
    try:
        with Fleet(kafka) as fleet, Load(kafka, plan.rate_per_s) as load:
            run = _Changes(broker, mode, plan, fleet, load)
            return [run.measure(change) for change in run.changes]
    finally:
        broker.delete_topics(kafka)


class _Changes:
    """One fleet, from its start on."""

    def __init__(self, broker: LocalBroker, mode: FleetMode, plan: Plan, fleet: Fleet, load: Load) -> None:
        self._broker, self._mode, self._plan = broker, mode, plan
        self._fleet, self._load = fleet, load
        self._residents = residents(plan.partitions, RESIDENTS)
        names = [f"worker-{number:02d}" for number in range(plan.members)]
        for name in names:
            fleet.start(name)
        self._owners, _ = fleet.await_owners(SETTLE_S)
        first, victim = names[0], names[plan.members // 2]
        placed = mode is FleetMode.RANGE_PLACED
        new = best_new_id(names, plan.partitions) if placed else f"worker-{plan.members:02d}"
        self._killed: dict[str, str] = {"restart": first, "death": victim}
        self.changes: dict[str, Callable[[], None]] = {
            "none": lambda: time.sleep(_QUIET_S),
            "restart": lambda: self._restart(first),
            "join": lambda: fleet.start(new),
            "leave": lambda: fleet.stop(new),
            "death": lambda: fleet.kill(victim),
            "return": lambda: fleet.start(victim),
        }

    def measure(self, change: str) -> ChangeFigures:
        """Makes the change under load, once every resident's job is at its owner."""
        plan, load, before = self._plan, self._load, self._owners
        self._prepare_residents()
        time.sleep(_BEFORE_S)
        began_s = time.monotonic()
        self.changes[change]()
        after, settled_s = self._fleet.await_owners(SETTLE_S)
        lost = {each.user for each in load.ask(self._residents, _ANSWER_S) if not each.is_hit}
        time.sleep(_AFTER_S)
        asked = load.between(began_s, time.monotonic() - _AFTER_S)
        self._await_answers()
        took_ms = [(each.answered_s - each.sent_s) * 1e3 for each in asked if each.answered_s is not None]
        late = sum(each.is_late(plan.budget_ms) for each in asked)
        changed = self._changed(change, before, after)
        self._owners = after
        return ChangeFigures(
            measured_at=now(),
            machine=machine(),
            broker=self._broker.what.split(" at ")[0],
            mode=self._mode.value,
            change=change,
            members_before=len(set(before.values())),
            members_after=len(set(after.values())),
            partitions=plan.partitions,
            moved=len(moved(before, after)),
            needed=fewest_moves(before, after),
            kv_held_mib=len(self._residents) * PREFIX_MIB,
            kv_lost_mib=len(lost) * PREFIX_MIB,
            kv_of_changed_mib=sum(part in changed for part in self._residents.values()) * PREFIX_MIB,
            requests=len(asked),
            apart=sum(each.answered_s is not None and not each.is_hit for each in asked),
            late=late,
            late_share=round(late / max(1, len(asked)), 4),
            unanswered=len(asked) - len(took_ms),
            longest_ms=round(max(took_ms, default=float("nan")), 1),
            settled_ms=round(max(0.0, settled_s - began_s) * 1e3, 1),
        )

    def _prepare_residents(self) -> None:
        """Until every resident's request meets its job. On two topics a request may be read before its job."""
        self._load.prepare(self._residents)
        apart, ends_s = set(self._residents), time.monotonic() + _ANSWER_S
        while apart:
            apart = {each.user for each in self._load.ask(sorted(apart), _ANSWER_S) if not each.is_hit}
            if apart and time.monotonic() > ends_s:
                raise RelayError(f"the requests of {len(apart)} users do not meet their jobs, though no member moves")

    def _restart(self, name: str) -> None:
        self._fleet.kill(name)
        self._fleet.start(name)

    def _changed(self, change: str, before: Owners, after: Owners) -> set[int]:
        """Partitions whose owner is another one, or was killed."""
        killed = self._killed.get(change)
        return {part for part, owner in before.items() if after[part] != owner or owner == killed}

    def _await_answers(self) -> None:
        """Until the impressions so far are answered, or `_ANSWER_S` have passed."""
        asked, ends_s = [*self._load.passing], time.monotonic() + _ANSWER_S
        while any(each.answered_s is None for each in asked[-1000:]) and time.monotonic() < ends_s:
            time.sleep(0.05)


def _table(figures: Sequence[ChangeFigures]) -> Table:
    table = Table(title=f"{figures[0].mode}: {figures[0].partitions} partitions")
    columns = ("change", "members", "moved", "needed", "K,V lost MiB", "apart", "late %", "longest ms", "settled ms")
    for name in columns:
        table.add_column(name, justify="left" if name == "change" else "right")
    for each in figures:
        table.add_row(
            each.change,
            f"{each.members_before} to {each.members_after}",
            f"{each.moved}",
            f"{each.needed}",
            f"{each.kv_lost_mib} of {each.kv_held_mib}",
            f"{each.apart}",
            f"{each.late_share:.1%}".rstrip("%"),
            f"{each.longest_ms:.0f}",
            f"{each.settled_ms:.0f}",
        )
    table.add_row("all", "", str(sum(each.moved for each in figures)), str(sum(each.needed for each in figures)))
    return table
