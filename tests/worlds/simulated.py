"""What simulations of tests share."""

from __future__ import annotations

from typing import Final

from relaygr.simulate.times import MeasuredTimes

NO_TIMES: Final = MeasuredTimes(
    origin="none", hop_us=(0.0,), look_up_us=0.0, answer_us=0.0, refuse_us=0.0, hit_noise=(1.0,), pre_noise=(1.0,)
)
"""Nothing but the calibrated times, without noise."""
