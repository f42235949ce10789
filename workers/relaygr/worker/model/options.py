"""The options of a model, the parts of its configuration, and the meaning of each value.

`config.py` joins them. `ComputeDtype` is an option of the engine, not of the model: it is not in `config.json`.
A `Preset` names the form of a well-known ranker, for `relaygr model init --preset`; the caller gives
sizes, limits, features and tasks. Sources of the forms: docs/model.md.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from relaygr.schemas.limits import MAX_FEATURES

Size = Annotated[int, Field(ge=1, le=1_048_576)]


class Part(BaseModel):
    """A part of the configuration. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Family(enum.StrEnum):
    """The kind of model."""

    HSTU = "hstu"
    SOFTMAX = "softmax"
    """A decoder with soft-max attention and an MLP in each layer."""
    NULL = "null"
    """Computes nothing, to measure the pipeline around the model."""


class Activated(enum.StrEnum):
    """The blocks of the joint projection that go through SiLU."""

    U = "u"
    UVQK = "uvqk"


class OutputForm(enum.StrEnum):
    """The input of the output projection; A is the result of attention."""

    U_A_UNORM = "u_a_unorm"
    """[U, A, U * norm(A)]"""
    U_NA_UNORM = "u_na_unorm"
    """[U, norm(A), U * norm(A)]"""
    UNORM = "unorm"
    """U * norm(A)"""

    @property
    def blocks(self) -> int:
        """Number of blocks of H dv rows in the output projection."""
        return 1 if self is OutputForm.UNORM else 3


class TaskKind(enum.StrEnum):
    """The kind of prediction of a task."""

    BINARY = "binary"
    """Score = sigmoid(logit)."""
    REGRESSION = "regression"
    """Score = logit."""


class ReadoutNorm(enum.StrEnum):
    """The norm of a candidate's last row before the task MLP."""

    LAYER = "layer"
    L2 = "l2"


class RelativeBias(Part):
    """A bias added to q.k before SiLU, by the distance of two tokens and by the time between them."""

    positions: Annotated[int, Field(ge=1, le=1_048_576, description="N: the table has 2 N - 1 weights in each layer")]
    time_buckets: Annotated[
        int,
        Field(ge=0, le=65_536, description="buckets of the time table, which has one more weight; 0: no bias by time"),
    ] = 0
    log_base: Annotated[float, Field(ge=1e-6, description="bucket = int(log(max(seconds, 1)) / log_base)")] = 0.301


class InputForm(enum.StrEnum):
    """The tokens of behaviours and candidates before the first layer."""

    ADDED = "added"
    """One token: item + action; candidates have their own action row."""
    INTERLEAVED = "interleaved"
    """Two tokens, item then action; a candidate is its item only. NVIDIA's recsys-examples."""
    DLRM = "dlrm"
    """One token: MLP(item) + MLP(item's features) + MLP(action bits). Meta's DLRM-v3."""


class PositionOrigin(enum.StrEnum):
    """The origin of positions."""

    START = "start"
    """Positions count from the start: a prefix is valid for any later request."""
    END = "end"
    """Positions count back from the end of the history: a prefix is valid for one impression."""


class TimeEncoding(enum.StrEnum):
    """The function from the time before the query to a row of the time table."""

    NONE = "none"
    SQRT = "sqrt"
    LOG = "log"


class ReadoutForm(enum.StrEnum):
    """The input of the task MLP."""

    ROW = "row"
    """The candidate's last row, normalised."""
    ITEM_PRODUCT = "item_product"
    """The normalised row times the candidate's own embedding: of length 1, or through an MLP (Meta's DLRM-v3)."""


class ReadoutActivation(enum.StrEnum):
    """The activation between the layers of the task MLP."""

    SILU = "silu"
    RELU = "relu"
    GELU = "gelu"
    SWISH_NORM = "swish_norm"
    """x * sigmoid(LayerNorm(x))"""


class ContextualFeature(Part):
    """A categorical user feature, as tokens at the beginning of the prefix."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    cardinality: Annotated[int, Field(ge=1, le=2**31, description="values are 0 to cardinality - 1; others: unknown")]
    tokens: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_FEATURES,
            description="number of values that the feature takes from a history's features, one token for each",
        ),
    ] = 1
    min_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=65_536,
            description="sequences with fewer behaviours and candidates together do not show the feature",
        ),
    ] = 0


class ItemFeature(Part):
    """A categorical feature of each item, such as its category. `item_features.K.rows` holds the values."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    cardinality: Annotated[int, Field(ge=1, le=2**31, description="values are 0 to cardinality - 1; others: unknown")]


class DlrmInputs(Part):
    """Sizes of the input MLPs of Meta's DLRM-v3."""

    table_dim: Annotated[
        int, Field(ge=1, le=65_536, description="width of the tables of items, item features and contextual features")
    ]
    hidden: Annotated[int, Field(ge=1, le=65_536, description="width inside the MLPs")]
    norm_eps: Annotated[float, Field(gt=0, lt=1, description="epsilon of the norms in the MLPs")] = 1e-5
    item_features: Annotated[tuple[ItemFeature, ...], Field(max_length=MAX_FEATURES)] = ()
    action_weights: Annotated[
        tuple[Annotated[int, Field(ge=1, le=65_535)], ...],
        Field(
            max_length=16,
            description="bit masks; an action code takes the embedding of each mask that shares a bit with it",
        ),
    ] = ()
    action_dim: Annotated[int, Field(ge=1, le=65_536, description="width of each action embedding")] = 8


class TimePeriod(Part):
    """A period of the query time, such as the hours of a day or the days of a week."""

    unit_seconds: Annotated[float, Field(gt=0)]
    units: Annotated[float, Field(gt=0, description="units in one period")]


class Task(Part):
    """One column of the scores."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    kind: TaskKind = TaskKind.BINARY


def parse_task(text: str) -> dict[str, str]:
    """The fields of a task, from NAME[:binary|:regression]."""
    name, _, kind = text.partition(":")
    return {"name": name, "kind": kind or TaskKind.BINARY.value}


DEFAULT_PAGE_TOKENS = 64
"""Tokens of one page of K,V."""


class ComputeDtype(enum.StrEnum):
    """Element type of weights and rows in a matrix product; sums and the residual stream stay float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    """The products of rows with the layers' weights, on the CPU; attention is float32."""

    @property
    def of_rows(self) -> ComputeDtype:
        """The type of the rows around the products, and of attention. A product in int8 quantises its rows itself."""
        return ComputeDtype.FLOAT32 if self is ComputeDtype.INT8 else self

    @property
    def size_bytes(self) -> int:
        """Of one element of the rows around the products."""
        return 2 if self is ComputeDtype.BFLOAT16 else 4


class Preset(enum.StrEnum):
    """A well-known ranker."""

    DLRM_V3 = "dlrm-v3"
    """Meta's DLRM-v3: actions as sets of bits, MLPs, positions from the end, ages; scores by row and item."""
    NVIDIA = "nvidia"
    """recsys-examples: items and actions interleaved."""
    RESEARCH = "research"
    """The ICML'24 layer: a bias by position and by time."""
    SOFTMAX = "softmax"
    """A decoder with soft-max attention."""


def preset_fields(preset: Preset, dim: int, behaviours: int) -> dict[str, Any]:
    """Fields of a configuration. `dim`: width of a row; `behaviours`: length of the longest sequence."""
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
