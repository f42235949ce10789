"""Calibration: measures a device through the engine, and fits the latency model of trigger, scheduler and cache.

A run measures prefix lengths in rounds, shortest first, until its time is up. The first round finds the longest prefix
that can be measured in the time. Later rounds repeat the lengths with other chunk sizes; the fit uses the median of
each point. One measurement of a length gives points of every kind: each chunk is an append to the chunks before it, the
ranking afterwards is a hit, and the sum is full inference, which runs the same two calls. `relaygr.admission.latency`
fits the points.

Batches of short requests are measured beside one such request alone, for what the requests of a batch share.

The engine must be bound to an arena whose first pages, enough for the longest prefix, may be overwritten: a worker
calibrates before its cache holds prefixes.

A calibration file describes the machine that it was measured on. `latency_for` refuses a file of another model, device,
back end or K,V shape, since the trigger would decide by wrong times.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from relaygr.admission.fit import AppendPoint, BatchPoint, RankPoint, ReloadPoint, fit, fit_shared
from relaygr.admission.latency import LatencyModel
from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import read_regular, write_whole
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.interface import Engine
from relaygr.worker.model.options import ComputeDtype

if TYPE_CHECKING:
    # A calibration file can be read without torch.
    from relaygr.worker.measuring import EngineMeter

log = structlog.get_logger()

_MUST_AGREE = (
    "model_revision",
    "device",
    "device_description",
    "threads",
    "kv_dtype",
    "page_tokens",
    "compute_dtype",
    "backend",
    "uses_onednn",
)
"""Fields in which a calibration and the engine that uses it must agree."""

QUICK_BUDGET_S = 3.0
"""Time that a worker without a calibration file spends on calibration at its start."""
FIT_ERROR_BOUND = 0.25
"""The largest of `Calibration.fit_errors` of a good fit. Machines that are not disturbed stay below 0.13."""
QUICK_FIT_ERROR_BOUND = 0.75
"""The largest one that `relaygr calibrate --quick` writes. Two busy cores gave up to 0.41."""
_CHUNK_TOKENS = (512, 128, 2048)
"""One chunk size for each round, so that the fit can separate the cost of a chunk from that of its tokens."""
_TAIL_TOKENS = (8, 32)
"""Tails of prefixes that grew since they were cached, as most pre-infers of returning users are."""
_SHORTEST = 64
_CANDIDATES = (16, 128, 512)
_BATCH = 8
"""Requests of a measured batch, at most."""
_RELOAD_BYTES = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
_FEWEST_LENGTHS = 3
_MAX_ROUNDS = 9

Progress = Callable[[float, str], None]
"""Called with the share of the work that is done, and a description of the present measurement."""


@dataclass(frozen=True, slots=True)
class MachineDescription:
    """The model, machine and settings that a calibration is valid for."""

    model_revision: str
    device: str
    device_description: str
    host: str
    threads: int
    torch_version: str
    kv_dtype: KvDtype
    page_tokens: int
    compute_dtype: ComputeDtype
    backend: str
    """The attention implementation, and whether it runs from captured graphs. Plain torch, which is used where the
    device's kernels are missing, takes several times as long."""
    uses_onednn: bool | None = None
    """Whether oneDNN computes the float32 products. None: not a CPU."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured points, the coefficients fitted to them, and the machine that was measured."""

    machine: MachineDescription
    measured_at: str
    """ISO 8601, UTC."""
    coefficients: LatencyCoefficients
    full: tuple[RankPoint, ...]
    append: tuple[AppendPoint, ...]
    hit: tuple[RankPoint, ...]
    reload: tuple[ReloadPoint, ...]
    batch: tuple[BatchPoint, ...] = ()
    """Empty if the arena had room for one prefix only."""

    @property
    def model(self) -> LatencyModel:
        return LatencyModel(self.coefficients, fit_shared(self.batch))

    @property
    def fit_errors(self) -> Mapping[str, float]:
        """How far each fit is off the measured times: the root mean square of the relative errors, which it minimises.

        Copies are left out: a size that leaves a core's caches takes longer for each byte, which no line fits.
        """
        model = self.model
        pairs = {
            "T_full": [(model.full_us(p.prefix_tokens, p.scored_tokens), p.duration_us) for p in self.full],
            "T_pre": [(model.append_us(p.cached_tokens, p.new_tokens), p.duration_us) for p in self.append],
            "T_hit": [(model.hit_us(p.prefix_tokens, p.scored_tokens), p.duration_us) for p in self.hit],
        }
        return {name: _relative_error(each) for name, each in pairs.items()}

    @property
    def fit_problem(self) -> str | None:
        """Why trigger and scheduler would decide by wrong times; None: the fits are good."""
        name, error = max(self.fit_errors.items(), key=lambda each: each[1])
        if error <= FIT_ERROR_BOUND:
            return None
        return (
            f"the fitted {name} is {error:.0%} off the measured times (root mean square; at most {FIT_ERROR_BOUND:.0%} "
            "is good)"
        )


def _relative_error(pairs: Sequence[tuple[float, float]]) -> float:
    """The root mean square of `fitted / measured - 1`; 0 if nothing was measured."""
    if any(measured <= 0 for _, measured in pairs):
        return math.inf
    return math.sqrt(statistics.fmean((fitted / measured - 1) ** 2 for fitted, measured in pairs)) if pairs else 0.0


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: int
    calibration: dict[str, Any]


def describe(engine: Engine) -> MachineDescription:
    """The present machine and engine."""
    import torch

    from relaygr.worker.model.layer_parts import onednn_is_faster

    return MachineDescription(
        model_revision=engine.revision,
        device=engine.device.name,
        device_description=engine.device.description,
        host=platform.node(),
        threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
        kv_dtype=engine.geometry.dtype,
        page_tokens=engine.geometry.page_tokens,
        compute_dtype=engine.compute_dtype,
        backend=engine.backend,
        uses_onednn=onednn_is_faster() if engine.device.is_cpu else None,
    )


def calibrate(
    engine: Engine,
    budget_s: float = QUICK_BUDGET_S,
    on_progress: Progress = lambda _share, _text: None,
    timer_ns: Callable[[], int] = time.perf_counter_ns,
    rest: Callable[[], None] | None = None,
) -> Calibration:
    """Measures for about `budget_s`, at least the shortest lengths, and fits. Overwrites the arena's first pages.

    `rest` is called before each pass that a request or a job would begin; without one, the pass finds what it would in
    a worker that is not busy (`rest_between_requests`). The rests of the first round, which decides how many lengths
    are measured, come on top of `budget_s`: they may take longer than the passes.
    """
    from relaygr.worker.measuring import EngineMeter, rest_between_requests

    rests, rested_ns = rest or rest_between_requests(engine.device), 0

    def timed_rest() -> None:
        nonlocal rested_ns
        began_ns = timer_ns()
        rests()
        rested_ns += timer_ns() - began_ns

    run = _CalibrationRun(engine, EngineMeter(engine, timer_ns, timed_rest))
    end_ns = timer_ns() + int(budget_s * 1e9)
    lengths = run.lengths()
    reload = run.measure_reload()
    run.measure(lengths[0], _CHUNK_TOKENS[0])
    run.forget()  # The first measurement was the warm-up.
    for round_number, chunk_tokens in enumerate(itertools.cycle(_CHUNK_TOKENS)):
        for place, tokens in enumerate(lengths):
            spent = 1 - max(0.0, (end_ns - timer_ns()) / 1e9) / budget_s
            on_progress(min(spent, 1.0), f"{tokens:,} tokens, chunks of {chunk_tokens:,}")
            began_ns = timer_ns() - rested_ns
            run.measure(tokens, chunk_tokens)
            ended_ns = timer_ns() - rested_ns
            # Twice the tokens take up to four times as long.
            is_last = ended_ns + 4 * (ended_ns - began_ns) > end_ns
            if round_number == 0 and place + 1 >= _FEWEST_LENGTHS and is_last:
                lengths = lengths[: place + 1]
                break
            if round_number > 0 and timer_ns() >= end_ns:
                break
        if timer_ns() >= end_ns or round_number + 1 >= _MAX_ROUNDS:
            break
    on_progress(1.0, "fitted")
    return run.result(reload)


class _CalibrationRun:
    """The measurements of one engine, grouped by point."""

    def __init__(self, engine: Engine, meter: EngineMeter) -> None:
        self._engine = engine
        self._meter = meter
        self._candidates = sorted({min(count, engine.limits.max_candidates) for count in _CANDIDATES})
        self.forget()

    def forget(self) -> None:
        """Drops all points."""
        self._append: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._hit: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._full: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._batch: dict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)

    def lengths(self) -> list[int]:
        """Prefix lengths in tokens, each twice the one before, up to the longest that the model takes."""
        longest = self._meter.longest_tokens
        least = self._engine.layout.tokens(1)
        shortest = max(least, min(_SHORTEST, longest // 2 ** (_FEWEST_LENGTHS - 1)))
        doubling = itertools.takewhile(lambda n: n < longest, (shortest << step for step in itertools.count()))
        return [*doubling, longest]

    def measure(self, tokens: int, chunk_tokens: int) -> None:
        """Measures one prefix in chunks, and rankings on it."""
        whole_us = 0.0
        for point in self._meter.prefix(tokens, chunk_tokens):
            self._append[point.cached_tokens, point.new_tokens].append(point.duration_us)
            whole_us += point.duration_us
        for new_tokens in _TAIL_TOKENS if self._engine.rules.grows else ():
            if new_tokens < tokens:
                tail = self._meter.append(tokens - new_tokens, new_tokens)
                self._append[tail.cached_tokens, tail.new_tokens].append(tail.duration_us)
        hits = [self._meter.rank(tokens, count) for count in self._candidates]
        for hit in hits:
            size = hit.prefix_tokens, hit.scored_tokens
            self._hit[size].append(hit.duration_us)
            self._full[size].append(whole_us + hit.duration_us)
        self._measure_batch(tokens, hits[0])

    def _measure_batch(self, tokens: int, alone: RankPoint) -> None:
        """Measures several of the requests with the fewest candidates together, each on its own prefix."""
        pages_for = self._engine.geometry.pages_for
        requests = min(_BATCH, pages_for(self._meter.longest_tokens) // max(1, pages_for(tokens)))
        if requests > 1:
            together_us = self._meter.rank(tokens, self._candidates[0], requests).duration_us
            size = alone.prefix_tokens, alone.scored_tokens, requests
            self._batch[size].append((together_us, alone.duration_us))

    def measure_reload(self) -> list[ReloadPoint]:
        """Measures copies of several sizes."""
        return list(self._meter.reloads(_RELOAD_BYTES))

    def result(self, reload: Sequence[ReloadPoint]) -> Calibration:
        """The medians and the fit."""
        full = [RankPoint(n, m, statistics.median(times)) for (n, m), times in sorted(self._full.items())]
        append = [AppendPoint(n, k, statistics.median(times)) for (n, k), times in sorted(self._append.items())]
        hit = [RankPoint(n, m, statistics.median(times)) for (n, m), times in sorted(self._hit.items())]
        batch = [
            BatchPoint(*size, *(statistics.median(column) for column in zip(*times, strict=True)))
            for size, times in sorted(self._batch.items())
        ]
        return Calibration(
            machine=describe(self._engine),
            measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            coefficients=fit(full, append, hit, reload).coefficients,
            full=tuple(full),
            append=tuple(append),
            hit=tuple(hit),
            reload=tuple(reload),
            batch=tuple(batch),
        )


def calibration_text(calibration: Calibration) -> str:
    """The content of a calibration file."""
    return json.dumps({"format": 1, "calibration": asdict(calibration)}, indent=1) + "\n"


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Writes a file that `load_calibration` reads. Raises RelayError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # As a whole: a standby may read it at any time.
        write_whole(path, calibration_text(calibration).encode())
    except OSError as error:
        raise RelayError(f"{path} cannot be written: {error}.") from error


def load_calibration(path: Path) -> Calibration:
    """Raises RelayError for a file that does not exist or is not a calibration."""
    try:
        file = _File.model_validate_json(read_regular(path).decode())
        if file.format != 1:
            raise RelayError(f"{path} has calibration format {file.format}, this release reads 1: calibrate again.")
        calibration = TypeAdapter(Calibration).validate_python(file.calibration)
        calibration.model  # noqa: B018 - raises for coefficients that are not times
        return calibration
    except (OSError, UnicodeDecodeError) as error:
        raise RelayError(f"{path} cannot be read ({error}): `relaygr calibrate --out` writes it.") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        problem = f"{place}: {first['msg']}" if place else first["msg"]
        raise RelayError(f"{path} is not a calibration ({problem}): `relaygr calibrate --out` writes one.") from error
    except ValueError as error:
        raise RelayError(f"{path} is not a calibration ({error}): `relaygr calibrate --out` writes one.") from error


def latency_for(engine: Engine, path: Path) -> LatencyModel:
    """The latency model of this engine, from a calibration file.

    Raises RelayError for a file that is missing, broken, or of another model, device, back end or K,V shape.
    """
    calibration = load_calibration(path)
    here = describe(engine)
    for name in _MUST_AGREE:
        measured, present = getattr(calibration.machine, name), getattr(here, name)
        if measured != present:
            raise RelayError(
                f"{path} was measured with {name} {measured}, but this worker has {present}: run `relaygr calibrate` "
                "again, or remove the setting, so that the worker calibrates at its start."
            )
    return model_of(calibration)


def model_of(calibration: Calibration) -> LatencyModel:
    """The latency model with which a worker decides. The log says if it does not fit the measured times."""
    if (problem := calibration.fit_problem) is not None:
        log.warning("the latency model does not fit this device: calibrate on a quiet machine", cause=problem)
    return calibration.model
