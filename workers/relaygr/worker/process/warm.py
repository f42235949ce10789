"""The latency model of this worker, and a device that has done its first work: before the first request, not at it.

Who calibrates does so on a device of its own. A standby shares it with a busy active worker, and times taken then
would be wrong for good: it takes over what the active one measured and left in the shared folder, and only warms up.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Final

import structlog

from relaygr.admission.latency import LatencyModel
from relaygr.runtime.errors import RelayError
from relaygr.worker.calibration import calibrate, latency_for, save_calibration
from relaygr.worker.measuring import EngineMeter
from relaygr.worker.model.interface import Engine
from relaygr.worker.settings import WorkerSettings

log = structlog.get_logger()

_NAME: Final = "calibration.json"
_TOKENS: Final = (64, 256, 1024)
_CANDIDATES: Final = (16, 128)
_ROUNDS: Final = 2


def measured_latency(engine: Engine, settings: WorkerSettings, folder: Path, *, undisturbed: bool) -> LatencyModel:
    """The engine must be bound to an arena that holds nothing yet.

    `undisturbed`: the device is this process's alone. Raises RelayError for a calibration file that was given
    and is none, or not this worker's.
    """
    if settings.calibration is not None:
        latency = latency_for(engine, settings.calibration)
    elif undisturbed:
        calibration = calibrate(engine)
        log.info("device calibrated", device=engine.device.name, **asdict(calibration.coefficients))
        save_calibration(calibration, folder / _NAME)
        return calibration.model
    else:
        latency = _left_by_the_active(engine, folder / _NAME)
    warm_up(engine)
    return latency


def warm_up(engine: Engine) -> None:
    """A few small passes of each kind. Overwrites the arena's first pages."""
    meter = EngineMeter(engine)
    for _ in range(_ROUNDS):
        for tokens in _TOKENS:
            length = min(tokens, meter.longest_tokens)
            meter.prefix(length, length)
            for candidates in _CANDIDATES:
                meter.rank(length, min(candidates, engine.limits.max_candidates))


def _left_by_the_active(engine: Engine, path: Path) -> LatencyModel:
    try:
        return latency_for(engine, path)
    except RelayError as error:
        log.warning("calibrated beside a busy worker: times may be too long", cause=str(error))
        return calibrate(engine).model
