"""Runs the cells: one broker, one stack of processes for each system, one run for each point that a search asks for."""

from __future__ import annotations

import itertools
import math
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist

import numpy as np
from pydantic import ByteSize
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from relaygr.bench.energy import read_energy_uj, used_j
from relaygr.bench.generator.player import Player, Requests, Run
from relaygr.bench.generator.samples import Sample, read_samples
from relaygr.bench.generator.trace import MEASURED, WARM_UP, Trace, digest_of, read_trace, write_trace
from relaygr.bench.generator.workload import make_trace, reuse_of, with_reuse
from relaygr.bench.headline.figures import figures_of, longest_truncation
from relaygr.bench.headline.grid import BY_NAME, ITEMS, LENGTH_FACTORS, REUSES, Cell
from relaygr.bench.headline.plan import CellPlan, plan_in, write_model
from relaygr.bench.headline.points import (
    PARTITIONS,
    Asked,
    CellSearch,
    FoundUses,
    Mode,
    Point,
    estimated_runs,
    key_of,
    points_at,
    row_of,
    samples_path,
    trace_name,
    trace_path,
    workload_of,
)
from relaygr.bench.headline.rows import AT_REUSE, OF_TRACE, RunFile, RunRow, Used
from relaygr.bench.headline.search import snapped
from relaygr.bench.headline.systems import FLAGS, LIMITED, TUNED, UNCUT, System, settings_of
from relaygr.bench.pipeline.run import MeasuredWindow
from relaygr.bench.speed import WINDOW_S, MachineSpeed
from relaygr.demo.processes import Reading
from relaygr.demo.stack import DemoStack
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings
from relaygr.traffic.population import Population, population_of
from relaygr.traffic.settings import TrafficSettings
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint

SCORES_EVERY = 10
POOL = 16
"""Users of the oracle, all of them ready in HBM."""
POOL_BUDGET_MS = 30_000
RUN_OVERHEAD_S = 6.0
"""Histories, their reading, encoding, the wait for the last results, and what some runs are longer."""
START_S = 9.0
PLAN_S = 25.0
ENGINE_WAIT_S = 30.0
"""The engine alone waits for so long, at least, for a quiet machine."""
_WASTED = "relaygr_cache_preinfers_wasted_total"
_JOBS = "relaygr_worker_preinfer_jobs_total"
_DEVICE = "relaygr_worker_device_seconds_total"


@dataclass(frozen=True, slots=True)
class Played:
    """What a run left. `reuse`: of the trace before the oracle changed its users."""

    trace: Trace
    samples: list[Sample]
    used: Used
    reuse: float


@dataclass(frozen=True, slots=True)
class OthersTrace:
    """A trace of others that a cell takes. `figure`: the question that it asks."""

    trace: Trace
    figure: str


def read_others(path: Path, cell: Cell, seconds: float | None = None) -> OthersTrace:
    """Reads a trace of others, or its first `seconds`. Raises RelayError for a file that the cell cannot play."""
    trace = read_trace(path).from_zero()
    if seconds is not None:
        trace = trace.first(seconds)
    takes = {"history_length": cell.longest_history, "suffix": cell.longest_suffix, "candidates": cell.candidates}
    for name, most in takes.items():
        found = int(getattr(trace, name).max())
        if found > most:
            raise RelayError(
                f"{path}: {name} is up to {found:,}, and cell {cell.name} takes at most {most:,}: choose another "
                "cell with --cells; `--cells list` prints their sizes"
            )
    if (trace.part == WARM_UP).all():
        raise RelayError(f"{path}: every row is warm-up (part 0)")
    # A file that was changed asks another question.
    part = "" if seconds is None else f" first {seconds:g} s"
    return OthersTrace(trace, f"{OF_TRACE}{path.name} {digest_of(path)}{part}")


def estimated_s(asked: Asked, mode: Mode) -> float:
    """About the time of these cells."""
    plans = len({cell.shape for cell, _ in asked})
    variants = len(mode.variants) if len(mode.variants) > 1 else 0
    starts = len({(served_cell(cell, each), each) for cell, systems in asked for each in systems})
    runs = sum(estimated_runs(systems, mode) for _, systems in asked)
    return (
        plans * PLAN_S
        + (starts + variants * len(asked)) * START_S
        + runs * (mode.seconds + mode.warm_up_s + RUN_OVERHEAD_S + (WINDOW_S if mode.wait_s else 0.0))
    )


def served_cell(cell: Cell, system: System) -> str:
    """Cells for which the processes of a system need not start again have one name. A trigger learns the risk and the
    lead times from its requests, so each cell of a relay has one of its own.
    """
    return cell.name if FLAGS[system].events else cell.plan_name


def name_of(broker: LocalBroker) -> str:
    """The broker without its address, which changes."""
    return broker.what.split(" at ")[0]


def progress_of(console: Console) -> Progress:
    """A bar that counts runs."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        TextColumn("{task.completed:.0f} of about {task.total:.0f} runs,"),
        TimeElapsedColumn(),
        TextColumn("passed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Progress(*columns, console=console)


class Bench:
    """One folder of results, one broker, and the stack of the system that runs now."""

    def __init__(self, console: Console, out: Path, broker: LocalBroker, mode: Mode, interactions: Path | None) -> None:
        self._console, self._out, self._broker, self._mode = console, out, broker, mode
        self._interactions = interactions
        self._logged: dict[int, Population] = {}
        """The users of the log, by the longest history."""
        self.file = RunFile(out)
        self._known = {row.key for row in self.file.rows if row.valid}
        """Questions that were answered before: no run is expected for them."""
        self._open = ExitStack()
        self._served: tuple[object, ...] = ()
        self._warm_pools: set[int] = set()
        self._known_users: set[str] = set()
        """Users of the runs so far on the processes that run now."""
        self._count = 0
        self._speed: MachineSpeed | None = None
        """Once a run asked for it."""
        self._limit = 0
        """The longest history of B1."""
        self._settings = Settings()
        """Those of the processes that run now."""

    def __enter__(self) -> Bench:
        self._work = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="relaygr-headline-")))
        self._stack = self._open.enter_context(ExitStack())
        self._progress = self._open.enter_context(progress_of(self._console))
        self._bar = self._progress.add_task("", total=1)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    # -- cells

    def run_cells(self, asked: Asked) -> None:
        """Runs all figures of all cells."""
        if self._interactions is not None:
            self._check_log(asked)
        self._progress.update(self._bar, total=sum(estimated_runs(systems, self._mode) for _, systems in asked))
        for _, family in itertools.groupby(asked, lambda each: each[0].plan_name):
            self._run_family(list(family))

    def _check_log(self, asked: Asked) -> None:
        """Makes a trace of each cell at the highest rate of its search. Raises RelayError if the log has too few users
        for it.
        """
        for cell, systems in asked:
            plan = self._planned(cell)[0]
            search = CellSearch(cell, plan, self._mode, partial(self._row, cell, plan))
            rate = snapped(max(map(search.highest_rate_per_s, systems)))
            point = Point("B", cell.history, rate, self._mode.seeds[0])
            try:
                make_trace(workload_of(cell, plan, point, self._mode), logged=self._users(cell))
            except RelayError as error:
                raise RelayError(
                    f"{cell.name}: its search may go up to {rate:g} requests/s, and {error}. --rates plays chosen "
                    "rates without a search, --seconds sets the time"
                ) from error

    def _run_family(self, asked: Asked) -> None:
        """Runs cells of one plan, system by system: most systems' processes serve all of them."""
        plan = self.plan(asked[0][0])
        self._describe(asked[0][0], plan)
        searches, uses = [], FoundUses()
        for cell, systems in asked:
            compares = System.B0 in systems or not self._mode.lends_b0(cell)
            search = CellSearch(cell, plan, self._mode, partial(self._row, cell, plan), uses, compares)
            variant = search.tuned() if System.B0 in systems else UNCUT
            short_rate = search.short_capacity(variant)
            searches.append((cell, systems, partial(search.figures, variant=variant, short_rate=short_rate)))
        for system in dict.fromkeys(system for _, systems in asked for system in systems):
            for cell, systems, figures in searches:
                if system in systems and (system is not System.B1 or self._has_limit(cell)):
                    figures(system)

    def run_rates(
        self,
        cells: Sequence[Cell],
        systems: Sequence[System],
        rates_per_s: Sequence[float],
        histories: Sequence[int] = (),
    ) -> None:
        """Plays these rates on each system without a search, at these histories; without any, at the cell's. They are
        no figure A or B.
        """
        points = {cell.name: points_at(cell, rates_per_s, histories, self._mode.seeds) for cell in cells}
        self._progress.update(self._bar, total=len(systems) * sum(map(len, points.values())))
        if self._interactions is not None:
            # A log with too few users is refused before the first run.
            for cell in cells:
                for point in points[cell.name]:
                    self._trace(cell, self._planned(cell)[0], point)
        for cell in cells:
            plan = self.plan(cell)
            self._describe(cell, plan)
            # System after system at each seed: within minutes the speed of a machine changes as much as they differ.
            for seed, system in itertools.product(self._mode.seeds, systems):
                for point in points[cell.name]:
                    if point.seed == seed:
                        self._row(cell, plan, system, UNCUT, point)

    def run_trace(self, cell: Cell, systems: Sequence[System], others_trace: OthersTrace) -> None:
        """Plays a trace of others on each system, without a search, once for each seed. Unless its users are those of a
        log, B0 and R then play it with other shares of returning users.
        """
        read, figure = others_trace.trace, others_trace.figure
        plan = self.plan(cell)
        self._describe(cell, plan)
        measured = read.retrieval_us[read.part != WARM_UP]
        measured_s = max(1e-3, float(measured.max() - measured.min()) / 1e6)
        history, rate = int(np.median(read.history_length)), snapped(len(measured) / measured_s)
        pair = [system for system in systems if system in (System.B0, System.R)]
        reuses = REUSES if self._interactions is None else ()
        runs = len(systems) + len(pair) * len(reuses)
        self._progress.update(self._bar, total=runs * len(self._mode.seeds))
        own = self._out / "traces" / f"{figure.replace(' ', '-')}.parquet"
        write_trace(read, own)
        for seed, system in itertools.product(self._mode.seeds, systems):
            self._row(cell, plan, system, UNCUT, Point(figure, history, rate, seed), own)
        others = {}
        for reuse in reuses:
            others[reuse] = own.with_name(f"{own.stem}-r{reuse:g}.parquet")
            write_trace(with_reuse(read, reuse), others[reuse])
        for seed, system in itertools.product(self._mode.seeds, pair):
            for reuse, path in others.items():
                point = Point(f"{figure}{AT_REUSE}{reuse:g}", history, rate, seed)
                self._row(cell, plan, system, UNCUT, point, path)

    def plan(self, cell: Cell) -> CellPlan:
        """The plan of the cell in this folder, as `plan_in`, and the files of its workers."""
        plan, self._calibration = self._planned(cell)
        self._model = self._work / cell.name / "model"
        write_model(cell, self._model)
        return plan

    def _planned(self, cell: Cell) -> tuple[CellPlan, Path]:
        def at_measuring() -> MachineSpeed:
            # All deadlines of the cell are multiples of these times.
            speed = self._quiet_speed(max(ENGINE_WAIT_S, self._mode.wait_s))
            self._progress.update(self._bar, description=f"{cell.name}: measuring the engine alone")
            return speed

        return plan_in(self._out, cell, at_measuring)

    def _describe(self, cell: Cell, plan: CellPlan) -> None:
        self._console.print(
            f"{cell.name}: full inference on {cell.history:,} behaviours takes {plan.full_ms:.1f} ms, a hit "
            f"{plan.hit_ms:.1f} ms; deadline {plan.deadline_ms} ms, lead time {plan.lead_ms:.0f} ms",
            soft_wrap=True,
        )

    def _has_limit(self, cell: Cell) -> bool:
        """Whether B1 has a longest history, by what B0 reached."""
        self._limit = longest_truncation(figures_of(self.file.rows, self._mode.name), cell.name, self._mode.decides)
        if not self._limit:
            self._console.print(f"{cell.name}: B0 has no history in figure A, which B1 needs: there is no B1")
        return self._limit > 0

    # -- runs

    def _row(
        self, cell: Cell, plan: CellPlan, system: System, variant: str, point: Point, trace: Path | None = None
    ) -> RunRow:
        """The row of this point: from the file, or of a run that is made now."""
        variant = self._variant(system, variant)
        key = key_of(cell, self._mode, system, variant, point)
        rows = self.file.attempts(key)
        # Noise in an earlier call says nothing about this one.
        left = self._mode.attempts - sum(not row.was_slow for row in rows)
        if key in self._known:
            self._known.remove(key)
            bar = self._progress.tasks[self._bar]
            self._progress.update(self._bar, total=max(bar.completed + 1, (bar.total or 0) - 1))
        while left > 0 and not any(row.valid for row in rows):
            left -= 1
            asked = f"{point.figure}: {point.history:,} behaviours, {point.rate_per_s:g}/s"
            self._progress.update(self._bar, description=f"{cell.name} {system} {asked}")
            try:
                rows.append(self._run(cell, plan, system, variant, point, len(rows) + 1, trace))
            except RelayError:
                self._close()
                raise
            self._progress.update(self._bar, advance=1)
            self._tell(rows[-1])
        return next((row for row in rows if row.valid), rows[-1])

    def _variant(self, system: System, variant: str) -> str:
        if system is System.B0:
            return variant
        return f"{variant}{LIMITED}{self._limit:,} behaviours" if system is System.B1 else ""

    def _tell(self, row: RunRow) -> None:
        self._progress.console.print(
            f"  {row.system:<6} {row.figure}  {row.history:>6,} behaviours  {row.rate_per_s:>6g}/s  seed {row.seed}  "
            f"{row.late_share:6.1%} late of {row.offered:<5}  P99 {row.offered_p99_ms:6.0f} ms  {row.verdict}",
            soft_wrap=True,
        )

    def _run(
        self, cell: Cell, plan: CellPlan, system: System, variant: str, point: Point, attempt: int, trace: Path | None
    ) -> RunRow:
        played = self.play(cell, plan, system, variant, point, trace, attempt)
        row = row_of(
            cell, plan, self._mode, system, variant, point, played.trace, played.samples, played.used,
            broker=name_of(self._broker), reuse=played.reuse, attempt=attempt,
            reference=self._reference(cell, system, point),
        )  # fmt: skip
        self.file.add(row, played.samples)
        return row

    def _quiet_speed(self, wait_s: float | None = None) -> MachineSpeed:
        """The speed of the machine, after waiting until it is quiet, or for this time; None: that of the mode."""
        if self._speed is None:
            self._speed = MachineSpeed(self._out)
        asked = self._progress.tasks[self._bar].description

        def tell(slowdown: float) -> None:
            self._progress.update(self._bar, description=f"waiting: the machine takes {slowdown:.2f} times as long")

        self._speed.wait_until_quiet(self._mode.wait_s if wait_s is None else wait_s, tell)
        self._progress.update(self._bar, description=asked)
        return self._speed

    def play(
        self,
        cell: Cell,
        plan: CellPlan,
        system: System,
        variant: str,
        point: Point,
        trace: Path | None = None,
        attempt: int = 1,
    ) -> Played:
        """Plays one run, and keeps its samples. It adds no row."""
        path = trace or self._trace(cell, plan, point)
        played = read_trace(path)
        reuse = reuse_of(played)
        # The oracle's own users are meant to be cached.
        users = frozenset() if system is System.O else frozenset(played.user_id)
        if not self._known_users.isdisjoint(users):
            self._close()  # A run again, or users of a log: their prefixes would still be cached.
        self.serve(cell, plan, system, variant)
        self._known_users |= users
        self._count += 1
        name = f"run-{self._count}-{secrets.token_hex(2)}"
        if system is System.O:
            path = self._work / f"{name}.parquet"
            played = self._pooled(cell, point, played)
            write_trace(played, path)
        kept = samples_path(self._out, cell, self._mode.name, system, variant, point, attempt)
        run = Run(name, path, kept, plan.deadline_ms, FLAGS[system].events, plan.lead_ms, SCORES_EVERY)
        kept.parent.mkdir(parents=True, exist_ok=True)
        energy: list[dict[Path, int]] = []
        begun_s = math.inf

        def at_begin() -> Reading:
            nonlocal begun_s
            begun_s = time.monotonic()
            energy.append(read_energy_uj())
            return self._reading()

        speed = self._quiet_speed()
        window = MeasuredWindow(self._player.begun(name), self._roles, at_begin)
        with speed.watch() as watch:
            self._player.play(run, window.sample)
        measured_s = begun_s + float(played.retrieval_us[played.part != WARM_UP].min()) / 1e6
        energy_j = used_j(energy[0], read_energy_uj()) if energy else math.nan
        samples = read_samples(kept)
        after = self._reading()
        return Played(played, samples, _used(window, after, energy_j, watch.slowdown_since(measured_s)), reuse)

    def _reference(self, cell: Cell, system: System, point: Point) -> list[Sample]:
        """The samples of B0 on the same trace, if there are any; its scores are full inference's."""
        if system in (System.B0, System.B1, System.O):
            return []
        for variant in TUNED:
            key = key_of(cell, self._mode, System.B0, variant, point)
            valid = next((row for row in self.file.attempts(key) if row.valid), None)
            if valid is not None:
                path = samples_path(self._out, cell, self._mode.name, System.B0, variant, point, valid.attempt)
                return read_samples(path) if path.exists() else []
        return []

    def _trace(self, cell: Cell, plan: CellPlan, point: Point) -> Path:
        """The file of the trace: the same for all systems. A cell that has no B0 of its own has the times and lengths
        of the cell whose B0 stands for it.
        """
        name = trace_name(cell, point, self._mode.name)
        path = trace_path(self._out, cell, self._mode.name, point)
        if not path.exists():
            base = BY_NAME[cell.plan_name] if self._mode.lends_b0(cell) else cell
            made = make_trace(workload_of(base, plan, point, self._mode), f"{name}-", self._users(cell))
            write_trace(made if base is cell else with_reuse(made, cell.reuse), path)
        return path

    def _users(self, cell: Cell) -> Population | None:
        if self._interactions is None:
            return None
        if cell.longest_history not in self._logged:
            self._logged[cell.longest_history] = population_of(
                TrafficSettings(
                    interactions=self._interactions, users=100_000, history_max=cell.longest_history, suffix=cell.suffix
                )
            )
        return self._logged[cell.longest_history]

    def _pooled(self, cell: Cell, point: Point, trace: Trace) -> Trace:
        """The trace with the users of the oracle, whose prefixes are ready in HBM, at the same lengths and times."""
        spread = NormalDist(0, cell.history_sigma) if cell.history_sigma else None
        factors = [math.exp(spread.inv_cdf((k + 0.5) / POOL)) if spread else 1.0 for k in range(POOL)]
        lengths = np.array([max(1, int(point.history * factor)) for factor in factors], np.int32)
        users = [f"oracle-{point.history}-{k:02d}" for k in range(POOL)]
        count = len(trace)
        if point.history not in self._warm_pools:
            at_us = np.zeros(POOL, np.int64)
            pool = Trace(
                at_us, at_us, users, lengths, np.full(POOL, cell.suffix, np.int32),
                np.full(POOL, cell.candidates, np.int32), np.full(POOL, MEASURED, np.int32),
            )  # fmt: skip
            files = [self._work / f"pool-{point.history}{end}.parquet" for end in ("", "-samples")]
            write_trace(pool, files[0])
            self._player.play(Run(f"pool-{point.history}", files[0], files[1], POOL_BUDGET_MS))
            self._warm_pools.add(point.history)
        ranks = np.argsort(np.argsort(trace.history_length, kind="stable"), kind="stable")
        chosen = (ranks * POOL // count).astype(int)
        return replace(trace, user_id=[users[k] for k in chosen], history_length=lengths[chosen])

    # -- processes

    def serve(self, cell: Cell, plan: CellPlan, system: System, variant: str) -> Settings:
        """Has the processes of this system running, and returns their settings."""
        wanted = (served_cell(cell, system), system, variant)
        if self._served == wanted:
            return self._settings
        self._close()
        self._progress.update(self._bar, description=f"{cell.name} {system}: starting")
        folder = self._work / f"stack-{self._count}-{secrets.token_hex(2)}"
        folder.mkdir(parents=True)
        settings = self._settings = self._settings_of(cell, plan, system, variant, folder)
        flags = FLAGS[system]
        quiet = Console(quiet=True)
        self._workers = self._stack.enter_context(
            DemoStack(quiet, folder, self._broker, settings, flags.events, 1, observed=False, reuse=flags.reuse)
        )
        self._player = self._stack.enter_context(Player(folder / "load", settings, Requests(ITEMS, self._interactions)))
        self._served = wanted
        return settings

    def _close(self) -> None:
        self._served, self._warm_pools, self._known_users = (), set(), set()
        self._stack.close()

    def _settings_of(self, cell: Cell, plan: CellPlan, system: System, variant: str, folder: Path) -> Settings:
        model = self._model
        values = settings_of(cell, plan, system, variant)
        if system is System.O:
            longest = max(1.0, LENGTH_FACTORS[1]) * math.exp(2 * cell.history_sigma)
            hbm_bytes = max(plan.hbm_bytes, int(1.5 * POOL * plan.prefix_bytes * longest))
            values["worker"]["hbm_bytes"] = ByteSize(hbm_bytes)
        if system is System.B1:
            model = folder / "model"
            limited = cell.model().model_copy(update={"max_prefix_behaviours": self._limit})
            save_checkpoint(model, limited, random_checkpoint(cell.model(), seed=0).tensors)
        prefix = f"headline-{cell.name}-{system.value.lower()}-{secrets.token_hex(2)}"
        kafka = self._broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=PARTITIONS))
        # B1's limit makes it another model, and other threads take other times: their workers calibrate at the start.
        is_calibrated = system is not System.B1 and "threads" not in values["worker"]
        values["worker"] |= {"model": model, "calibration": self._calibration if is_calibrated else None}
        return Settings.model_validate(kafka.model_dump() | {"log": {"level": "warning"}} | values)

    def _reading(self) -> Reading:
        return self._workers.worker_readings()[0]

    def _roles(self) -> Mapping[int, str]:
        return {self._player.pid: "load"} | self._workers.roles()


def _used(window: MeasuredWindow, after: Reading, energy_j: float, slowdown: float) -> Used:
    def total(name: str, **labels: str) -> float:
        return after.total(name, **labels) - window.before.total(name, **labels)

    return Used(
        device_s=total(_DEVICE),
        preinfer_device_s=total(_DEVICE, work_class="preinfer"),
        preinfer_jobs=int(total(_JOBS)),
        preinfer_computed=int(total(_JOBS, outcome="computed")),
        preinfer_wasted=int(total(_WASTED)),
        energy_j=energy_j,
        cores=window.cpu_per_second(),
        foreign_cpu=window.foreign_cpu_per_second(),
        slowdown=slowdown,
    )
