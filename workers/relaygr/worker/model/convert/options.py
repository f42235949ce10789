"""The options of a conversion: facts that a state dict lacks, from the command line or a YAML or JSON file."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import MAX_BEHAVIOURS, MAX_CANDIDATES, MAX_SUFFIX_BEHAVIOURS
from relaygr.worker.model.config import describe_problems
from relaygr.worker.model.options import ReadoutActivation, Task


class SourceKind(enum.StrEnum):
    """The implementation that saved the checkpoint."""

    META = "meta"
    """DLRM-v3 of meta-recsys/generative-recommenders."""
    NVIDIA = "nvidia"
    """The ranking model of NVIDIA/recsys-examples."""
    RESEARCH = "research"
    """The research layer of meta-recsys/generative-recommenders."""
    TORCHEASYREC = "torcheasyrec"
    """DlrmHSTU of alibaba/TorchEasyRec."""


class ProjectionLayout(enum.StrEnum):
    """The order of the columns of the joint projection."""

    CONTIGUOUS = "contiguous"
    """All heads of U, then of V, Q and K."""
    PER_HEAD = "per_head"
    """U, V, Q and K of the first head, then of the second."""


class SourceFeature(BaseModel):
    """A contextual feature of the source: its name, and its number of tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=64)]
    tokens: Annotated[int, Field(ge=1)] = 1
    min_tokens: Annotated[
        int, Field(ge=0, description="sequences with fewer behaviours and candidates together do not show the feature")
    ] = 0


class ConvertOptions(BaseModel):
    """The options of a conversion. The source determines which are required (docs/checkpoints.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    heads: Annotated[int | None, Field(ge=1, description="attention heads")] = None
    normalizer: Annotated[float | None, Field(gt=0, description="N, the constant by which attention is divided")] = None
    eps: Annotated[float | None, Field(gt=0, lt=1, description="epsilon of the layers' norms")] = None
    alpha: Annotated[float | None, Field(gt=0, description="scale of q.k")] = None
    tasks: tuple[Task, ...] = ()
    features: Annotated[tuple[SourceFeature, ...], Field(description="contextual features, in the source's order")] = ()
    item_features: Annotated[
        tuple[str, ...], Field(description="features of each item beside its id, in the source's order")
    ] = ()
    tables: Annotated[
        Mapping[str, str],
        Field(description="embedding tables: item, action or a feature's name to a tensor's name or an .npy file"),
    ] = Field(default_factory=dict)
    table_rows: Annotated[
        Mapping[str, int], Field(description="rows of tables that the source stores in one tensor with others")
    ] = Field(default_factory=dict)
    item_values: Annotated[
        Mapping[str, str], Field(description="item features to .npy files with the value of each item of the table")
    ] = Field(default_factory=dict)
    items: Annotated[
        Path | None,
        Field(description=".npy file with the id of each row of the item table; null: the number of the row"),
    ] = None
    projection: ProjectionLayout | None = None
    concatenated: Annotated[
        bool | None, Field(description="the research layer's output reads [U, norm(A), U * norm(A)]")
    ] = None
    contextual_mask: bool = False
    max_attn_len: Annotated[int, Field(ge=0)] = 0
    min_full_attn_len: Annotated[int, Field(ge=0)] = 0
    target_group_size: Annotated[int, Field(ge=1)] = 1
    activation: Annotated[ReadoutActivation | None, Field(description="between the layers of the task MLP")] = None
    action_weights: Annotated[tuple[int, ...], Field(description="bits of actions, if no tensor holds them")] = ()
    pipeline: Annotated[Path | None, Field(description="TorchEasyRec's pipeline.config")] = None
    log_base: Annotated[float, Field(gt=0, description="base of the relative bias by time")] = 0.301
    max_prefix: Annotated[int | None, Field(ge=8, le=MAX_BEHAVIOURS)] = None
    max_suffix: Annotated[int, Field(ge=0, le=MAX_SUFFIX_BEHAVIOURS)] = 128
    max_candidates: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] = 2048

    @model_validator(mode="after")
    def _names_are_known(self) -> ConvertOptions:
        features = {feature.name for feature in self.features}
        for what, names, known in (
            ("tables", self.tables, {"item", "action", *features, *self.item_features}),
            ("item_values", self.item_values, set(self.item_features)),
        ):
            unknown = [name for name in names if name not in known]
            if unknown:
                raise ValueError(f"{what} names {', '.join(unknown)}, and there is no such feature")
        return self

    def require(self, *names: str) -> None:
        """Raises RelayError that names each of these options that is missing."""
        lacking = [name for name in names if not self._is_told(name)]
        if lacking:
            raise RelayError(
                "The state dict does not contain everything: give "
                + ", ".join(f"{as_option(name)} ({_WHAT[name]})" for name in lacking)
                + ", or give them in a file with --config."
            )

    def _is_told(self, name: str) -> bool:
        if name == "hide_below":
            return any("min_tokens" in feature.model_fields_set for feature in self.features)
        if name == "contextual_mask":
            return name in self.model_fields_set
        return getattr(self, name) not in (None, ())


def as_option(name: str) -> str:
    """The option of this name on the command line."""
    return f"--{_AS_OPTION.get(name, name).replace('_', '-')}"


_AS_OPTION = {
    "tables": "table",
    "tasks": "task",
    "features": "feature",
    "item_features": "item_feature",
    "action_weights": "action_weight",
}
_WHAT = {
    "heads": "attention heads",
    "normalizer": "N, by which the source divides attention: docs/checkpoints.md says how to find it",
    "tasks": "the name of each column of the scores, as NAME[:binary|:regression]",
    "hide_below": "the fewest tokens that show each feature, as NAME=TOKENS, or none",
    "contextual_mask": "or --no-contextual-mask: whether contextual tokens see the whole history",
    "features": "the name of each contextual feature, in the source's order, as NAME[=TOKENS]",
    "item_features": "the name of each feature of an item beside its id, in the source's order",
    "action_weights": "the bit of each kind of action, in the source's order",
    "concatenated": "or --not-concatenated: whether its output projection reads three blocks",
    "pipeline": "the pipeline.config that TorchEasyRec saves in the folder of the model",
    "projection": "contiguous or per_head: the order of the columns of the joint projection",
}


def read_options(path: Path | None, given: Mapping[str, Any]) -> ConvertOptions:
    """Options of a YAML or JSON file; `given`, those of the command line, override them. Raises RelayError."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RelayError(f"{path} cannot be read as YAML or JSON: {error}.") from error
        if not isinstance(loaded, dict):
            raise RelayError(f"{path} is not a mapping of options; docs/checkpoints.md lists them.")
        values.update(loaded)
    values.update(given)
    try:
        return ConvertOptions.model_validate(values)
    except ValidationError as error:
        raise RelayError(f"These are not the options of a conversion: {describe_problems(error)}.") from error
