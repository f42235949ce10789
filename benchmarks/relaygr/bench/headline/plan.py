"""A cell on this machine: its model, its times in milliseconds, its memory. Made once, and kept beside the results."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from relaygr.admission.latency import LatencyModel
from relaygr.bench.headline.grid import PAGE_TOKENS, SHORT, Cell
from relaygr.bench.headline.search import snapped
from relaygr.bench.rows import machine, now
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.calibration import QUICK_BUDGET_S, calibrate, save_calibration
from relaygr.worker.measuring import EngineMeter, bind_own_arena
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.engine import load_engine

ALONE_ROUNDS = 7
HALF = 0.5
A_LOADS = (0.3, 0.6, 0.8)
"""Figure A: parts of B0's capacity at the short history."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CellPlan:
    """The numbers of a cell. Times are of the engine alone: one process, pass after pass, nothing else running."""

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

    @property
    def latency(self) -> LatencyModel:
        """The latency model, fitted to the engine alone."""
        return LatencyModel(self.coefficients)

    def full_us(self, tokens: int, scored: int, history: int) -> float:
        """Full inference in one chunk by the engine alone: that of the bare loop at the median `history`, and the shape
        of the latency model elsewhere. The model's own T_full is fitted to prefixes in chunks, which take longer.
        """
        latency = self.latency
        at_median = latency.pre_us(history) + latency.hit_us(history, scored)
        return (latency.pre_us(tokens) + latency.hit_us(tokens, scored)) * self.full_ms * 1000 / at_median

    def short_rate_per_s(self, load: float) -> float:
        """The rate at which full inference on the short history takes this part of the device's time."""
        return snapped(load * 1000 / self.short_full_ms)


def make_plan(cell: Cell, model: Path, calibration: Path) -> CellPlan:
    """Writes the cell's checkpoint and its calibration for the workers, and measures the engine alone."""
    save_checkpoint(model, cell.model(), random_checkpoint(cell.model(), seed=0).tensors)
    engine = load_engine(model, None, page_tokens=PAGE_TOKENS, threads=1)
    bind_own_arena(engine)
    save_calibration(calibrate(engine, QUICK_BUDGET_S), calibration)
    alone = calibrate(engine, QUICK_BUDGET_S, rest=lambda: None)
    meter = EngineMeter(engine)
    tokens, short = engine.layout.tokens(cell.history), engine.layout.tokens(round(cell.history * SHORT))

    def median_ms(n: int) -> tuple[float, float]:
        pairs = [
            (sum(point.duration_us for point in meter.prefix(n, n)), meter.rank(n, cell.candidates).duration_us)
            for _ in range(ALONE_ROUNDS)
        ]
        return statistics.median(pre for pre, _ in pairs) / 1000, statistics.median(hit for _, hit in pairs) / 1000

    pre_ms, hit_ms = median_ms(tokens)
    full_ms, short_full_ms = pre_ms + hit_ms, sum(median_ms(short))
    prefix_bytes = engine.geometry.pages_for(tokens) * engine.geometry.page_bytes
    longest_bytes = engine.geometry.pages_for(engine.layout.tokens(cell.longest_history)) * engine.geometry.page_bytes
    return CellPlan(
        cell=cell.name,
        asked=cell.digest,
        machine=machine(),
        made_at=now(),
        engine=f"{engine.backend} on {engine.device.description}, one thread",
        full_ms=round(full_ms, 3),
        pre_ms=round(pre_ms, 3),
        hit_ms=round(hit_ms, 3),
        short_full_ms=round(short_full_ms, 3),
        deadline_ms=max(cell.least_deadline_ms, round(cell.deadline_factor * full_ms)),
        lead_ms=round(cell.lead_factor * pre_ms, 1),
        half_rate_per_s=snapped(HALF * 1000 / full_ms),
        prefix_bytes=prefix_bytes,
        # The longest prefix of figure A must fit, with others beside it.
        hbm_bytes=max(_MIB, cell.hbm_prefixes * prefix_bytes, 3 * longest_bytes),
        dram_bytes=max(_MIB, cell.dram_prefixes * prefix_bytes),
        coefficients=alone.coefficients,
    )


def save_plan(plan: CellPlan, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(plan), indent=1) + "\n", encoding="utf-8")


def load_plan(path: Path) -> CellPlan:
    """Raises RelayError for a file that is not a plan."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return CellPlan(**{**fields, "coefficients": LatencyCoefficients(**fields["coefficients"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RelayError(f"{path} is not the plan of a cell: {error}") from error
