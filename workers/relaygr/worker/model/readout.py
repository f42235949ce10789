"""The read-out: computes one score for each task from a candidate's last row (docs/model.md).

    circle  = angle of floor(time / unit) mod units, as cosine and sine, one for each period
    row     = norm(row)                                      or  norm(linear([row, circles]))
    score   = MLP(row)                                       or  MLP(row * item)
    item    = MLP(candidate's item and its features)         or  the candidate's embedding, of length 1

then sigmoid where a task is binary. Sources: NVIDIA's recsys-examples (L2 norm, MLP), Meta's generative-recommenders
(DLRM-v3: the rest, with its time-aware post-processor; the cosine of its research code's retrieval).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.embedding import ItemEmbeddings
from relaygr.worker.model.inputs.tables import Placement
from relaygr.worker.model.inputs.tokens import Column, Tokens
from relaygr.worker.model.layer_parts import (
    RowFunction,
    chain,
    l2_norm,
    layer_norm,
    linear,
    swish_norm,
    swish_norm_mlp,
    swish_norm_mlp_shapes,
)
from relaygr.worker.model.options import ReadoutActivation, ReadoutForm, ReadoutNorm, TaskKind


def readout_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of the read-out."""
    d = config.embedding_dim
    shapes: dict[str, tuple[int, ...]] = {}
    if config.readout_norm is ReadoutNorm.LAYER:
        shapes |= {"readout.norm.weight": (d,), "readout.norm.bias": (d,)}
    if config.readout_periods:
        width = d + 2 * len(config.readout_periods)
        shapes |= {"readout.periods.weight": (width, d), "readout.periods.bias": (d,)}
    if config.readout is ReadoutForm.ITEM_PRODUCT and config.dlrm_inputs is not None:
        width = config.dlrm_inputs.table_dim * (1 + len(config.dlrm_inputs.item_features))
        shapes |= swish_norm_mlp_shapes("readout.item", width, config.readout_item_hidden, d)
    widths = (d, *config.readout_hidden, len(config.tasks))
    for index, (rows, columns) in enumerate(itertools.pairwise(widths)):
        shapes |= {f"readout.mlp.{index}.weight": (rows, columns), f"readout.mlp.{index}.bias": (columns,)}
        if _has_norm(config) and index < len(config.readout_hidden):
            norm = f"readout.mlp.{index}.norm"
            shapes |= {f"{norm}.weight": (columns,), f"{norm}.bias": (columns,)}
    return shapes


def _has_norm(config: ModelConfig) -> bool:
    """Whether hidden layers of the task MLP have a norm."""
    return config.readout_hidden_norm or config.readout_activation is ReadoutActivation.SWISH_NORM


def readout_row_elements(config: ModelConfig) -> int:
    """The most float32 elements that the read-out of one candidate needs."""
    d, periods = config.embedding_dim, len(config.readout_periods)
    # The token; its row, the row joined with periods, mapped and normalised.
    elements = 2 * len(Column) + 4 * d + 6 * periods
    if config.readout is ReadoutForm.ITEM_PRODUCT:
        elements += 3 * d
        if (inputs := config.dlrm_inputs) is not None:
            elements += 2 * inputs.table_dim * (1 + len(inputs.item_features)) + 4 * config.readout_item_hidden
    # A layer of the MLP: its linear map, norm and gate beside the layer before.
    return elements + 4 * max((0, *config.readout_hidden)) + sum(config.readout_hidden) + 3 * len(config.tasks)


RowReader = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_PI = 3.14
"""The value in Meta's code."""


class PeriodicTimes:
    """Joins each row with the phase of its time in each period, and maps the result back to D columns."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self._linear = linear(tensors, "readout.periods")
        device = tensors["readout.periods.weight"].device
        self._unit_seconds = torch.tensor([period.unit_seconds for period in config.readout_periods], device=device)
        self._units = torch.tensor([period.units for period in config.readout_periods], device=device)

    def __call__(self, rows: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        # Meta's code converts to float32 first, too. Seconds since the epoch are then exact to about two minutes.
        elapsed = torch.div(times[:, None].float(), self._unit_seconds, rounding_mode="floor")
        angle = torch.remainder(elapsed, self._units) / self._units * 2 * _PI
        circles = torch.stack((angle.cos(), angle.sin()), dim=-1).flatten(1)
        return self._linear(torch.cat((rows, circles), dim=1))


def build_row_reader(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> RowReader:
    """(rows [n, D], times int64 [n] in seconds) -> rows [n, D]."""
    norm: RowFunction = l2_norm
    if config.readout_norm is ReadoutNorm.LAYER:
        eps = config.norm_eps if config.readout_norm_eps is None else config.readout_norm_eps
        norm = layer_norm(tensors, "readout.norm", eps)
    if not config.readout_periods:
        return lambda rows, times: norm(rows)  # noqa: ARG005 - without periods, times are not used
    placed = PeriodicTimes(config, tensors)
    return lambda rows, times: norm(placed(rows, times))


_PLAIN: dict[ReadoutActivation, RowFunction] = {
    ReadoutActivation.SILU: F.silu,
    ReadoutActivation.RELU: F.relu,
    ReadoutActivation.GELU: F.gelu,
}


class TaskHead:
    """Rows [n, D] -> scores float32 [n, tasks]."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        parts: list[RowFunction] = []
        for index in range(len(config.readout_hidden)):
            parts.append(linear(tensors, f"readout.mlp.{index}"))
            if config.readout_activation is ReadoutActivation.SWISH_NORM:
                eps = config.swish_eps(config.readout_mlp_eps)
                parts.append(swish_norm(tensors, f"readout.mlp.{index}.norm", eps))
            else:
                if config.readout_hidden_norm:
                    parts.append(layer_norm(tensors, f"readout.mlp.{index}.norm", config.readout_mlp_eps))
                parts.append(_PLAIN[config.readout_activation])
        last = f"readout.mlp.{len(config.readout_hidden)}"
        self._mlp = chain([*parts, linear(tensors, last)])
        self._binary = torch.tensor([task.kind is TaskKind.BINARY for task in config.tasks])
        self._binary = self._binary.to(tensors[f"{last}.weight"].device)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self._mlp(rows)
        return torch.where(self._binary, torch.sigmoid(logits), logits)


class Readout:
    """Computes scores from the rows and tokens of candidates."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], placement: Placement | None = None
    ) -> None:
        """`placement`: where the tables are; None: the tensors are on the CPU."""
        self._read = build_row_reader(config, tensors)
        self._head = TaskHead(config, tensors)
        # No bound method is kept: the cycle would keep the weights of a replaced model until a full garbage collection.
        self._is_product = config.readout is ReadoutForm.ITEM_PRODUCT
        if self._is_product:
            inputs, eps = config.dlrm_inputs, config.readout_mlp_eps
            features = 0 if inputs is None else len(inputs.item_features)
            self._items = ItemEmbeddings(features, tensors, Placement() if placement is None else placement)
            self._item_row: RowFunction = (
                l2_norm if inputs is None else swish_norm_mlp(tensors, "readout.item", eps, config.swish_eps(eps))
            )

    def __call__(self, rows: torch.Tensor, tokens: torch.Tensor, on_host: Tokens | None = None) -> torch.Tensor:
        """rows [candidates, D], their tokens int64 [candidates, 5] -> scores float32 [candidates, tasks].

        `on_host`: the same tokens, if they are known on the host.
        """
        users = self.user_rows(rows, tokens)
        return self._head(users * self.item_rows(tokens, on_host) if self._is_product else users)

    def user_rows(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[candidates, D]: the normalised rows, the input of the task MLP or of the product."""
        return self._read(rows, tokens[:, Column.TIME])

    def item_rows(self, tokens: torch.Tensor, on_host: Tokens | None = None) -> torch.Tensor:
        """[candidates, D]: of the candidates' items, the other factor of the product."""
        known = None if on_host is None else on_host[:, Column.CONTENT]
        return self._item_row(self._items(tokens[:, Column.CONTENT], known))
