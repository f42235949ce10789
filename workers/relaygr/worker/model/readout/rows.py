"""A candidate's last row, made ready for the task MLP: normalised, and told the time of the query where asked.

    circle = angle of floor(time / unit) mod units, as cosine and sine, a period
    row    = norm(linear([row, circles]))

Source: Meta's generative-recommenders, the time-aware post-processor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.mlp import Rows, l2_norm, layer_norm, linear
from relaygr.worker.model.options import ReadoutNorm

RowReader = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_PI = 3.14
"""As the original has it."""


class PeriodicTimes:
    """Joins each row with where its time is in each period, and maps the result back to D columns."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self._linear = linear(tensors, "readout.periods")
        device = tensors["readout.periods.weight"].device
        self._unit_seconds = torch.tensor([period.unit_seconds for period in config.readout_periods], device=device)
        self._units = torch.tensor([period.units for period in config.readout_periods], device=device)

    def __call__(self, rows: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        # float32 from the start: seconds since the epoch lose their last two minutes, as they do in the original.
        elapsed = torch.div(times[:, None].float(), self._unit_seconds, rounding_mode="floor")
        angle = torch.remainder(elapsed, self._units) / self._units * 2 * _PI
        circles = torch.stack((angle.cos(), angle.sin()), dim=-1).flatten(1)
        return self._linear(torch.cat((rows, circles), dim=1))


def build_row_reader(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> RowReader:
    """(rows [n, D], times int64 [n] in seconds) -> rows [n, D]."""
    norm: Rows = l2_norm
    if config.readout_norm is ReadoutNorm.LAYER:
        eps = config.norm_eps if config.readout_norm_eps is None else config.readout_norm_eps
        norm = layer_norm(tensors, "readout.norm", eps)
    if not config.readout_periods:
        return lambda rows, times: norm(rows)  # noqa: ARG005 - such a model has no use for times
    placed = PeriodicTimes(config, tensors)
    return lambda rows, times: norm(placed(rows, times))
