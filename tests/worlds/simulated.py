"""What tests of plans and simulations share: the times of a device, and its calibration file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from relaygr.schemas.messages import LatencyCoefficients
from relaygr.simulate.times import MeasuredTimes
from relaygr.worker.calibration import Calibration, MachineDescription, save_calibration
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.options import ComputeDtype

NO_TIMES: Final = MeasuredTimes(
    origin="none", hop_us=(0.0,), look_up_us=0.0, answer_us=0.0, refuse_us=0.0, hit_noise=(1.0,), pre_noise=(1.0,)
)
"""Nothing but the calibrated times, without noise."""
COEFFICIENTS: Final = LatencyCoefficients(
    a0=500, a1=20, a2=0, b0=0, b1=20, b2=0, c0=0, c1=5, c2=0, d0=50, d1=1 / 4096
)  # fmt: skip
"""A prefix token takes 20 µs, and a candidate 5."""


def calibration_in(folder: Path) -> Path:
    """A calibration of a CPU with these times."""
    machine = MachineDescription(
        "m", "cpu", "a test", "here", 1, "2", KvDtype.FLOAT32, 64, ComputeDtype.FLOAT32, "none"
    )
    path = folder / "calibration.json"
    save_calibration(Calibration(machine, "2026-01-01T00:00:00Z", COEFFICIENTS, (), (), (), ()), path)
    return path
