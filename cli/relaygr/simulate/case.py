"""The case that simulations and plans share: who asks (demand), and what answers (settings, model, measured times)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from pathlib import Path

from relaygr.admission.latency import LatencyModel
from relaygr.admission.scenarios import ONLY_DEFAULT, PreInferBy, Scenarios, ScenarioSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import DEFAULT_SCENARIO, MAX_SUFFIX_BEHAVIOURS
from relaygr.settings import Settings
from relaygr.simulate.demand import Demand
from relaygr.simulate.device import SimulatedModel
from relaygr.simulate.times import MeasuredTimes
from relaygr.simulate.visit import VisitTimes, predicted
from relaygr.traffic.settings import TrafficSettings
from relaygr.worker.calibration import Calibration
from relaygr.worker.kv import DramGeometry, KvDtype, KvGeometry, PrefixLayout
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.model.description import Description, read_description
from relaygr.worker.model.interface import EngineLimits

_CPU = "cpu"


class System(enum.StrEnum):
    """The relay, the cache alone (no retrieval events), or full inference of every request (no cache either)."""

    RELAY = "relay"
    CACHE = "cache"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Pool:
    """A store that the workers share (docs/pool.md), and workers that take the pre-infer jobs of the others."""

    us_per_byte: float
    """Of the network."""
    workers: int = 0
    """0: the owners of users take their jobs."""


@dataclass(frozen=True, slots=True)
class Case:
    """A system under a load."""

    demand: Demand
    settings: Settings
    """Those of trigger, admission and workers. The load is that of `demand`."""
    model: SimulatedModel
    times: MeasuredTimes
    relay: bool
    """Whether gateways send retrieval events."""
    refresh_s: float | None = None
    """The time between two changes of the weights, each of which empties the caches."""
    pool: Pool | None = None

    @property
    def longest_history(self) -> int:
        """Behaviours of the longest history, as far as the model takes them."""
        return min(self.demand.traffic.history_max, self.model.limits.max_prefix_behaviours)

    def with_pool(self, pool: Pool) -> Case:
        """The same with a pool."""
        return replace(self, pool=pool)

    @property
    def scenarios(self) -> Scenarios:
        """The one scenario of the trigger."""
        has_workers = self.pool is not None and self.pool.workers
        return {DEFAULT_SCENARIO: ScenarioSettings(pre_infer=PreInferBy.POOL)} if has_workers else ONLY_DEFAULT

    def visit(self) -> VisitTimes:
        """The device work of a visit with the median history."""
        model, traffic = self.model, self.demand.traffic
        longest_tail = min(self.settings.worker.longest_tail, model.limits.max_suffix_behaviours - traffic.suffix)
        return predicted(
            model.latency,
            model.geometry,
            model.layout,
            min(traffic.history_median, model.limits.max_prefix_behaviours),
            traffic.suffix * model.layout.tokens_per_behaviour + traffic.candidates,
            max(1, traffic.growth),
            longest_tail,
        )

    def memory(self, workers: int) -> tuple[int, int]:
        """HBM and DRAM of all workers together, in bytes: whole pages."""
        worker, geometry = self.settings.worker, self.model.geometry
        hbm_pages = int(worker.hbm_bytes) // geometry.kv.page_bytes
        dram_pages = int(worker.dram_bytes) // geometry.page_bytes
        return workers * hbm_pages * geometry.kv.page_bytes, workers * dram_pages * geometry.page_bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """The K,V of a model, and its limits."""

    geometry: DramGeometry
    layout: PrefixLayout
    limits: EngineLimits
    rules: PrefixRules


def shape_of_model(folder: Path, settings: Settings, calibration: Calibration) -> Shape:
    """The shape of a checkpoint. Raises RelayError for a folder without a usable configuration."""
    return shape_of(read_description(folder), settings, calibration)


def shape_of(described: Description, settings: Settings, calibration: Calibration) -> Shape:
    """The shape of a model of this description. Without a setting, K,V have the type with which the device was
    calibrated.
    """
    worker = settings.worker
    return Shape(
        DramGeometry(
            described.geometry(worker.page_tokens, worker.kv_dtype or calibration.machine.kv_dtype),
            worker.dram_kv_dtype,
        ),
        described.layout,
        described.limits,
        described.rules,
    )


def shape_of_tokens(token_bytes: int, settings: Settings) -> Shape:
    """The shape of a model of which only the size of a token's K,V is known. Raises RelayError for a wrong size.

    It takes histories of any length, one token for each behaviour.
    """
    if token_bytes < 4 or token_bytes % 4:
        raise RelayError(f"--token-bytes {token_bytes} must be a multiple of 4: K and V, of two bytes each.")
    # One head of one layer: the simulation counts bytes, so the shape does not matter.
    kv = KvGeometry(1, 1, token_bytes // 4, token_bytes // 4, settings.worker.page_tokens, KvDtype.BFLOAT16)
    limits = EngineLimits(settings.traffic.history_max, MAX_SUFFIX_BEHAVIOURS, settings.traffic.candidates)
    return Shape(DramGeometry(kv, settings.worker.dram_kv_dtype), PrefixLayout(0, 1), limits, PrefixRules())


def is_cpu(calibration: Calibration) -> bool:
    """Whether the calibration is that of a CPU."""
    return calibration.machine.device.split(":", 1)[0] == _CPU


def case_of(
    settings: Settings,
    shape: Shape,
    latency: LatencyModel,
    times: MeasuredTimes,
    *,
    on_cpu: bool,
    system: System,
    day_s: float | None = None,
) -> Case:
    """The case of a system under the traffic of the settings. Raises RelayError for settings that no worker takes, or
    that are not simulated.
    """
    if settings.worker.divert:
        raise RelayError(
            "A simulation diverts no requests: give --set worker.divert=false. Its figures are then those without it."
        )
    if system is System.OFF:
        worker = settings.worker.model_copy(update={"reuse_prefixes": False, "dram_bytes": 0})
        settings = settings.model_copy(update={"worker": worker})
    relay = system is System.RELAY
    traffic = settings.traffic.model_copy(update={"relay": relay})
    demand = Demand(traffic, settings.partitions, traffic.seed, day_s)
    return case_of_load(demand, settings, shape, latency, times, on_cpu=on_cpu, relay=relay)


def case_of_load(
    demand: Demand,
    settings: Settings,
    shape: Shape,
    latency: LatencyModel,
    times: MeasuredTimes,
    *,
    on_cpu: bool,
    relay: bool,
    device: LatencyModel | None = None,
) -> Case:
    """The case of any demand. `relay`: whether retrieval events are sent; `device`: what forwards take, if that is not
    `latency`. Raises RelayError for settings that no worker takes.
    """
    model = SimulatedModel(shape.geometry, shape.layout, shape.limits, shape.rules, latency, on_cpu, device)
    case = Case(demand, settings, model, times, relay)
    _check(case)
    return case


def require_taken(traffic: TrafficSettings, limits: EngineLimits) -> None:
    """Raises RelayError for requests that are larger than the model takes."""
    if traffic.candidates > limits.max_candidates or traffic.suffix > limits.max_suffix_behaviours:
        raise RelayError(
            f"The model takes {limits.max_candidates} candidates and a suffix of {limits.max_suffix_behaviours}: lower "
            "traffic.candidates or traffic.suffix."
        )


def _check(case: Case) -> None:
    """Raises RelayError for a load without an end, or that no worker takes."""
    traffic, limits, kv = case.demand.traffic, case.model.limits, case.model.geometry.kv
    if not traffic.duration_s:
        raise RelayError("The simulation has no end: give --seconds, or --set traffic.duration_s=SECONDS.")
    require_taken(traffic, limits)
    longest_bytes = kv.pages_for(case.model.layout.tokens(case.longest_history)) * kv.page_bytes
    if int(case.settings.worker.hbm_bytes) < longest_bytes:
        raise RelayError(
            f"worker.hbm_bytes does not hold the prefix of the longest history: set it to at least {longest_bytes} "
            "bytes."
        )
