"""A cell on this machine: its model, its times in milliseconds, its memory.

The engine alone is measured once for each shape of a model (`EngineTimes`). The plan of a cell is a pure function of
these times. Both are kept beside the results:

    engines/SHAPE.json               the times of the engine alone
    engines/SHAPE.calibration.json   the calibration of the workers
    engines/SHAPE.alone.json         the same of the engine alone
    plans/CELL.json                  the plan of a cell
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from relaygr.admission.latency import LatencyModel, Stage
from relaygr.bench.headline.grid import PAGE_TOKENS, SHORT, Cell
from relaygr.bench.headline.search import snapped
from relaygr.bench.rows import machine, now, refuse_other_machine
from relaygr.bench.speed import MachineSpeed
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.calibration import QUICK_BUDGET_S, calibrate, save_calibration
from relaygr.worker.measuring import EngineMeter, bind_own_arena
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.engine import load_engine

ALONE_ROUNDS = 5
"""Rounds before, between and after the two calibrations."""
HALF = 0.5
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """What a shape takes of the engine alone: one process, pass after pass, nothing else running."""

    shape: str
    machine: str
    made_at: str
    engine: str
    pre_ms: float
    """Computing the median prefix, in one chunk."""
    hit_ms: float
    """Ranking on it."""
    short_full_ms: float
    """Full inference on the short history of figure A."""
    prefix_bytes: int
    """K,V of the median history."""
    longest_bytes: int
    """K,V of the longest history of figure A."""
    coefficients: LatencyCoefficients
    slowdown: float = math.nan
    """The CPU time of fixed work meanwhile, as a multiple of its quiet time. NaN: not known."""


@dataclass(frozen=True, slots=True)
class CellPlan:
    """The numbers of a cell. Times are of the engine alone."""

    cell: str
    asked: str
    """A digest of the cell's definition."""
    machine: str
    made_at: str
    engine: str
    full_ms: float
    """Full inference on the median history, in one chunk."""
    pre_ms: float
    hit_ms: float
    short_full_ms: float
    """Full inference on the short history of figure A."""
    deadline_ms: int
    lead_ms: float
    half_rate_per_s: float
    """Half of the rate at which full inference on the median history fills the device."""
    prefix_bytes: int
    """K,V of the median history."""
    hbm_bytes: int
    dram_bytes: int
    coefficients: LatencyCoefficients
    slowdown: float = math.nan
    """Of the machine while the engine alone was measured, as in `EngineTimes`."""

    @property
    def latency(self) -> LatencyModel:
        """The latency model, fitted to the engine alone."""
        return LatencyModel(self.coefficients)

    def full_us(self, tokens: int, scored: int, history: int) -> float:
        """Full inference in one chunk by the engine alone: that of the bare loop at the median `history`, and the shape
        of the latency model elsewhere. The model's own T_full is fitted to prefixes in chunks, which take longer.
        """
        latency = self._latency_at(history, scored, self.full_ms * 1000)
        return latency.pre_us(tokens) + latency.hit_us(tokens, scored)

    def latency_in_worker(self, cell: Cell, over_engine: float) -> LatencyModel:
        """The latency model, with times `over_engine` times as long as those of the bare loop."""
        return self._latency_at(cell.history, cell.suffix + cell.candidates, over_engine * self.full_ms * 1000)

    def _latency_at(self, history: int, scored: int, full_us: float) -> LatencyModel:
        """The latency model, scaled so that full inference on this history takes this time."""
        factor = full_us / (self.latency.pre_us(history) + self.latency.hit_us(history, scored))
        return self.latency.scaled({Stage.PRE: factor, Stage.HIT: factor})

    def short_rate_per_s(self, load: float) -> float:
        """The rate at which full inference on the short history takes this part of the device's time."""
        return snapped(load * 1000 / self.short_full_ms)


def measure_engine(cell: Cell, calibration: Path, speed: MachineSpeed) -> EngineTimes:
    """Calibrates the workers of this shape, writes their calibration, and measures the engine alone."""
    with TemporaryDirectory(prefix="relaygr-engine-") as folder:
        return _measured(cell, Path(folder) / "model", calibration, speed)


def _measured(cell: Cell, model: Path, calibration: Path, speed: MachineSpeed) -> EngineTimes:
    write_model(cell, model)
    engine = load_engine(model, None, page_tokens=PAGE_TOKENS, threads=1)
    bind_own_arena(engine)
    meter = EngineMeter(engine)
    tokens, short = engine.layout.tokens(cell.history), engine.layout.tokens(round(cell.history * SHORT))
    pairs: dict[int, list[tuple[float, float]]] = {tokens: [], short: []}

    def measure() -> None:
        for n, measured in pairs.items():
            for _ in range(ALONE_ROUNDS):
                pre_us = sum(point.duration_us for point in meter.prefix(n, n))
                measured.append((pre_us, meter.rank(n, cell.candidates).duration_us))

    # The speed of a machine changes within seconds, so the rounds are spread over the time of the calibrations. Others
    # can only slow the machine down, so the fastest quarter of the rounds is that of the engine alone.
    with speed.watch() as watch:
        measure()
        save_calibration(calibrate(engine, QUICK_BUDGET_S), calibration)
        measure()
        alone = calibrate(engine, QUICK_BUDGET_S, rest=lambda: None)
        save_calibration(alone, alone_path(calibration))
        measure()

    def quiet_ms(n: int) -> list[float]:
        return [statistics.quantiles(times_us)[0] / 1000 for times_us in zip(*pairs[n], strict=True)]

    pre_ms, hit_ms = quiet_ms(tokens)
    short_full_ms = sum(quiet_ms(short))
    prefix_bytes = engine.geometry.pages_for(tokens) * engine.geometry.page_bytes
    longest_bytes = engine.geometry.pages_for(engine.layout.tokens(cell.longest_history)) * engine.geometry.page_bytes
    return EngineTimes(
        shape=cell.shape,
        machine=machine(),
        made_at=now(),
        engine=f"{engine.backend} on {engine.device.description}, one thread",
        pre_ms=round(pre_ms, 3),
        hit_ms=round(hit_ms, 3),
        short_full_ms=round(short_full_ms, 3),
        prefix_bytes=prefix_bytes,
        longest_bytes=longest_bytes,
        coefficients=alone.coefficients,
        slowdown=round(watch.slowdown_since(-math.inf), 3),
    )


def alone_path(calibration: Path) -> Path:
    """The calibration of the engine alone that was measured with this one."""
    return calibration.with_name(calibration.name.replace(".calibration.", ".alone."))


def write_model(cell: Cell, folder: Path) -> None:
    """Writes the checkpoint of the cell."""
    save_checkpoint(folder, cell.model(), random_checkpoint(cell.model(), seed=0).tensors)


def plan_of(cell: Cell, engine: EngineTimes) -> CellPlan:
    """The plan of a cell with the times of its shape. Pure."""
    full_ms = engine.pre_ms + engine.hit_ms
    return CellPlan(
        cell=cell.plan_name,
        asked=cell.digest,
        machine=engine.machine,
        made_at=engine.made_at,
        engine=engine.engine,
        full_ms=round(full_ms, 3),
        pre_ms=engine.pre_ms,
        hit_ms=engine.hit_ms,
        short_full_ms=engine.short_full_ms,
        deadline_ms=max(cell.least_deadline_ms, round(cell.deadline_factor * full_ms)),
        lead_ms=round(cell.lead_factor * engine.pre_ms, 1),
        half_rate_per_s=snapped(HALF * 1000 / full_ms),
        prefix_bytes=engine.prefix_bytes,
        # The longest prefix of figure A must fit, with others beside it.
        hbm_bytes=max(_MIB, cell.hbm_prefixes * engine.prefix_bytes, 3 * engine.longest_bytes),
        dram_bytes=max(_MIB, cell.dram_prefixes * engine.prefix_bytes),
        coefficients=engine.coefficients,
        slowdown=engine.slowdown,
    )


def plan_in(
    out: Path, cell: Cell, on_measure: Callable[[], MachineSpeed | None] = lambda: None
) -> tuple[CellPlan, Path]:
    """The plan of the cell in this folder, and the calibration of its workers. What is not there yet is made now:
    `on_measure` is called before the engine is measured, and gives the speed of the machine if the caller has it.
    Raises RelayError for files of another machine or definition.
    """
    path, measured = out / "plans" / f"{cell.plan_name}.json", out / "engines" / f"{cell.shape}.json"
    calibration = measured.with_suffix(".calibration.json")
    if path.exists():
        plan = load_plan(path)
        if plan.asked != cell.digest:
            raise RelayError(f"{path} was made for another definition of {cell.name}: give another folder with --out")
        if not calibration.exists():
            raise RelayError(f"{calibration}, with which {path} was made, is gone: give another folder with --out")
    else:
        if not measured.exists():
            speed = on_measure() or MachineSpeed(out)
            measured.parent.mkdir(parents=True, exist_ok=True)
            save_engine_times(measure_engine(cell, calibration, speed), measured)
        plan = plan_of(cell, load_engine_times(measured))
        save_plan(plan, path)
    refuse_other_machine(path, plan.machine)
    return plan, calibration


def save_plan(plan: CellPlan, path: Path) -> None:
    _save(plan, path)


def load_plan(path: Path) -> CellPlan:
    """Raises RelayError for a file that is not a plan. One of an older version has no slowdown."""
    return CellPlan(**_fields(path, CellPlan, "the plan of a cell"))


def save_engine_times(times: EngineTimes, path: Path) -> None:
    _save(times, path)


def load_engine_times(path: Path) -> EngineTimes:
    """Raises RelayError for a file without the times of an engine."""
    return EngineTimes(**_fields(path, EngineTimes, "the times of an engine"))


def _save(found: CellPlan | EngineTimes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def _fields(path: Path, kind: type, name: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = [each for each in fields(kind) if each.name in found or each.default is MISSING]
        values = {each.name: found[each.name] for each in known}
        return values | {"coefficients": LatencyCoefficients(**values["coefficients"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RelayError(f"{path} does not have {name}: {error}") from error
