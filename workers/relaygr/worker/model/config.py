"""The configuration of a model, `config.json`: its sizes and options.

It holds every setting that changes the model's results, and the revision covers it. Symbols:
`D` embedding_dim, `H` num_heads, `dqk` attention_dim (per head), `dv` hidden_dim (per head), `N` normalizer.

The HSTU layer: "Actions Speak Louder than Words" (arXiv 2402.17152), and the variants of Meta's
generative-recommenders and NVIDIA's recsys-examples. docs/model.md describes the effect of each option.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import read_regular
from relaygr.schemas.messages import MAX_BEHAVIOURS, MAX_CANDIDATES, MAX_FEATURES, MAX_SUFFIX_BEHAVIOURS, MAX_TASKS
from relaygr.worker.kv import KvDtype, KvGeometry, PrefixLayout
from relaygr.worker.model.options import (
    Activated,
    ContextualFeature,
    DlrmInputs,
    Family,
    InputForm,
    OutputForm,
    Part,
    PositionOrigin,
    ReadoutActivation,
    ReadoutForm,
    ReadoutNorm,
    RelativeBias,
    Size,
    Task,
    TimeEncoding,
    TimePeriod,
)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
"""What people should know of the model: a training writes it, and nothing reads it."""


class ModelConfig(Part):
    """The configuration of one model."""

    format: Literal[1] = 1
    family: Family = Family.HSTU

    embedding_dim: Size
    num_heads: Annotated[int, Field(ge=1, le=1024)]
    attention_dim: Annotated[int, Field(ge=1, le=65_536, description="dqk, per head")]
    hidden_dim: Annotated[int, Field(ge=1, le=65_536, description="dv, per head")]
    num_layers: Annotated[int, Field(ge=1, le=1024)]

    normalizer: Annotated[
        float | None,
        Field(gt=0, description="N: one constant for all sequences, never the length of a batch; soft-max has none"),
    ] = None
    attn_alpha: Annotated[float | None, Field(gt=0, description="scale of q.k; null: attention_dim ** -0.5")] = None
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    activated: Activated = Activated.U
    output_form: OutputForm = OutputForm.U_A_UNORM
    norm_affine: bool = True
    group_norm: bool = Field(
        False, description="the output norm is per head, with one weight and one bias for each head"
    )
    projection_bias: bool = True
    output_bias: bool = False
    mlp_dim: Annotated[
        int | None,
        Field(ge=1, le=1_048_576, description="width inside the MLP of a soft-max layer; other layers have no MLP"),
    ] = None

    contextual_mask: bool = Field(False, description="contextual rows see the whole history")
    max_attn_len: Annotated[
        int,
        Field(ge=0, le=2**24, description="window: the distance in places to the farthest visible key; 0: no window"),
    ] = 0
    min_full_attn_len: Annotated[
        int,
        Field(
            ge=0,
            le=2**24,
            description="candidates, and history rows within this many places of the end, ignore the window",
        ),
    ] = 0
    target_group_size: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_CANDIDATES,
            description="candidates of one group; a candidate sees the earlier candidates of its group",
        ),
    ] = 1
    relative_bias: RelativeBias | None = None

    inputs: InputForm = InputForm.ADDED
    dlrm_inputs: Annotated[DlrmInputs | None, Field(description="sizes of the form dlrm; null for other forms")] = None
    contextual_features: Annotated[tuple[ContextualFeature, ...], Field(max_length=MAX_FEATURES)] = ()
    vocabulary_size: Annotated[
        int, Field(ge=1, le=2**31, description="number of known items; one more row is for all other items")
    ]
    num_actions: Annotated[
        int, Field(ge=0, le=65_536, description="action codes are 0 to this - 1; 0: the model does not use actions")
    ] = 0
    num_positions: Annotated[
        int,
        Field(
            ge=0,
            le=2**24,
            description="rows of the position table; places beyond the table use its last row; 0: no table",
        ),
    ] = 0
    position_origin: PositionOrigin = PositionOrigin.START
    time_encoding: TimeEncoding = TimeEncoding.NONE
    time_unit_seconds: Annotated[float, Field(gt=0, description="unit of a token's age, seconds")] = 60.0
    num_times: Annotated[
        int, Field(ge=0, le=2**24, description="rows of the time table; older tokens use its last row; 0: no table")
    ] = 0
    embedding_scale: Annotated[
        float, Field(gt=0, description="factor of each token, before positions and times are added")
    ] = 1.0
    tasks: Annotated[tuple[Task, ...], Field(min_length=1, max_length=MAX_TASKS)] = (Task(name="click"),)
    readout: ReadoutForm = ReadoutForm.ROW
    readout_norm: ReadoutNorm = ReadoutNorm.LAYER
    readout_norm_eps: Annotated[float | None, Field(gt=0, lt=1, description="null: norm_eps")] = None
    readout_periods: Annotated[
        tuple[TimePeriod, ...],
        Field(
            max_length=8,
            description="the phase of the query time in each period is joined to the row, then mapped back to D",
        ),
    ] = ()
    readout_hidden: Annotated[tuple[Size, ...], Field(max_length=8)] = ()
    readout_activation: ReadoutActivation = ReadoutActivation.SILU
    readout_hidden_norm: bool = Field(
        False, description="a LayerNorm before each activation of the task MLP; swish_norm has its own"
    )
    readout_item_hidden: Annotated[
        int, Field(ge=1, le=65_536, description="width inside the item MLP of the read-out item_product")
    ] = 512
    readout_mlp_eps: Annotated[
        float, Field(gt=0, lt=1, description="epsilon of the norms inside the read-out's MLPs")
    ] = 1e-5

    swish_norm_eps: Annotated[
        float | None,
        Field(gt=0, lt=1, description="epsilon of the norm inside each swish-norm; null: that of the other norms"),
    ] = None

    max_prefix_behaviours: Annotated[int, Field(ge=8, le=MAX_BEHAVIOURS)]
    max_suffix_behaviours: Annotated[int, Field(ge=0, le=MAX_SUFFIX_BEHAVIOURS)] = 128
    max_candidates: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] = 2048

    @model_validator(mode="after")
    def _names_differ(self) -> ModelConfig:
        for what, names in (
            ("tasks", [task.name for task in self.tasks]),
            ("contextual_features", [feature.name for feature in self.contextual_features]),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"{what} contains a name twice: {', '.join(names)}")
        if self.group_norm and not self.norm_affine:
            raise ValueError("group_norm needs norm_affine: its weight and bias have one number for each head")
        return self

    @model_validator(mode="after")
    def _options_fit(self) -> ModelConfig:
        if self.min_full_attn_len and not self.max_attn_len:
            raise ValueError("min_full_attn_len needs max_attn_len: without a window every row sees all earlier keys")
        if self.contextual_mask and not self.contextual_features:
            raise ValueError("contextual_mask needs contextual_features")
        if self.normalizer is None and self.family is Family.HSTU:
            raise ValueError("normalizer is required in the family hstu")
        if self.normalizer is not None and self.family is Family.SOFTMAX:
            raise ValueError("normalizer is allowed in the family hstu only")
        if (self.mlp_dim is not None) != (self.family is Family.SOFTMAX):
            raise ValueError("mlp_dim is required in the family softmax, and allowed there only")
        of_hstu = (self.activated, self.output_form, self.group_norm) != (Activated.U, OutputForm.U_A_UNORM, False)
        if of_hstu and self.family is Family.SOFTMAX:
            raise ValueError("activated, output_form and group_norm are allowed in the family hstu only")
        return self

    @model_validator(mode="after")
    def _inputs_fit(self) -> ModelConfig:
        if (self.dlrm_inputs is not None) != (self.inputs is InputForm.DLRM):
            raise ValueError("dlrm_inputs is required with the inputs dlrm, and allowed there only")
        if self.inputs is InputForm.DLRM and self.num_actions:
            raise ValueError("inputs dlrm takes dlrm_inputs.action_weights: leave num_actions at 0")
        if self.inputs is InputForm.INTERLEAVED and not self.num_actions:
            raise ValueError("inputs interleaved needs num_actions")
        if self.readout is ReadoutForm.ITEM_PRODUCT and self.inputs is InputForm.INTERLEAVED:
            raise ValueError("readout item_product is allowed with the inputs added and dlrm")
        if self.readout_hidden_norm and self.readout_activation is ReadoutActivation.SWISH_NORM:
            raise ValueError("readout_hidden_norm: the activation swish_norm has a norm of its own")
        if (self.time_encoding is TimeEncoding.NONE) != (self.num_times == 0):
            raise ValueError("num_times and time_encoding go together: set both or neither")
        if self.position_origin is PositionOrigin.END and not self.num_positions:
            raise ValueError("position_origin end needs num_positions")
        if self.position_origin is PositionOrigin.END and self.num_positions < self.contextual_tokens:
            raise ValueError("position_origin end needs a row of num_positions for each contextual token")
        if self.contextual_tokens > MAX_FEATURES:
            raise ValueError(f"contextual_features take {self.contextual_tokens} tokens, allowed are {MAX_FEATURES}")
        return self

    @property
    def contextual_tokens(self) -> int:
        """Number of contextual tokens: the user's features, at the beginning of a prefix."""
        return sum(feature.tokens for feature in self.contextual_features)

    @property
    def alpha(self) -> float:
        """The scale of q.k."""
        return self.attention_dim**-0.5 if self.attn_alpha is None else self.attn_alpha

    def swish_eps(self, eps: float) -> float:
        """Epsilon inside the swish-norms of an MLP whose other norms have `eps`."""
        return eps if self.swish_norm_eps is None else self.swish_norm_eps

    @property
    def projection_width(self) -> int:
        """Columns of the joint projection: U, V, Q, K."""
        return self.num_heads * 2 * (self.hidden_dim + self.attention_dim)

    @property
    def output_width(self) -> int:
        """Rows of the output projection."""
        return self.num_heads * self.hidden_dim * self.output_form.blocks

    def layout(self) -> PrefixLayout:
        """The tokens of a prefix: contextual tokens, then one or two tokens for each behaviour."""
        return PrefixLayout(self.contextual_tokens, 2 if self.inputs is InputForm.INTERLEAVED else 1)

    def geometry(self, page_tokens: int, dtype: KvDtype) -> KvGeometry:
        """The shape of this model's K,V in pages."""
        return KvGeometry(self.num_layers, self.num_heads, self.attention_dim, self.hidden_dim, page_tokens, dtype)

    def to_json(self) -> str:
        """Canonical JSON: the same model gives the same bytes, since the revision is computed from them."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1, ensure_ascii=True) + "\n"


def parse_config(text: str, origin: str) -> ModelConfig:
    """Parses a configuration. Raises RelayError that names the origin and each wrong key."""
    if names_ranker(text):
        raise RelayError(
            f"{origin} is the configuration of a ranker of your own, and this needs a model of our own layers: "
            "docs/rankers.md says which commands take one."
        )
    try:
        return ModelConfig.model_validate_json(text)
    except ValidationError as error:
        raise RelayError(f"{origin} is not a model configuration: {describe_problems(error)}.") from error


def read_config(folder: Path) -> ModelConfig:
    """The configuration in a checkpoint folder. Raises RelayError if it is missing or invalid."""
    path = folder / CONFIG_FILE
    # `read_config_file` also reads a file that a user names, which may be a pipe.
    if path.exists() and not path.is_file():
        raise RelayError(f"{path} cannot be read: it is not a regular file.")
    return read_config_file(path)


def is_ranker(folder: Path) -> bool:
    """Whether the folder holds a team's own ranker (`rankers.py`), not a model of our own layers."""
    try:
        return names_ranker(read_regular(folder / CONFIG_FILE))
    except OSError:
        return False


def names_ranker(text: str | bytes) -> bool:
    """Whether a configuration is that of a team's own ranker."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "ranker" in found


def require_model(folder: Path) -> None:
    """Raises RelayError for a folder that is no model. Reads the configuration alone."""
    if is_ranker(folder):
        return
    config, weights = read_config(folder), folder / WEIGHTS_FILE
    if config.family is not Family.NULL and not weights.is_file():
        raise RelayError(f"{weights} does not exist: a model is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}.")


def read_config_file(path: Path) -> ModelConfig:
    """The configuration in a file. Raises RelayError if the file is missing or invalid."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RelayError(
            f"{path} cannot be read ({error}): a model is a folder with {CONFIG_FILE} and model.safetensors; "
            "`relaygr model init` makes a random one."
        ) from error
    return parse_config(text, str(path))


def describe_problems(error: ValidationError) -> str:
    """A sentence for each wrong key."""
    return "; ".join(_sentence(problem["loc"], problem["msg"]) for problem in error.errors())


def _sentence(location: tuple[int | str, ...], message: str) -> str:
    where = ".".join(str(part) for part in location)
    return f"{where}: {message}" if where else message


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """The rules for every prefix of one model, derived from its mask and encodings (docs/model.md, "Rules").

    A rule restricts the reuse of cached prefixes if a row depends on more than the behaviours up to itself:

    * `grows` false: earlier rows depend on the end of the history (contextual mask, positions from the end, rows near
      the end that ignore the window) or on the next token (relative time bias). Only the whole prefix can match;
      appends and suffixes are refused.
    * `chunks` false: rows see later rows (contextual mask), so pre-infer computes the prefix in one chunk.
    * `uses_query_time`: inputs depend on the time before the query, so K,V belong to one query time, which is a part of
      the key.
    """

    grows: bool = True
    """New behaviours may be appended to a prefix, and a request may have a suffix."""
    chunks: bool = True
    """Pre-infer may be split into chunks anywhere."""
    uses_query_time: bool = False
    """K,V are valid for one query time only."""

    @property
    def is_reusable(self) -> bool:
        """Whether a prefix serves later impressions of its user, too."""
        return self.grows and not self.uses_query_time


class RuleError(ValueError):
    """A call that the model's rules forbid, because its scores would differ from full inference."""


def restrictions_of(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """For each rule the options in `config.json` that restrict it; none: the rule does not restrict reuse."""
    mask, near_end, by_time, from_end, ages = (
        (option,) if is_set else ()
        for option, is_set in (
            ("contextual_mask", config.contextual_mask),
            ("min_full_attn_len", config.min_full_attn_len > 0),
            ("relative_bias.time_buckets", config.relative_bias is not None and config.relative_bias.time_buckets > 0),
            ("position_origin", config.position_origin is PositionOrigin.END),
            ("time_encoding", config.time_encoding is not TimeEncoding.NONE),
        )
    )
    return {"grows": mask + near_end + by_time + from_end, "chunks": mask, "uses_query_time": by_time + ages}


def rules_of(config: ModelConfig) -> PrefixRules:
    """The rules that a configuration implies."""
    restricted = restrictions_of(config)
    return PrefixRules(
        grows=not restricted["grows"],
        chunks=not restricted["chunks"],
        uses_query_time=bool(restricted["uses_query_time"]),
    )
