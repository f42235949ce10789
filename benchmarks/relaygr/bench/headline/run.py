"""Runs the cells: one broker, one stack of processes for each system, one run for each point that a search asks for."""

from __future__ import annotations

import math
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from pydantic import ByteSize
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from relaygr.bench.energy import read_energy_uj, used_j
from relaygr.bench.generator.player import Player, Requests, Run
from relaygr.bench.generator.samples import Sample, read_samples
from relaygr.bench.generator.trace import MEASURED, WARM_UP, Trace, digest_of, read_trace, write_trace
from relaygr.bench.generator.workload import Workload, make_trace, reuse_of, with_reuse
from relaygr.bench.headline.decision import LEAST_SEEDS
from relaygr.bench.headline.figures import CONFIRMED, decide_rows, figures_of, longest_truncation
from relaygr.bench.headline.grid import ITEMS, LENGTH_FACTORS, PAGE_TOKENS, REUSES, SHORT, Cell
from relaygr.bench.headline.plan import A_LOADS, CellPlan, load_plan, make_plan, save_plan
from relaygr.bench.headline.rows import RunFile, RunRow, Used, columns_of, score_columns
from relaygr.bench.headline.search import Found, highest_rate, longest_history, snapped
from relaygr.bench.headline.systems import FLAGS, System
from relaygr.bench.pipeline.run import MeasuredWindow
from relaygr.bench.rows import machine, now
from relaygr.demo.processes import Reading
from relaygr.demo.stack import DemoStack
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings
from relaygr.traffic.population import Population, population_of
from relaygr.traffic.settings import TrafficSettings
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint

PARTITIONS = 8
SCORES_EVERY = 10
LONGEST_RUN = 5
POOL = 16
"""Users of the oracle, all of them ready in HBM."""
POOL_BUDGET_MS = 30_000
FRESH_SEEDS = 1_000
"""Runs that confirm a value have the seeds of the search plus a multiple of this."""
CONFIRMATIONS = 6
LONGEST_TUNE_FACTOR = 16
"""Rates are searched up to this multiple of the half load, times two."""
RUN_OVERHEAD_S = 4.0
"""Histories, their reading, encoding, and the wait for the last results."""
START_S = 9.0
PLAN_S = 25.0
TUNED = {
    "uncut": {},
    "one at a time": {"max_batch_requests": 1},
    "chunks of 2,048": {"max_chunk_tokens": 2_048},
}
"""The variants of B0. The fastest one at half load stands for it."""
_WASTED = "relaygr_cache_preinfers_wasted_total"
_JOBS = "relaygr_worker_preinfer_jobs_total"
_DEVICE = "relaygr_worker_device_seconds_total"


@dataclass(frozen=True, slots=True)
class Mode:
    """How much is run."""

    name: str
    seeds: tuple[int, ...]
    seconds: float
    least_requests: int
    """A run at a low rate lasts longer, up to `LONGEST_RUN` times, so that its P99 means something."""
    warm_up_s: float
    """Long enough for most returning users to come once: at first all are cold, and an overload of that start would be
    measured."""
    resolution: float
    """Factor between the highest rate that passed and the lowest that failed."""
    steps: int
    """Bisections of the length."""
    a_loads: tuple[float, ...]
    variants: tuple[str, ...]
    attempts: int
    """A run whose generator was late says nothing, and is repeated up to so many times in all."""
    measures_short_capacity: bool
    """Whether figure A takes the capacity of B0 at the short history from a search; else the engine alone gives it."""

    @property
    def decides(self) -> bool:
        return len(self.seeds) >= LEAST_SEEDS

    def seconds_at(self, rate_per_s: float) -> float:
        """The measured part of a run at this rate."""
        return min(max(self.seconds, self.least_requests / rate_per_s), LONGEST_RUN * self.seconds)

    @property
    def run_s(self) -> float:
        """About the time of one run."""
        return self.seconds + self.warm_up_s + RUN_OVERHEAD_S


QUICK_MODE = Mode("quick", (1,), 8.0, 100, 10.0, 1.5, 2, (0.3,), ("uncut",), 2, False)
FULL_MODE = Mode("full", tuple(range(1, 8)), 120.0, 1_000, 20.0, 1.05, 6, A_LOADS, tuple(TUNED), 3, True)


@dataclass(frozen=True, slots=True)
class Point:
    """One question to the systems."""

    figure: str
    history: int
    rate_per_s: float
    seed: int


Asked = Sequence[tuple[Cell, Sequence[System]]]
"""Cells, and the systems of each."""


def estimated_runs(systems: Sequence[System], mode: Mode) -> int:
    """About how many runs one cell takes."""
    bisections = math.ceil(math.log2(math.log(2) / math.log(mode.resolution)))
    seeds = len(mode.seeds)
    tuning = len(mode.variants) if System.B0 in systems and len(mode.variants) > 1 else 0
    rates = len(systems) * (3 + bisections) * seeds
    lengths = len(systems) * (2 + mode.steps) * seeds * len(mode.a_loads)
    short = (3 + bisections) if mode.measures_short_capacity else 0
    decided = len(systems) * (1 + len(mode.a_loads)) * seeds if mode.decides else 0
    return tuning + rates + lengths + short + decided


def estimated_s(asked: Asked, mode: Mode) -> float:
    """About the time of these cells."""
    plans = len({cell.plan_name for cell, _ in asked})
    starts = sum(len(systems) + len(mode.variants) for _, systems in asked)
    runs = sum(estimated_runs(systems, mode) for _, systems in asked)
    return plans * PLAN_S + starts * START_S + runs * mode.run_s


class Bench:
    """One folder of results, one broker, and the stack of the system that runs now."""

    def __init__(self, console: Console, out: Path, broker: LocalBroker, mode: Mode, interactions: Path | None) -> None:
        self._console, self._out, self._broker, self._mode = console, out, broker, mode
        self._interactions = interactions
        self._logged: Population | None = None
        self.file = RunFile(out)
        self._open = ExitStack()
        self._served: tuple[object, ...] = ()
        self._warm_pools: set[int] = set()
        self._known_users: set[str] = set()
        """Users of the runs so far on the processes that run now."""
        self._count = 0
        self._limit = 0
        """The longest history of B1."""
        self._settings = Settings()
        """Those of the processes that run now."""

    def __enter__(self) -> Bench:
        self._work = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="relaygr-headline-")))
        self._stack = self._open.enter_context(ExitStack())
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            TextColumn("{task.completed:.0f} of about {task.total:.0f} runs,"),
            TimeElapsedColumn(),
            TextColumn("passed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._progress = self._open.enter_context(Progress(*columns, console=self._console))
        self._bar = self._progress.add_task("", total=1)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    # -- cells

    def run_cells(self, asked: Asked) -> None:
        """Runs all figures of all cells."""
        self._progress.update(self._bar, total=sum(estimated_runs(systems, self._mode) for _, systems in asked))
        for cell, systems in asked:
            plan = self.plan(cell)
            self._describe(cell, plan)
            variant = self._tuned(cell, plan) if System.B0 in systems else "uncut"
            short_rate = self._short_capacity(cell, plan, variant)
            for system in systems:
                self._figures(cell, plan, system, variant, short_rate)

    def run_trace(self, cell: Cell, systems: Sequence[System], trace: Path) -> None:
        """Plays a trace of others on each system, without a search. Unless its users are those of a log, B0 and R then
        play it with other shares of returning users.
        """
        plan = self.plan(cell)
        self._describe(cell, plan)
        read = read_trace(trace)
        longest = int(read.history_length.max())
        if longest > cell.longest_history or int(read.candidates.max()) > cell.candidates:
            raise RelayError(
                f"{trace}: cell {cell.name} takes histories of up to {cell.longest_history:,} behaviours and "
                f"{cell.candidates} candidates, the trace has {longest:,} and {int(read.candidates.max())}"
            )
        measured = read.retrieval_us[read.part != WARM_UP]
        if not len(measured):
            raise RelayError(f"{trace}: every row is warm-up (part 0)")
        seconds = max(1e-3, float(measured.max() - measured.min()) / 1e6)
        # A file that was changed asks another question.
        figure = f"trace {trace.name} {digest_of(trace)}"
        point = Point(figure, int(np.median(read.history_length)), snapped(len(measured) / seconds), 0)
        pair = [system for system in systems if system in (System.B0, System.R)]
        reuses = REUSES if self._interactions is None else ()
        self._progress.update(self._bar, total=len(systems) + len(pair) * len(reuses))
        for system in systems:
            self._row(cell, plan, system, "uncut", point, trace)
        others = {}
        for reuse in reuses:
            others[reuse] = self._out / "traces" / f"{figure.replace(' ', '-')}-r{reuse:g}.parquet"
            write_trace(with_reuse(read, reuse), others[reuse])
        for system in pair:
            for reuse, path in others.items():
                self._row(cell, plan, system, "uncut", replace(point, figure=f"{figure} at reuse {reuse:g}"), path)

    def plan(self, cell: Cell) -> CellPlan:
        """The plan of the cell in this folder, made now if there is none. Raises RelayError for another machine's."""
        path = self._out / "plans" / f"{cell.plan_name}.json"
        self._model, self._calibration = self._work / cell.name / "model", self._work / cell.name / "calibration.json"
        if not path.exists():
            self._progress.update(self._bar, description=f"{cell.name}: measuring the engine alone")
            plan = make_plan(cell, self._model, self._calibration)
            save_plan(plan, path)
            shutil.copyfile(self._calibration, path.with_suffix(".calibration.json"))
            return plan
        plan = load_plan(path)
        if plan.machine != machine():
            raise RelayError(f"{path} was made on {plan.machine}, this is {machine()}: give another folder with --out")
        if plan.asked != cell.digest:
            raise RelayError(f"{path} was made for another definition of {cell.name}: give another folder with --out")
        save_checkpoint(self._model, cell.model(), random_checkpoint(cell.model(), seed=0).tensors)
        shutil.copyfile(path.with_suffix(".calibration.json"), self._calibration)
        return plan

    def _describe(self, cell: Cell, plan: CellPlan) -> None:
        self._console.print(
            f"{cell.name}: full inference on {cell.history:,} behaviours takes {plan.full_ms:.1f} ms, a hit "
            f"{plan.hit_ms:.1f} ms; deadline {plan.deadline_ms} ms, lead time {plan.lead_ms:.0f} ms",
            soft_wrap=True,
        )

    def _tuned(self, cell: Cell, plan: CellPlan) -> str:
        """The variant of B0 with the lowest latency at half load."""
        if len(self._mode.variants) == 1:
            return self._mode.variants[0]
        seed = self._mode.seeds[0]
        point = Point("tune", cell.history, plan.half_rate_per_s, seed)
        rows = {name: self._row(cell, plan, System.B0, name, point) for name in self._mode.variants}
        return min(rows, key=lambda name: (rows[name].late_share, rows[name].p99_ms))

    def _short_capacity(self, cell: Cell, plan: CellPlan, variant: str) -> float:
        """The capacity of B0 at the short history."""
        if not self._mode.measures_short_capacity:
            return plan.short_rate_per_s(1.0)
        history, seed = round(cell.history * SHORT), self._mode.seeds[0]
        start = plan.short_rate_per_s(0.5)
        found = highest_rate(
            lambda rate: self._row(cell, plan, System.B0, variant, Point("short", history, rate, seed)).passed,
            start, self._mode.resolution, start / 16, start * 16,
        )  # fmt: skip
        return found.passed or start

    def _figures(self, cell: Cell, plan: CellPlan, system: System, variant: str, short_rate: float) -> None:
        if system is System.B1:
            self._limit = longest_truncation(figures_of(self.file.rows, self._mode.name), cell.name, self._mode.decides)
            if not self._limit:
                self._console.print(f"{cell.name}: no history was found at which B0 meets the deadline: there is no B1")
                return
        half, seeds, steps = plan.half_rate_per_s, self._mode.seeds, self._mode.steps

        def asked(figure: str, seed: int, history: float, rate: float) -> RunRow:
            return self._row(cell, plan, system, variant, Point(figure, int(history), rate, seed))

        def rate_passes(seed: int, rate: float) -> bool:
            return asked("B", seed, cell.history, rate).passed

        def history_passes(seed: int, rate: float, history: float) -> bool:
            return asked("A", seed, history, rate).passed

        def confirms_rate(seed: int, rate: float) -> RunRow:
            return asked(CONFIRMED["B"], seed, cell.history, rate)

        def confirms_history(rate: float, seed: int, history: float) -> RunRow:
            return asked(CONFIRMED["A"], seed, history, rate)

        lowest, highest = half / 16, half * LONGEST_TUNE_FACTOR
        rates = [
            highest_rate(partial(rate_passes, seed), half, self._mode.resolution, lowest, highest) for seed in seeds
        ]
        self._confirm(rates, confirms_rate, lambda rate: snapped(rate / self._mode.resolution))
        if system is System.B1:
            return  # Its length is fixed.
        shortest, longest = (int(cell.history * factor) for factor in LENGTH_FACTORS)
        for load in self._mode.a_loads:
            rate = snapped(load * short_rate)
            lengths = [
                longest_history(partial(history_passes, seed, rate), shortest, longest, PAGE_TOKENS, steps)
                for seed in seeds
            ]
            self._confirm(lengths, partial(confirms_history, rate), lambda history: history - PAGE_TOKENS)

    def _confirm(
        self,
        found: Sequence[Found],
        run_at: Callable[[int, float], RunRow],
        lower: Callable[[float], float],
    ) -> None:
        """Decides about the lowest of the seeds' highest values, and goes lower until the decision rule holds.

        The search chose a value because its runs passed, so those runs overrate it. Each decision therefore has seeds
        that no other run had.
        """
        reached = [each.passed for each in found if each.passed is not None]
        if not self._mode.decides or len(reached) < len(found):
            return
        value = min(reached)
        for step in range(1, CONFIRMATIONS + 1):
            rows = [run_at(seed + step * FRESH_SEEDS, value) for seed in self._mode.seeds]
            if decide_rows(rows).passed:
                return
            value = lower(value)
            if value <= 0:
                return

    # -- runs

    def _row(
        self, cell: Cell, plan: CellPlan, system: System, variant: str, point: Point, trace: Path | None = None
    ) -> RunRow:
        """The row of this point: from the file, or of a run that is made now."""
        variant = self._variant(system, variant)
        key = (
            self._mode.name,
            cell.name,
            point.figure,
            system.value,
            variant,
            point.history,
            point.rate_per_s,
            point.seed,
        )
        rows = self.file.attempts(key)
        while not any(row.valid for row in rows) and len(rows) < self._mode.attempts:
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
        return f"{variant}, at most {self._limit:,} behaviours" if system is System.B1 else ""

    def _tell(self, row: RunRow) -> None:
        verdict = "passed" if row.passed else "late" if row.valid else "not valid: the generator was late"
        if row.is_oversaturated and row.valid:
            verdict = "over-saturated"
        self._progress.console.print(
            f"  {row.system:<6} {row.figure}  {row.history:>6,} behaviours  {row.rate_per_s:>6g}/s  seed {row.seed}  "
            f"{row.late_share:6.1%} late of {row.offered:<5}  P99 {row.offered_p99_ms:6.0f} ms  {verdict}",
            soft_wrap=True,
        )

    def _run(
        self, cell: Cell, plan: CellPlan, system: System, variant: str, point: Point, attempt: int, trace: Path | None
    ) -> RunRow:
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
        samples_path = self._samples_path(cell, system, variant, point)
        run = Run(name, path, samples_path, plan.deadline_ms, FLAGS[system].events, plan.lead_ms, SCORES_EVERY)
        samples_path.parent.mkdir(parents=True, exist_ok=True)
        energy: list[dict[Path, int]] = []

        def at_begin() -> Reading:
            energy.append(read_energy_uj())
            return self._reading()

        window = MeasuredWindow(self._player.begun(name), self._roles, at_begin)
        self._player.play(run, window.sample)
        energy_j = used_j(energy[0], read_energy_uj()) if energy else math.nan
        samples = read_samples(samples_path)
        after = self._reading()
        used = _used(window, after, energy_j)
        scored = cell.suffix + cell.candidates
        engine_us = {each.row: plan.full_us(each.history_length, scored, cell.history) for each in samples}
        measured = played.retrieval_us[played.part != WARM_UP]
        seconds = max(1e-3, float(measured.max() - measured.min()) / 1e6)
        row = RunRow(
            measured_at=now(),
            machine=machine(),
            broker=self._broker.what.split(" at ")[0],
            mode=self._mode.name,
            cell=cell.name,
            figure=point.figure,
            system=system.value,
            variant=variant,
            history=point.history,
            rate_per_s=point.rate_per_s,
            seed=point.seed,
            attempt=attempt,
            **columns_of(samples, plan.deadline_ms, seconds, reuse, used, engine_us),
            **score_columns(samples, self._reference(cell, system, point)),
        )
        self.file.add(row, samples)
        return row

    def _reference(self, cell: Cell, system: System, point: Point) -> list[Sample]:
        """The samples of B0 on the same trace, if there are any; its scores are full inference's."""
        if system in (System.B0, System.B1, System.O):
            return []
        for variant in TUNED:
            path = self._samples_path(cell, System.B0, variant, point)
            if path.exists():
                return read_samples(path)
        return []

    def _trace(self, cell: Cell, plan: CellPlan, point: Point) -> Path:
        """The file of the trace: the same for all systems."""
        name = f"{cell.name}-n{point.history}-q{point.rate_per_s:g}-s{point.seed}-{self._mode.name}"
        path = self._out / "traces" / f"{name}.parquet"
        if not path.exists():
            write_trace(make_trace(self._workload(cell, plan, point), f"{name}-", self._users(cell)), path)
        return path

    def _workload(self, cell: Cell, plan: CellPlan, point: Point) -> Workload:
        return Workload(
            seed=point.seed,
            rate_per_s=point.rate_per_s,
            seconds=self._mode.seconds_at(point.rate_per_s),
            warm_up_s=self._mode.warm_up_s,
            reuse=cell.reuse,
            return_gap_s=cell.return_gap_s,
            history_median=point.history,
            history_max=min(2 * point.history, cell.longest_history),
            lead_median_ms=plan.lead_ms,
            suffix=cell.suffix,
            candidates=cell.candidates,
            zipf=cell.zipf,
            history_sigma=cell.history_sigma,
            growth=cell.growth,
            burst_factor=cell.burst_factor,
            hot_user_share=cell.hot_user_share,
            partitions=PARTITIONS,
        )

    def _users(self, cell: Cell) -> Population | None:
        if self._interactions is not None and self._logged is None:
            self._logged = population_of(
                TrafficSettings(
                    interactions=self._interactions, users=100_000, history_max=cell.longest_history, suffix=cell.suffix
                )
            )
        return self._logged

    def _samples_path(self, cell: Cell, system: System, variant: str, point: Point) -> Path:
        # Traces of two modes differ, and scores are compared on one trace.
        about = f"{point.figure}-n{point.history}-q{point.rate_per_s:g}-s{point.seed}-{self._mode.name}"
        name = f"{cell.name}-{system}-{variant}-{about}".replace(" ", "_").replace(",", "").replace("/", "_")
        return self._out / "samples" / f"{name}.parquet"

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
        wanted = (cell.name, system, variant)
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
        flags, model = FLAGS[system], self._model
        hbm_bytes = plan.hbm_bytes
        if system is System.O:
            longest = max(1.0, LENGTH_FACTORS[1]) * math.exp(2 * cell.history_sigma)
            hbm_bytes = max(hbm_bytes, int(1.5 * POOL * plan.prefix_bytes * longest))
        if system is System.B1:
            model = folder / "model"
            limited = cell.model().model_copy(update={"max_prefix_behaviours": self._limit})
            save_checkpoint(model, limited, random_checkpoint(cell.model(), seed=0).tensors)
        # Full inference needs no cuts: they cost it time.
        own: dict[str, Any] = {} if flags.chunks else {"max_chunk_tokens": cell.longest_history}
        if system is System.B0:
            own |= TUNED[variant]
        prefix = f"headline-{cell.name}-{system.value.lower()}-{secrets.token_hex(2)}"
        kafka = self._broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=PARTITIONS))
        values: dict[str, Any] = {
            **kafka.model_dump(),
            "log": {"level": "warning"},
            "worker": {
                "model": model,
                "calibration": self._calibration if system is not System.B1 else None,
                "page_tokens": PAGE_TOKENS,
                "hbm_bytes": ByteSize(hbm_bytes),
                "dram_bytes": ByteSize(plan.dram_bytes if flags.reuse else 0),
                "history_max_bytes": ByteSize(2 << 30),
                **own,
            },
        }
        for name, value in flags.settings.items():
            section, _, key = name.partition(".")
            values.setdefault(section, {})[key] = value
        return Settings.model_validate(values)

    def _reading(self) -> Reading:
        return self._workers.worker_readings()[0]

    def _roles(self) -> Mapping[int, str]:
        return {self._player.pid: "load"} | self._workers.roles()


def _used(window: MeasuredWindow, after: Reading, energy_j: float) -> Used:
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
    )
