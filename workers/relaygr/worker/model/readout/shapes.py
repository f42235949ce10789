"""Names and shapes of the read-out's tensors."""

from __future__ import annotations

import itertools

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.tokens import Column
from relaygr.worker.model.mlp import swish_norm_mlp_shapes
from relaygr.worker.model.options import ReadoutActivation, ReadoutForm, ReadoutNorm


def readout_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the read-out of a configuration needs."""
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
        if config.readout_activation is ReadoutActivation.SWISH_NORM and index < len(config.readout_hidden):
            norm = f"readout.mlp.{index}.norm"
            shapes |= {f"{norm}.weight": (columns,), f"{norm}.bias": (columns,)}
    return shapes


def readout_row_elements(config: ModelConfig) -> int:
    """float32 elements that the read-out of one candidate needs at most."""
    d, periods = config.embedding_dim, len(config.readout_periods)
    # The token; its row, joined with periods, mapped and normalised.
    elements = 2 * len(Column) + 4 * d + 6 * periods
    if config.readout is ReadoutForm.ITEM_PRODUCT and config.dlrm_inputs is not None:
        inputs = config.dlrm_inputs
        elements += 2 * inputs.table_dim * (1 + len(inputs.item_features)) + 4 * config.readout_item_hidden + 3 * d
    # A layer of the MLP: its linear map, norm and gate beside the layer before.
    return elements + 4 * max((0, *config.readout_hidden)) + sum(config.readout_hidden) + 3 * len(config.tasks)
