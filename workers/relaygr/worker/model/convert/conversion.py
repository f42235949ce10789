"""Converts a checkpoint of another implementation into ours (docs/checkpoints.md).

Every tensor of the source is mapped, unused for a known reason, or left over. Every tensor of our configuration is
given or missing. A result with left-over or missing tensors is written only on request; a missing tensor is then
filled with neutral values: ones for the weight of a norm, else zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.checkpoint import expected_tensors
from relaygr.worker.model.config import ModelConfig, describe_problems
from relaygr.worker.model.convert.distributed import TableMemory
from relaygr.worker.model.convert.mapping import ConversionReport, Takings
from relaygr.worker.model.convert.meta import convert_meta
from relaygr.worker.model.convert.nvidia import convert_nvidia
from relaygr.worker.model.convert.options import CONVERT_OPTIONS, ConvertOptions, SourceKind, as_option
from relaygr.worker.model.convert.research import ATTENTION_MASK, convert_research
from relaygr.worker.model.convert.state_dict import StateDict, read_state_dict
from relaygr.worker.model.convert.torcheasyrec import PIPELINE_FILE, convert_torcheasyrec

_SHORTEST = 8


@dataclass(frozen=True, slots=True)
class Converted:
    """Our configuration and tensors, and a report of the use of the source's tensors."""

    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]
    report: ConversionReport


_SOURCES: dict[SourceKind, Callable[[Takings, ConvertOptions], dict[str, Any]]] = {
    SourceKind.META: convert_meta,
    SourceKind.NVIDIA: convert_nvidia,
    SourceKind.RESEARCH: convert_research,
    SourceKind.TORCHEASYREC: convert_torcheasyrec,
}


def convert(
    source: Path, kind: SourceKind, options: ConvertOptions, strip: str = "", scratch: Path | None = None
) -> Converted:
    """Converts a file or folder. Raises RelayError if it cannot be read, or an option is missing.

    `scratch`: a folder for temporary files of large tables; None: all tables in memory.
    """
    if kind is SourceKind.TORCHEASYREC and options.pipeline is None:
        # Training saves it beside the folders of the checkpoints.
        known = (source / PIPELINE_FILE, source.parent / PIPELINE_FILE)
        options = options.model_copy(update={"pipeline": next((path for path in known if path.is_file()), None)})
    return convert_state_dict(read_state_dict(source, strip, TableMemory(scratch)), kind, options, str(source))


def convert_state_dict(source: StateDict, kind: SourceKind, options: ConvertOptions, origin: str) -> Converted:
    """Converts tensors in memory. Raises RelayError for missing options, and for options of other sources."""
    useless = sorted(name for name in options.model_fields_set if kind not in CONVERT_OPTIONS[name].sources)
    if useless:
        names = ", ".join(as_option(name) for name in useless)
        raise RelayError(f"A conversion from {kind} does not take {names}: leave it out.")
    takings = Takings(origin, source)
    try:
        fields = _common(options) | _SOURCES[kind](takings, options)
    # Wrong shapes and files raise whichever error occurs first.
    except (RuntimeError, LookupError, ValueError, TypeError) as error:
        raise RelayError(f"{origin} is not a state dict of {kind}, or the options do not fit it: {error}.") from error
    fields.setdefault("max_prefix_behaviours", options.max_prefix or _longest(fields))
    try:
        config = ModelConfig.model_validate(fields)
    except ValidationError as error:
        raise RelayError(f"The model from {origin} is not valid: {describe_problems(error)}.") from error
    shapes = expected_tensors(config)
    takings.take_own(shapes)
    _check_tasks(takings, config)
    unproved = _unproved(options, config, bool(takings.names(ATTENTION_MASK)))
    # TorchEasyRec's pipeline.config answers all of it.
    if unproved and kind is not SourceKind.TORCHEASYREC:
        told = ", ".join(unproved)
        takings.note(f"No tensor proves {told}: check with `relaygr model compare` and scores of the source.")
    report = takings.report(shapes)
    return Converted(config, takings.tensors | _filled(report), report)


def _check_tasks(takings: Takings, config: ModelConfig) -> None:
    """Raises RelayError unless the task MLP has one column for each task."""
    last = takings.tensors.get(f"readout.mlp.{len(config.readout_hidden)}.bias")
    if last is not None and last.shape[0] != len(config.tasks):
        raise RelayError(f"The source scores {last.shape[0]} tasks, --task names {len(config.tasks)}.")


def _unproved(options: ConvertOptions, config: ModelConfig, has_mask: bool) -> list[str]:
    """The options that change scores but no tensor's shape, as they were given."""
    told = [] if config.group_norm else [f"--heads {config.num_heads}"]
    # The research model's causal mask has N rows.
    told += [] if has_mask or config.normalizer is None else [f"--normalizer {config.normalizer:g}"]
    told += [f"--hide-below {each.name}={each.min_tokens}" for each in options.features if each.min_tokens]
    told += ["--contextual-mask"] if options.contextual_mask else []
    told += [
        f"the order of {as_option(name)}"
        for name in ("features", "item_features", "tasks")
        if len(getattr(options, name)) > 1
    ]
    return told


def _common(options: ConvertOptions) -> dict[str, Any]:
    """The fields that the options of every source set."""
    fields: dict[str, Any] = {
        "normalizer": options.normalizer,
        "max_attn_len": options.max_attn_len,
        "min_full_attn_len": options.min_full_attn_len,
        "max_suffix_behaviours": options.max_suffix,
        "max_candidates": options.max_candidates,
    }
    return fields if options.alpha is None else fields | {"attn_alpha": options.alpha}


def _longest(fields: Mapping[str, Any]) -> int:
    """Behaviours of the longest sequence for which the source was made."""
    tokens = 2 if fields.get("inputs") == "interleaved" else 1
    return max(_SHORTEST, int(fields["normalizer"]) // tokens)


def _filled(report: ConversionReport) -> dict[str, torch.Tensor]:
    """The missing tensors, with neutral values."""
    return {
        missing.target: torch.ones(missing.shape) if _is_norm_weight(missing.target) else torch.zeros(missing.shape)
        for missing in report.missing
    }


def _is_norm_weight(name: str) -> bool:
    return name.endswith("norm.weight")
