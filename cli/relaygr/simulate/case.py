"""Cases from the product's settings and a calibration."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from relaygr.admission.latency import LatencyModel
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import MAX_SUFFIX_BEHAVIOURS
from relaygr.settings import Settings
from relaygr.simulate.demand import Demand, Load
from relaygr.simulate.device import SimulatedModel
from relaygr.simulate.relay import Case, Changes
from relaygr.simulate.times import MeasuredTimes
from relaygr.simulate.worker import WorkerSpec
from relaygr.worker.cache.policies import TierPolicies
from relaygr.worker.calibration import Calibration
from relaygr.worker.kv import DramGeometry, KvDtype, KvGeometry, PrefixLayout
from relaygr.worker.model.config import ModelConfig, PrefixRules, read_config, rules_of
from relaygr.worker.model.interface import EngineLimits

_CPU = "cpu"
LoadT = TypeVar("LoadT", bound=Load)


class System(enum.StrEnum):
    """The relay, or full inference of every request: no retrieval events, no cache."""

    RELAY = "relay"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Shape:
    """The K,V of a model, and its limits."""

    geometry: DramGeometry
    layout: PrefixLayout
    limits: EngineLimits
    rules: PrefixRules


def shape_of_model(folder: Path, settings: Settings, calibration: Calibration) -> Shape:
    """The shape of a checkpoint. Raises RelayError for a folder without a usable configuration."""
    return shape_of_config(read_config(folder), settings, calibration)


def shape_of_config(config: ModelConfig, settings: Settings, calibration: Calibration) -> Shape:
    """The shape of a model with this configuration. Without a setting, K,V have the type with which the device was
    calibrated.
    """
    worker = settings.worker
    return Shape(
        DramGeometry(
            config.geometry(worker.page_tokens, worker.kv_dtype or calibration.machine.kv_dtype), worker.dram_kv_dtype
        ),
        config.layout(),
        EngineLimits(config.max_prefix_behaviours, config.max_suffix_behaviours, config.max_candidates),
        rules_of(config),
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
    changes: Changes | None = None,
    day_s: float | None = None,
) -> Case[Demand]:
    """The case of a demand. Raises RelayError for settings that no worker takes, or that are not simulated."""
    if settings.worker.divert:
        raise RelayError(
            "A simulation diverts no requests: give --set worker.divert=false. Its figures are then those without it."
        )
    relay = system is System.RELAY
    if not relay:
        worker = settings.worker.model_copy(update={"reuse_prefixes": False, "dram_bytes": 0})
        settings = settings.model_copy(update={"worker": worker})
    traffic = settings.traffic.model_copy(update={"relay": relay})
    demand = Demand(traffic, settings.partitions, traffic.seed, day_s)
    return case_of_load(demand, settings, shape, latency, times, on_cpu=on_cpu, relay=relay, changes=changes)


def case_of_load(
    load: LoadT,
    settings: Settings,
    shape: Shape,
    latency: LatencyModel,
    times: MeasuredTimes,
    *,
    on_cpu: bool,
    relay: bool,
    changes: Changes | None = None,
    device: LatencyModel | None = None,
) -> Case[LoadT]:
    """The case of any load. `relay`: whether retrieval events are sent; `device`: what forwards take, if that is not
    `latency`. Raises RelayError for settings that no worker takes.
    """
    worker, traffic = settings.worker, load.traffic
    kv = shape.geometry.kv
    if not traffic.duration_s:
        raise RelayError("The simulation has no end: give --seconds, or --set traffic.duration_s=SECONDS.")
    if traffic.candidates > shape.limits.max_candidates or traffic.suffix > shape.limits.max_suffix_behaviours:
        raise RelayError(
            f"The model takes {shape.limits.max_candidates} candidates and a suffix of "
            f"{shape.limits.max_suffix_behaviours}: lower traffic.candidates or traffic.suffix."
        )
    longest = kv.pages_for(shape.layout.tokens(min(shape.limits.max_prefix_behaviours, traffic.history_max)))
    if int(worker.hbm_bytes) < longest * kv.page_bytes:
        raise RelayError(
            f"worker.hbm_bytes does not hold the prefix of the longest history: set it to at least "
            f"{longest * kv.page_bytes} bytes."
        )
    policies = TierPolicies(worker.hbm_policy, worker.dram_policy, round(worker.prefix_ttl_s * 1e6))
    model = SimulatedModel(shape.geometry, shape.layout, shape.limits, shape.rules, latency, on_cpu, device)
    return Case(
        load,
        WorkerSpec(model, times, worker, settings.admission, policies),
        settings.trigger,
        relay,
        changes if changes is not None else Changes(),
    )
