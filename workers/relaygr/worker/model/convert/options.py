"""The options of a conversion: facts that a state dict lacks, from the command line or a YAML or JSON file.

Each is declared once, in `ConvertOptions`: the command has its options from there, and docs/conversion.md its table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from relaygr.runtime.errors import RelayError
from relaygr.runtime.options import Option
from relaygr.schemas.messages import MAX_BEHAVIOURS, MAX_CANDIDATES, MAX_SUFFIX_BEHAVIOURS
from relaygr.worker.model.config import describe_problems
from relaygr.worker.model.options import ReadoutActivation, Task, parse_task

_NONE: Final = "none"
"""Of `--hide-below`: no feature is hidden."""


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


_OTHERS = (SourceKind.META, SourceKind.NVIDIA, SourceKind.RESEARCH)
"""The sources without a `pipeline.config`, which answers for TorchEasyRec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOption(Option):
    """An option of a conversion, as the command, its errors and docs/conversion.md describe it."""

    sources: tuple[SourceKind, ...] = tuple(SourceKind)
    """The sources that take it."""
    required: str = "no"
    """When one of `sources` requires it."""
    asked: str = ""
    """How an error asks for it, if it is required."""
    more: str = ""
    """What the docs say beyond its help."""


class ConvertOptions(BaseModel):
    """The options of a conversion. Each field with a `ConvertOption` is an option of `relaygr model convert`, too.

    A text, or a list of texts, has the form of the command line: `tasks: [click, watch:regression]`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    heads: Annotated[
        int | None,
        Ge(1),
        ConvertOption("Attention heads.", sources=_OTHERS, required="always", asked="attention heads"),
    ] = None
    normalizer: Annotated[
        float | None,
        Field(gt=0),
        ConvertOption(
            "N: by which the source divides attention; Meta: the padded length of its batch.",
            sources=_OTHERS,
            required="always",
            asked="N, by which the source divides attention: docs/checkpoints.md says how to find it",
            more="[How to find N](checkpoints.md#2-convert)",
        ),
    ] = None
    eps: Annotated[
        float | None,
        Field(gt=0, lt=1),
        ConvertOption("Epsilon of the layers' norms.", sources=_OTHERS, shown_default="the source's own"),
    ] = None
    alpha: Annotated[
        float | None,
        Field(gt=0),
        ConvertOption("Scale of q.k.", sources=_OTHERS, shown_default="the source's own"),
    ] = None
    tasks: Annotated[
        tuple[Task, ...],
        ConvertOption(
            "A column of the scores; repeat in order.",
            flag="--task",
            metavar="NAME[:binary|:regression]",
            sources=_OTHERS,
            required="always",
            asked="the name of each column of the scores, as NAME[:binary|:regression]",
        ),
    ] = ()
    features: Annotated[
        tuple[SourceFeature, ...],
        ConvertOption(
            "A contextual feature; repeat in the source's order.",
            flag="--feature",
            metavar="NAME[=TOKENS]",
            sources=(SourceKind.META, SourceKind.NVIDIA),
            required="if there are contextual features",
            asked="the name of each contextual feature, in the source's order, as NAME[=TOKENS]",
        ),
    ] = ()
    hide_below: Annotated[
        Mapping[str, int] | None,
        ConvertOption(
            "Meta: hide this feature from sequences with fewer tokens.",
            metavar="NAME=TOKENS|none",
            sources=(SourceKind.META,),
            required="if there are contextual features",
            asked="the fewest tokens that show each feature, as NAME=TOKENS, or none",
            more="Tokens are behaviours and candidates together (`contextual_feature_to_min_uih_length`)",
        ),
    ] = None
    """Validation makes it a part of `features`: it is None afterwards."""
    item_features: Annotated[
        tuple[str, ...],
        ConvertOption(
            "A feature of each item beside its id; repeat in order.",
            flag="--item-feature",
            metavar="NAME",
            sources=(SourceKind.META, SourceKind.TORCHEASYREC),
            required="if items have features",
            asked="the name of each feature of an item beside its id, in the source's order",
        ),
    ] = ()
    item_values: Annotated[
        Mapping[str, str],
        ConvertOption(
            "The values of an item feature, one row for each item.",
            metavar="NAME=FILE.npy",
            sources=(SourceKind.META, SourceKind.TORCHEASYREC),
            required="if items have features",
        ),
    ] = {}
    tables: Annotated[
        Mapping[str, str],
        ConvertOption(
            "The embedding table of item, action or a feature.",
            flag="--table",
            metavar="NAME=TABLE|FILE.npy",
            required="if names do not agree",
            sources=_OTHERS,
            more="TABLE: the name of a table or tensor",
        ),
    ] = {}
    table_rows: Annotated[
        Mapping[str, int],
        ConvertOption(
            "Rows of a table that shares one tensor with others.",
            metavar="TABLE=ROWS",
            sources=_OTHERS,
            required="if several tables share one tensor, for all but the last",
        ),
    ] = {}
    items: Annotated[
        Path | None,
        ConvertOption(
            ".npy: the id of each row of the item table.",
            shown_default="the number of the row",
            required="if items are not 0, 1, 2, ...",
            more="Integers of 64 bits with a sign, so ids from 2^63 on are refused",
        ),
    ] = None
    projection: Annotated[
        ProjectionLayout | None,
        ConvertOption(
            "The order of the joint projection's columns, if unclear from names.",
            sources=(SourceKind.NVIDIA,),
            required="if names do not tell",
            asked="contiguous or per_head: the order of the columns of the joint projection",
        ),
    ] = None
    concatenated: Annotated[
        bool | None,
        ConvertOption(
            "Research: the output projection reads three blocks.",
            flag="--concatenated/--not-concatenated",
            sources=(SourceKind.RESEARCH,),
            required="if shapes fit both",
            asked="or --not-concatenated: whether its output projection reads three blocks",
            more="[U, norm(A), U * norm(A)]",
        ),
    ] = None
    contextual_mask: Annotated[
        bool,
        ConvertOption(
            "Contextual tokens see the whole history.",
            flag="--contextual-mask/--no-contextual-mask",
            shown_default=False,
            sources=(SourceKind.META, SourceKind.NVIDIA),
            required="nvidia, if there are contextual features",
            asked="or --no-contextual-mask: whether contextual tokens see the whole history",
            more="Yes, unless the training set `disable_contextual_mask`",
        ),
    ] = False
    max_attn_len: Annotated[
        int,
        Ge(0),
        ConvertOption(
            "Window of attention, places.",
            shown_default=False,
            sources=_OTHERS,
            required="if the source was trained with it",
        ),
    ] = 0
    min_full_attn_len: Annotated[
        int,
        Ge(0),
        ConvertOption(
            "Rows within this many places of the end ignore the window.",
            shown_default=False,
            sources=_OTHERS,
            required="if the source was trained with it",
        ),
    ] = 0
    target_group_size: Annotated[
        int,
        Ge(1),
        ConvertOption(
            "Candidates in a group, which see each other.",
            shown_default=False,
            sources=(SourceKind.NVIDIA,),
            required="if the source was trained with it",
        ),
    ] = 1
    activation: Annotated[
        ReadoutActivation | None,
        ConvertOption(
            "The activation between the layers of the task MLP.",
            shown_default="the source's own",
            sources=(SourceKind.NVIDIA, SourceKind.RESEARCH),
        ),
    ] = None
    action_weights: Annotated[
        tuple[Annotated[int, Ge(1)], ...],
        ConvertOption(
            "Meta: the bit of a kind of action, if no tensor holds it.",
            flag="--action-weight",
            sources=(SourceKind.META,),
            required="if no tensor holds them",
            asked="the bit of each kind of action, in the source's order",
        ),
    ] = ()
    pipeline: Annotated[
        Path | None,
        ConvertOption(
            "TorchEasyRec: its pipeline.config.",
            shown_default="pipeline.config in SOURCE or in the folder above",
            sources=(SourceKind.TORCHEASYREC,),
            required="if it is not in SOURCE or the folder above",
            asked="the pipeline.config that TorchEasyRec saves in the folder of the model",
        ),
    ] = None
    log_base: Annotated[
        float,
        Field(gt=0),
        ConvertOption("Research: base of the bias by time.", sources=(SourceKind.RESEARCH,)),
    ] = 0.301
    max_prefix: Annotated[
        int | None,
        Ge(8),
        Field(le=MAX_BEHAVIOURS),
        ConvertOption("Longest prefix, behaviours.", shown_default="from N"),
    ] = None
    max_suffix: Annotated[
        int,
        Ge(0),
        Field(le=MAX_SUFFIX_BEHAVIOURS),
        ConvertOption(
            "Longest suffix, behaviours.", more="A longer one than requests have leaves room for short tails"
        ),
    ] = 128
    max_candidates: Annotated[
        int,
        Ge(1),
        Field(le=MAX_CANDIDATES),
        ConvertOption("Most candidates of a request."),
    ] = 2048

    @model_validator(mode="before")
    @classmethod
    def _hide(cls, values: Any) -> Any:
        """Moves `hide_below` into the features: with it, each of them says its fewest tokens. Raises RelayError."""
        if not isinstance(values, dict) or values.get("hide_below") is None:
            return values
        told = values["hide_below"]
        texts = _texts(told)
        if texts is not None:
            told = {} if texts == [_NONE] else _pairs("hide_below", texts)
        elif not isinstance(told, Mapping):
            raise ValueError("hide_below is no mapping of features to numbers of tokens")
        least, features = dict(told), _described(values.get("features", ()))
        if isinstance(features, list | tuple):
            features = [
                {**each, "min_tokens": least.pop(str(each.get("name")), each.get("min_tokens", 0))}
                if isinstance(each, dict)
                else each
                for each in features
            ]
        if least:
            raise RelayError(f"--hide-below {next(iter(least))}: there is no such --feature.")
        rest = {name: value for name, value in values.items() if name != "hide_below"}
        # A source that takes no features is not told of any.
        return rest | {"features": features} if features else rest

    @field_validator("tasks", "features", "item_features", "tables", "table_rows", "item_values", mode="before")
    @classmethod
    def _read_texts(cls, value: Any, info: ValidationInfo) -> Any:
        """The value of texts in the form of the command line. Raises RelayError for another form."""
        texts = _texts(value)
        if texts is None or info.field_name is None:
            return value
        match info.field_name:
            case "tasks":
                return [parse_task(text) for text in texts]
            case "features":
                return _described(texts)
            case "item_features":
                return texts
        return _pairs(info.field_name, texts)

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
                + ", ".join(f"{as_option(name)} ({CONVERT_OPTIONS[name].asked})" for name in lacking)
                + ", or give them in a file with --config."
            )

    def _is_told(self, name: str) -> bool:
        if name == "hide_below":
            return any("min_tokens" in feature.model_fields_set for feature in self.features)
        if name == "contextual_mask":
            return name in self.model_fields_set
        return getattr(self, name) not in (None, ())


def _texts(value: Any) -> list[str] | None:
    """The texts of a value in the form of the command line; None for one in the form of a file."""
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, list) and all(isinstance(each, str) for each in value) else None


def _pairs(name: str, texts: list[str]) -> dict[str, str]:
    """Parses texts of the form NAME=VALUE. Raises RelayError for another form."""
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise RelayError(f"{as_option(name)} {text}: write NAME=VALUE.")
        pairs[key] = value
    return pairs


def _described(features: Any) -> Any:
    """Features from texts of the form NAME[=TOKENS]; those of a file as they are. Raises RelayError."""
    texts = _texts(features)
    if texts is None:
        return features
    found = []
    for text in texts:
        name, _, tokens = text.partition("=")
        if not name or (tokens and not tokens.isdecimal()):
            raise RelayError(f"--feature {text}: write NAME, or NAME=TOKENS, such as genre=3.")
        found.append({"name": name, "tokens": tokens or "1"})
    return found


CONVERT_OPTIONS: Final[Mapping[str, ConvertOption]] = {
    name: mark
    for name, field in ConvertOptions.model_fields.items()
    for mark in field.metadata
    if isinstance(mark, ConvertOption)
}
"""The options by the names of their fields, in the order of the help."""


def as_option(name: str) -> str:
    """The option of this name on the command line."""
    return CONVERT_OPTIONS[name].flag.partition("/")[0] or f"--{name.replace('_', '-')}"


def read_options(path: Path | None, told: Iterable[str], given: Mapping[str, Any]) -> ConvertOptions:
    """Options of a YAML or JSON file. Those of the command line override them: `told`, as NAME=VALUE, where VALUE is
    that of a file, and `given`. Raises RelayError, also if both have the same one.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RelayError(f"{path} cannot be read as YAML or JSON: {error}.") from error
        if not isinstance(loaded, dict):
            raise RelayError(f"{path} is not a mapping of options; docs/conversion.md lists them.")
        values.update(loaded)
    overrides = dict(given)
    for text in told:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise RelayError(f"--option {text}: write NAME=VALUE, such as heads=4.")
        if name in overrides:
            raise RelayError(
                f"--option {name} is given twice: several values are one list, such as tasks=[click, like]."
            )
        try:
            overrides[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise RelayError(f"--option {text} is not YAML: {error}.") from error
    try:
        return ConvertOptions.model_validate(values | overrides)
    except ValidationError as error:
        raise RelayError(f"These are not the options of a conversion: {describe_problems(error)}.") from error
