"""Forms of well-known rankers, for random models of any size: what `relaygr model init --preset` takes.

A preset says how a model of its kind computes, and leaves sizes, limits, features and tasks to the caller. Sources of
the forms: docs/model.md.
"""

from __future__ import annotations

import enum
from typing import Any

from relaygr.worker.model.options import (
    Activated,
    Family,
    InputForm,
    OutputForm,
    PositionOrigin,
    ReadoutActivation,
    ReadoutForm,
    ReadoutNorm,
    TimeEncoding,
)


class Preset(enum.StrEnum):
    """Whose ranker."""

    DLRM_V3 = "dlrm-v3"
    """Meta's: actions as sets of bits, MLPs, positions from the end, ages; scores by row and item."""
    NVIDIA = "nvidia"
    """recsys-examples: items and actions interleaved."""
    RESEARCH = "research"
    """The ICML'24 layer: a bias by position and by time."""
    SOFTMAX = "softmax"
    """A decoder with soft-max attention."""


def preset_fields(preset: Preset, dim: int, behaviours: int) -> dict[str, Any]:
    """Fields of a configuration. `dim`: width of a row; `behaviours`: of the longest sequence."""
    match preset:
        case Preset.DLRM_V3:
            return _dlrm_v3(dim)
        case Preset.NVIDIA:
            return _nvidia(dim, behaviours)
        case Preset.RESEARCH:
            return _research(dim, behaviours)
        case Preset.SOFTMAX:
            return {"family": Family.SOFTMAX, "normalizer": None, "mlp_dim": 4 * dim}


def _dlrm_v3(dim: int) -> dict[str, Any]:
    return {
        "inputs": InputForm.DLRM,
        "dlrm_inputs": {"table_dim": dim, "hidden": dim, "action_weights": (1, 2, 4)},
        "num_actions": 0,
        "embedding_scale": dim**0.5,
        "position_origin": PositionOrigin.END,
        "time_encoding": TimeEncoding.SQRT,
        "num_times": 2049,
        "readout": ReadoutForm.ITEM_PRODUCT,
        "readout_norm_eps": 1e-5,
        "readout_hidden": (512,),
        "readout_activation": ReadoutActivation.SWISH_NORM,
    }


def _nvidia(dim: int, behaviours: int) -> dict[str, Any]:
    tokens = 2 * behaviours
    return {
        "norm_eps": 1e-5,
        "activated": Activated.UVQK,
        "output_form": OutputForm.UNORM,
        "normalizer": float(tokens),
        "inputs": InputForm.INTERLEAVED,
        "embedding_scale": dim**0.5,
        "num_positions": tokens + 1,
        "readout_norm": ReadoutNorm.L2,
        "readout_activation": ReadoutActivation.RELU,
    }


def _research(dim: int, behaviours: int) -> dict[str, Any]:
    return {
        "activated": Activated.UVQK,
        "output_form": OutputForm.UNORM,
        "norm_affine": False,
        "attn_alpha": 1.0,
        "projection_bias": False,
        "output_bias": True,
        "relative_bias": {"positions": behaviours, "time_buckets": 128},
        "num_actions": 0,
        "embedding_scale": dim**0.5,
        "readout_norm": ReadoutNorm.L2,
    }
