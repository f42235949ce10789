"""Compares simulated with measured runs of one load. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relaygr.runtime.errors import RelayError
from relaygr.simulate.figures import ENDINGS, HIGHEST_LOAD, NO_LATENCY, RANKED, Requests

P50_LIMIT, P99_LIMIT, LATE_LIMIT, MIX_LIMIT = 0.05, 0.10, 0.02, 0.03


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one run, measured or simulated. `mix`: the share of each end."""

    requests: int
    p50_ms: float
    p99_ms: float
    late_share: float
    mix: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One cell: the median of the measured runs, their spread (largest - smallest), and the simulated ones."""

    load: float
    """The part of this system's capacity, or of the time for which its device worked."""
    system: str
    rate_per_s: float
    repeats: int
    requests: int
    measured_p50_ms: float
    simulated_p50_ms: float
    p50_error: float
    p50_spread: float
    measured_p99_ms: float
    simulated_p99_ms: float
    p99_error: float
    p99_spread: float
    measured_late: float
    simulated_late: float
    late_error: float
    late_spread: float
    mix_error: float
    mix_worst: str
    mix_spread: float
    foreign_cpu: float
    """Cores that other processes of the machine used meanwhile; median of the measured runs."""
    slowdown: float
    """How many times as long as on a quiet machine fixed work took meanwhile; the highest of the measured runs."""
    in_range: bool

    @property
    def excess(self) -> float:
        """The largest difference as a multiple of what is allowed."""
        return max(
            abs(self.p50_error) / max(P50_LIMIT, self.p50_spread),
            abs(self.p99_error) / max(P99_LIMIT, self.p99_spread),
            abs(self.late_error) / max(LATE_LIMIT, self.late_spread),
            self.mix_error / max(MIX_LIMIT, self.mix_spread),
        )

    @property
    def agrees(self) -> bool:
        return self.excess <= 1.0

    @property
    def verdict(self) -> str:
        """In words, with every figure that is beyond its limit and beyond the spread of the measured runs."""
        wrong = [
            f"{name} {error:+.0%} (limit {max(limit, spread):.0%})"
            for name, error, limit, spread in (
                ("P50", self.p50_error, P50_LIMIT, self.p50_spread),
                ("P99", self.p99_error, P99_LIMIT, self.p99_spread),
                ("late", self.late_error, LATE_LIMIT, self.late_spread),
                (self.mix_worst, self.mix_error, MIX_LIMIT, self.mix_spread),
            )
            if abs(error) > max(limit, spread)
        ]
        told = f"differs: {', '.join(wrong)}" if wrong else "agrees"
        return told if self.in_range else f"out of range ({told})"


def outcome_of(requests: Requests, budget_us: int) -> Outcome:
    """The figures of these requests."""
    answered = requests.latencies_us[np.isin(requests.endings, RANKED) & (requests.latencies_us != NO_LATENCY)]
    if not answered.size:
        raise RelayError("a run has no answers: this machine is too busy")
    return Outcome(
        len(requests),
        float(np.percentile(answered, 50)) / 1000,
        float(np.percentile(answered, 99)) / 1000,
        1 - float(requests.in_time(budget_us).mean()),
        tuple(float((requests.endings == code).mean()) for code in range(len(ENDINGS))),
    )


def row_of(
    load: float,
    system: str,
    rate_per_s: float,
    measured: Sequence[Outcome],
    simulated: Sequence[Outcome],
    foreign_cpu: float = 0.0,
    slowdown: float = 1.0,
) -> Row:
    """Compares a cell's runs. Both sequences have the same seeds in the same order."""

    def median(runs: Sequence[Outcome], name: str) -> float:
        return float(np.median([getattr(run, name) for run in runs]))

    def spread(name: str) -> float:
        values = [getattr(run, name) for run in measured]
        return float(max(values) - min(values))

    p50, p99, late = (median(measured, name) for name in ("p50_ms", "p99_ms", "late_share"))
    mixes = np.array([run.mix for run in measured])
    errors = np.abs(np.median(mixes, axis=0) - np.median([run.mix for run in simulated], axis=0))
    worst = int(errors.argmax())
    return Row(
        load=load,
        system=system,
        rate_per_s=rate_per_s,
        repeats=len(measured),
        requests=sum(run.requests for run in measured),
        measured_p50_ms=p50,
        simulated_p50_ms=median(simulated, "p50_ms"),
        p50_error=median(simulated, "p50_ms") / p50 - 1,
        p50_spread=spread("p50_ms") / p50,
        measured_p99_ms=p99,
        simulated_p99_ms=median(simulated, "p99_ms"),
        p99_error=median(simulated, "p99_ms") / p99 - 1,
        p99_spread=spread("p99_ms") / p99,
        measured_late=late,
        simulated_late=median(simulated, "late_share"),
        late_error=median(simulated, "late_share") - late,
        late_spread=spread("late_share"),
        mix_error=float(errors[worst]),
        mix_worst=ENDINGS[worst].value,
        mix_spread=float(np.ptp(mixes, axis=0)[worst]),
        foreign_cpu=foreign_cpu,
        slowdown=slowdown,
        in_range=load <= HIGHEST_LOAD,
    )


def inverted(rows: Sequence[Row]) -> list[str]:
    """The pairs of cells that the simulation puts in another order of P99 than the measured runs, although those are
    further apart than they are uncertain. Only cells in range.
    """
    found = []
    for one, other in itertools.combinations([row for row in rows if row.in_range], 2):
        apart_ms = sum(each.measured_p99_ms * max(P99_LIMIT, each.p99_spread / 2) for each in (one, other))
        measured_ms = one.measured_p99_ms - other.measured_p99_ms
        if abs(measured_ms) > apart_ms and measured_ms * (one.simulated_p99_ms - other.simulated_p99_ms) < 0:
            found.append(f"{one.system} at {one.load:g} and {other.system} at {other.load:g}")
    return found
