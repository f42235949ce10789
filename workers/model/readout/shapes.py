"""Names and shapes of the read-out's tensors."""

from __future__ import annotations

import itertools

from workers.model.config import ModelConfig, ReadoutActivation, ReadoutForm, ReadoutNorm
from workers.model.mlp import swish_norm_mlp_shapes


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
