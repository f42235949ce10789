"""One run as a row of `runs.csv`: everything that the report says comes from these rows."""

from __future__ import annotations

import csv
import math
import typing
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from relaygr.bench.generator.samples import LOST, Sample
from relaygr.bench.generator.trace import WARM_UP
from relaygr.bench.headline.decision import LATE_LIMIT, queue_growth
from relaygr.bench.rows import append_rows
from relaygr.demo.summary import SCORE_TOLERANCE, percentile
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Outcome
from relaygr.schemas.messages import Path as RankingPath

LAG_LIMIT = 0.02
"""A run is valid if the generator's P99.9 lag is at most this part of the deadline."""
SLOW_LIMIT = 1.25
"""A run that decides is invalid if fixed work took more than so many times its quiet CPU time. The run itself makes it
1.05 to 1.16, another guest on the same core 1.5 times."""
QUEUE_GROWTH = 5.0
"""A run is over-saturated if so many more requests are in flight at its end."""
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0)


AT_RATE, OF_TRACE = "rate ", "trace "
"""How the figure of a run without a search begins."""
AT_REUSE = " at reuse "
"""In the figure of a trace that is played with another share of returning users."""
SIMULATED = "simulated"
"""How the broker's description of a simulated run begins."""
CHECKED = "checked.csv"
"""The file of a folder that compares its live runs with simulated ones."""
OF_LOG = "-log-"
"""Stands in the name of a mode whose users are those of an interaction log."""
QUICK_NAME = "quick"
"""How the name of the quick mode begins."""


def measures_b0_once(mode: str) -> bool:
    """Whether the mode of this name measures B0 only at a cell's own share of returning users. It plays lower shares
    on traces of the same times and lengths (`with_reuse`), which are the same work for B0. Users of a log have
    histories of their own, so they cannot be exchanged.
    """
    return mode.startswith(QUICK_NAME) and OF_LOG not in mode


@dataclass(frozen=True, slots=True)
class RunRow:
    """One system on one trace. Shares are 0 to 1 of the measured requests; latencies count from the scheduled time."""

    measured_at: str
    machine: str
    code: str
    """The commit, as `rows.code`. Empty if it is not known."""
    broker: str
    mode: str
    cell: str
    figure: str
    """A (the length varies) and B (the rate varies), `A confirmed` and `B confirmed` (what these found, with fresh
    seeds), tune (variants of B0), short (capacity of B0 at the short history of A), `AT_RATE` and a
    rate, or `OF_TRACE` and a file.
    """
    system: str
    variant: str
    history: int
    """Median length of the trace."""
    rate_per_s: float
    seed: int
    attempt: int
    seconds: float
    """The measured part of the trace."""
    deadline_ms: int
    offered: int
    late: int
    """Without a whole answer within the deadline: late, truncated, failed, expired or lost."""
    late_share: float
    truncated: int
    failed: int
    expired: int
    lost: int
    p50_ms: float
    p99_ms: float
    """Of whole answers."""
    p999_ms: float
    offered_p99_ms: float
    """Of all offered requests; one without a whole answer is infinite."""
    hbm_share: float
    dram_share: float
    pending_share: float
    full_share: float
    reuse: float
    """Requests whose user came before."""
    cached_token_share: float
    """Prefix tokens that were cached when the worker looked."""
    stale: int
    reloads: int
    reload_mean_ms: float
    queue_mean_ms: float
    wait_mean_ms: float
    to_worker_p99_ms: float
    in_worker_p50_ms: float
    in_worker_p99_ms: float
    to_gateway_p99_ms: float
    worker_over_engine: float
    """Time in the worker without the queue, as a multiple of what the engine alone takes for full inference; median of
    the requests that took the full path. NaN without any.
    """
    device_s: float
    """Device time in the whole run, its warm-up included, and of that the part for pre-infer."""
    preinfer_device_s: float
    device_use: float
    device_s_per_1000: float
    """For a thousand ranked requests."""
    energy_j_per_1000: float
    """Energy of the machine's processors, whatever used it, for a thousand ranked requests. NaN: not readable."""
    preinfer_jobs: int
    preinfer_computed: int
    preinfer_wasted: int
    """Prefixes that no request used."""
    cpu_worker: float
    cpu_trigger: float
    cpu_load: float
    cpu_broker: float
    foreign_cpu: float
    lag_p999_ms: float
    slowdown: float
    """The CPU time of fixed work during the measured part, as a multiple of its quiet time. NaN: not known."""
    queue_growth: float
    scores_compared: int
    scores_worst_error: float
    scores_different: int
    valid: bool

    @property
    def passed(self) -> bool:
        """Whether the deadline holds at P99 in this run."""
        return self.valid and not self.is_oversaturated and self.late_share <= LATE_LIMIT and not self.scores_different

    @property
    def verdict(self) -> str:
        """Whether the run passed, and if not, why."""
        if not self.valid:
            why = f"the machine took {self.slowdown:.2f} times as long" if self.was_slow else "the generator was late"
            return f"not valid: {why}"
        if self.is_oversaturated:
            return "over-saturated"
        if self.scores_different:
            return f"other scores than B0's in {self.scores_different} requests"
        return "passed" if self.passed else "late"

    @property
    def was_slow(self) -> bool:
        """Whether the run is invalid because of the machine's speed alone."""
        return not self.valid and self.lag_p999_ms <= LAG_LIMIT * self.deadline_ms

    @property
    def is_oversaturated(self) -> bool:
        return self.queue_growth > QUEUE_GROWTH

    @property
    def has_other_reuse(self) -> bool:
        """Whether the trace was given another share of returning users than its own."""
        return self.figure.startswith(OF_TRACE) and AT_REUSE in self.figure

    @property
    def is_simulated(self) -> bool:
        return self.broker.startswith(SIMULATED)

    @property
    def hit_share(self) -> float:
        """Offered requests that found their prefix, or waited for the job that computed it."""
        return self.hbm_share + self.dram_share + self.pending_share

    @property
    def wasted_share(self) -> float:
        """Of the computed prefixes, those that no request used. NaN without any."""
        return self.preinfer_wasted / self.preinfer_computed if self.preinfer_computed else math.nan

    @property
    def key(self) -> tuple[object, ...]:
        """The question that this row answers, without its attempt."""
        asked = (self.figure, self.system, self.variant, self.history, self.rate_per_s, self.seed)
        return (self.mode, self.cell, *asked)


@dataclass(frozen=True, slots=True)
class Used:
    """What a run used of the machine: counters of the worker, cores by role, and how fast it was."""

    device_s: float = 0.0
    preinfer_device_s: float = 0.0
    preinfer_jobs: int = 0
    preinfer_computed: int = 0
    preinfer_wasted: int = 0
    energy_j: float = math.nan
    cores: Mapping[str, float] | None = None
    foreign_cpu: float = math.nan
    slowdown: float = math.nan
    """As in `RunRow`."""


def columns_of(
    samples: Sequence[Sample],
    deadline_ms: int,
    seconds: float,
    reuse: float,
    used: Used,
    engine_us: Mapping[int, float],
    slow_limit: float = math.inf,
) -> dict[str, typing.Any]:
    """The measured columns. `engine_us`: what full inference takes by the engine alone, by row of the trace. A run with
    a higher slowdown than `slow_limit` is invalid.
    """
    measured = [each for each in samples if each.part != WARM_UP]
    if not measured:
        raise RelayError("the run has no measured request")
    deadline_us = deadline_ms * 1000
    count = len(measured)
    answered = [each for each in measured if each.is_whole and each.latency_us is not None]
    latencies = np.sort(np.array([each.latency_us for each in answered], np.float64)) / 1000
    place = math.ceil(0.99 * count) - 1
    late = sum(each.is_late(deadline_us) for each in measured)
    paths = Counter(each.path for each in measured if each.status == Outcome.RANKED)
    ranked = [each for each in measured if each.status == Outcome.RANKED]
    reloaded = [each.reload_us for each in ranked if each.reload_us]
    prefix_tokens = sum(each.prefix_tokens for each in ranked)
    ratios = [
        (each.in_worker_us - each.queue_us) / engine_us[each.row] for each in ranked if each.path == RankingPath.FULL
    ]
    begins = [each.ranking_us for each in measured]
    # An answer that never came is in flight until its deadline.
    ends = [each.ranking_us + (each.latency_us if each.latency_us is not None else deadline_us) for each in measured]
    lag_ms = percentile([each.lag_us / 1000 for each in measured], 99.9)
    rankings = sum(each.status == Outcome.RANKED for each in samples)
    whole_s = (max(each.ranking_us for each in samples) - min(each.ranking_us for each in samples)) / 1e6
    cores = used.cores or {}
    return {
        "seconds": seconds,
        "deadline_ms": deadline_ms,
        "offered": count,
        "late": late,
        "late_share": late / count,
        "truncated": paths[RankingPath.TRUNCATED],
        "failed": sum(each.status == Outcome.FAILED for each in measured),
        "expired": sum(each.status == Outcome.EXPIRED for each in measured),
        "lost": sum(each.status == LOST for each in measured),
        "p50_ms": percentile(latencies, 50),
        "p99_ms": percentile(latencies, 99),
        "p999_ms": percentile(latencies, 99.9),
        "offered_p99_ms": float(latencies[place]) if place < len(latencies) else math.inf,
        "hbm_share": paths[RankingPath.HBM] / count,
        "dram_share": paths[RankingPath.DRAM] / count,
        "pending_share": paths[RankingPath.PENDING] / count,
        "full_share": paths[RankingPath.FULL] / count,
        "reuse": reuse,
        "cached_token_share": sum(each.tokens_cached for each in ranked) / prefix_tokens if prefix_tokens else 0.0,
        "stale": sum(each.history_stale for each in measured),
        "reloads": len(reloaded),
        "reload_mean_ms": float(np.mean(reloaded)) / 1000 if reloaded else 0.0,
        "queue_mean_ms": _mean_ms([each.queue_us for each in ranked]),
        "wait_mean_ms": _mean_ms([each.wait_us for each in ranked]),
        "to_worker_p99_ms": percentile([each.to_worker_us / 1000 for each in ranked], 99),
        "in_worker_p50_ms": percentile([each.in_worker_us / 1000 for each in ranked], 50),
        "in_worker_p99_ms": percentile([each.in_worker_us / 1000 for each in ranked], 99),
        "to_gateway_p99_ms": percentile([each.to_gateway_us / 1000 for each in ranked], 99),
        "worker_over_engine": percentile(ratios, 50),
        "device_s": used.device_s,
        "preinfer_device_s": used.preinfer_device_s,
        "device_use": used.device_s / whole_s if whole_s else 0.0,
        "device_s_per_1000": 1000 * used.device_s / rankings if rankings else math.nan,
        "energy_j_per_1000": 1000 * used.energy_j / rankings if rankings else math.nan,
        "preinfer_jobs": used.preinfer_jobs,
        "preinfer_computed": used.preinfer_computed,
        "preinfer_wasted": used.preinfer_wasted,
        **{f"cpu_{role}": cores.get(role, 0.0) for role in ("worker", "trigger", "load", "broker")},
        "foreign_cpu": used.foreign_cpu,
        "lag_p999_ms": lag_ms,
        "slowdown": used.slowdown,
        "queue_growth": queue_growth(begins, ends),
        "valid": lag_ms <= LAG_LIMIT * deadline_ms and not used.slowdown > slow_limit,
    }


def score_columns(
    samples: Sequence[Sample], reference: Sequence[Sample], tolerance: float = SCORE_TOLERANCE
) -> dict[str, typing.Any]:
    """Compares the kept scores with those of a reference on the same trace."""
    theirs = {each.row: each for each in reference if each.scores is not None and each.is_whole}
    errors = []
    for each in samples:
        other = theirs.get(each.row)
        if other is None or each.scores is None or not each.is_whole or each.history_stale or other.history_stale:
            continue
        assert other.scores is not None
        if each.scores.shape != other.scores.shape:
            errors.append(math.inf)
            continue
        largest = float(np.abs(other.scores).max(initial=0.0)) or 1.0
        errors.append(float(np.abs(each.scores - other.scores).max(initial=0.0)) / largest)
    return {
        "scores_compared": len(errors),
        "scores_worst_error": max(errors, default=0.0),
        "scores_different": sum(error > tolerance for error in errors),
    }


def quantile_rows(row: RunRow, samples: Sequence[Sample]) -> list[dict[str, typing.Any]]:
    """Latency quantiles and mean stage times of each path of one run, for `paths.csv`."""
    found = []
    measured = [each for each in samples if each.part != WARM_UP and each.latency_us is not None and each.path]
    for path in sorted({each.path or "" for each in measured}):
        own = [each for each in measured if each.path == path]
        latencies = np.array([each.latency_us for each in own], np.float64) / 1000
        stages = {
            name: round(_mean_ms([getattr(each, name) for each in own]), 3)
            for name in (
                "to_worker_us", "queue_us", "wait_us", "reload_us", "pre_infer_us", "rank_us", "in_worker_us",
                "to_gateway_us",
            )
        }  # fmt: skip
        found.append(
            {
                "mode": row.mode,
                "cell": row.cell,
                "figure": row.figure,
                "system": row.system,
                "variant": row.variant,
                "history": row.history,
                "rate_per_s": row.rate_per_s,
                "seed": row.seed,
                "attempt": row.attempt,
                "path": path,
                "requests": len(own),
                **{f"q{quantile:g}_ms": round(float(np.quantile(latencies, quantile)), 3) for quantile in QUANTILES},
                **{name.replace("_us", "_mean_ms"): value for name, value in stages.items()},
            }
        )
    return found


def paths_at(paths: Sequence[Mapping[str, str]], row: RunRow) -> list[Mapping[str, str]]:
    """The rows of `paths.csv` of this run."""
    names = ("mode", "cell", "figure", "system", "variant", "history", "rate_per_s", "seed", "attempt")
    wanted = [getattr(row, name) for name in names]
    return [
        each for each in paths if [type(value)(each[name]) for name, value in zip(names, wanted, strict=True)] == wanted
    ]


class RunFile:
    """`runs.csv` of a folder: the rows that are there, and those that are added."""

    def __init__(self, folder: Path) -> None:
        """Raises RelayError for a file that was written by another version."""
        self._path = folder / "runs.csv"
        self._paths = folder / "paths.csv"
        self.rows = read_rows(self._path) if self._path.exists() else []

    def refuse_other_brokers(self, name: str) -> None:
        """Raises RelayError if the folder has runs on another broker than this."""
        others = {row.broker for row in self.rows if not row.is_simulated} - {name}
        if others:
            raise RelayError(
                f"the runs in {self._path} are of {', '.join(sorted(others))}, this is {name}: give another folder "
                "with --out"
            )

    def attempts(self, key: tuple[object, ...]) -> list[RunRow]:
        """The rows that answer this question."""
        return [row for row in self.rows if row.key == key]

    def add(self, row: RunRow, samples: Sequence[Sample]) -> None:
        """Adds a row, and the latencies of its paths."""
        plain = {field.name: getattr(row, field.name) for field in fields(RunRow)}
        rounded = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in plain.items()}
        quantiles = quantile_rows(row, samples)
        if quantiles:
            append_rows(self._paths, quantiles)
        append_rows(self._path, [rounded])
        self.rows.append(row)


def read_rows(path: Path) -> list[RunRow]:
    """The rows of a file. Raises RelayError, with the line, for a file that is not one of this version."""
    types = typing.get_type_hints(RunRow)
    rows: list[RunRow] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for plain in csv.DictReader(file):
                rows.append(RunRow(**{name: _parsed(kind, plain[name]) for name, kind in types.items()}))  # noqa: PERF401
    except OSError as error:
        raise RelayError(f"{path} cannot be read: {error}") from error
    except (KeyError, ValueError, TypeError) as error:
        # The header is line 1.
        raise RelayError(f"{path} does not have the rows of this version: line {len(rows) + 2}: {error!r}") from error
    return rows


def read_dicts(path: Path) -> list[dict[str, str]]:
    """The rows of any CSV file; none if it is absent."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _parsed(kind: type, text: str) -> typing.Any:
    if kind is bool:
        if text not in ("True", "False"):
            raise ValueError(f"{text!r} is neither True nor False")
        return text == "True"
    return kind(text)


def _mean_ms(times_us: Iterable[int]) -> float:
    values = list(times_us)
    return float(np.mean(values)) / 1000 if values else 0.0
