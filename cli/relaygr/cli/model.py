"""`relaygr model`: `init` makes a random checkpoint, `convert` converts one of another implementation,
`convert-recbole` a SASRec of RecBole, `compare` checks a checkpoint's scores against those of its source, `check` finds
out what one allows, `show` describes one, `verify` reads its weights whole, `bench` measures its times on this machine,
`deploy` and `rollback` choose the revision that serves.

Commands import torch only when they run, so that `--help` answers without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from pydantic import ValidationError
from rich.table import Table

from relaygr.cli.model_bench import bench_command
from relaygr.cli.model_check import check_command
from relaygr.cli.model_check_old import check_compute_command, check_dram_command, check_kv_command
from relaygr.cli.model_compare import compare_command
from relaygr.cli.model_convert import convert_command
from relaygr.cli.model_deploy import deploy_command, rollback_command
from relaygr.cli.model_recbole import convert_recbole_command
from relaygr.cli.options import JsonOption, is_given
from relaygr.cli.texts import print_json, show_size, stdout_console
from relaygr.runtime.errors import RelayError
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.config import (
    CONFIG_FILE,
    ModelConfig,
    PrefixRules,
    describe_problems,
    read_config_file,
    restrictions_of,
    rules_of,
)
from relaygr.worker.model.description import Description, description_of
from relaygr.worker.model.npy import read_npy
from relaygr.worker.model.options import (
    Activated,
    ContextualFeature,
    Family,
    OutputForm,
    Preset,
    parse_task,
    preset_fields,
)

if TYPE_CHECKING:
    from relaygr.worker.model.checkpoint import Checkpoint
    from relaygr.worker.model.rankers import RankerFolder

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Make, convert, show and compare checkpoints.")
app.command("convert")(convert_command)
app.command("convert-recbole")(convert_recbole_command)
app.command("compare")(compare_command)
app.command("bench")(bench_command)
app.command("deploy")(deploy_command)
app.command("rollback")(rollback_command)
app.command("check")(check_command)
app.command("check-kv", hidden=True)(check_kv_command)
app.command("check-dram", hidden=True)(check_dram_command)
app.command("check-compute", hidden=True)(check_compute_command)

EXIT_UNVERIFIED = 1

_MIB = 2**20
_BESIDE_CONFIG = frozenset({"out", "config", "items", "seed", "force"})
"""Parameters of `init` that are allowed together with a configuration file."""
_OPTION_OF = {"family": "null", "num_actions": "actions", "num_positions": "positions"}
"""Parameters of `init` whose names differ from the fields of a configuration that they set."""


@app.command()
def init(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="Folder to write: config.json and model.safetensors.")],
    vocabulary: Annotated[
        int | None,
        typer.Option(min=1, help="Number of items, with ids 0 to this - 1; or give --items.", show_default="10000"),
    ] = None,
    items: Annotated[
        Path | None,
        typer.Option(help="File of item ids: one integer on each line, or a .npy file of int64.", show_default=False),
    ] = None,
    preset: Annotated[
        Preset | None,
        typer.Option(help="The form of a well-known ranker. Other options set its sizes, and override it."),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    dim: Annotated[int, typer.Option(min=1, help="Width of a row.")] = 128,
    attention_dim: Annotated[
        int | None, typer.Option(min=1, help="Width of Q and K per head.", show_default="dim / heads")
    ] = None,
    hidden_dim: Annotated[
        int | None, typer.Option(min=1, help="Width of V per head.", show_default="dim / heads")
    ] = None,
    normalizer: Annotated[
        float | None,
        typer.Option(help="N, the constant by which attention is divided.", show_default="the longest prefix + suffix"),
    ] = None,
    activated: Annotated[Activated, typer.Option(help="The projections that go through SiLU.")] = Activated.U,
    output_form: Annotated[OutputForm, typer.Option(help="The input of the output projection.")] = OutputForm.U_A_UNORM,
    group_norm: Annotated[bool, typer.Option("--group-norm", help="Normalise the attention output per head.")] = False,
    actions: Annotated[int, typer.Option(min=0, help="Number of action codes, 0 to this - 1; 0: no actions.")] = 16,
    positions: Annotated[
        int | None, typer.Option(min=0, help="Rows of the position table.", show_default="longest prefix + suffix + 1")
    ] = None,
    feature: Annotated[
        list[str] | None, typer.Option(metavar="NAME=CARDINALITY", help="A contextual feature; may be repeated.")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:binary|:regression]", help="A task; may be repeated.", show_default="click"),
    ] = None,
    readout_hidden: Annotated[
        list[int] | None, typer.Option(min=1, help="Width of a hidden layer of the read-out; may be repeated.")
    ] = None,
    max_prefix: Annotated[int, typer.Option(min=8, help="Longest prefix, behaviours.")] = 8192,
    max_suffix: Annotated[int, typer.Option(min=0, help="Longest suffix, behaviours.")] = 128,
    max_candidates: Annotated[int, typer.Option(min=1, help="Most candidates of a request.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same weights.")] = 0,
    config: Annotated[
        Path | None,
        typer.Option(help="A config.json (docs/model.md) instead of the options for sizes and forms."),
    ] = None,
    null: Annotated[
        bool, typer.Option("--null", help="A model that computes nothing, to measure the pipeline.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing checkpoint.")] = False,
) -> None:
    """Make a random checkpoint."""
    if items is not None and vocabulary is not None:
        raise RelayError("Give --items or --vocabulary, not both.")
    if (out / CONFIG_FILE).exists() and not force:
        raise RelayError(f"{out} already contains a checkpoint: choose another folder, or give --force.")
    item_ids = None if items is None else read_item_ids(items)
    if config is not None:
        _refuse_beside_config(context)
        _save_random(out, read_config_file(config), seed, item_ids)
        return
    places = max_prefix + max_suffix
    form = {} if preset is None else preset_fields(preset, dim, places)
    made = _config(
        {
            "family": Family.NULL if null else Family.HSTU,
            "embedding_dim": dim,
            "num_heads": heads,
            "attention_dim": attention_dim or max(1, dim // heads),
            "hidden_dim": hidden_dim or max(1, dim // heads),
            "num_layers": layers,
            "normalizer": float(places) if normalizer is None else normalizer,
            "activated": activated,
            "output_form": output_form,
            "group_norm": group_norm,
            "vocabulary_size": item_ids.size if item_ids is not None else vocabulary or 10_000,
            "num_actions": actions,
            "num_positions": places + 1 if positions is None else positions,
            "contextual_features": [_feature(text) for text in feature or ()],
            "tasks": [parse_task(text) for text in task or ("click",)],
            "readout_hidden": readout_hidden or (),
            "max_prefix_behaviours": max_prefix,
            "max_suffix_behaviours": max_suffix,
            "max_candidates": max_candidates,
        }
        | {name: value for name, value in form.items() if not is_given(context, _OPTION_OF.get(name, name))}
    )
    _save_random(out, made, seed, item_ids)


@app.command()
def show(path: Annotated[Path, typer.Argument(help="A checkpoint folder.")], as_json: JsonOption = False) -> None:
    """Check and describe a checkpoint. No code of a ranker runs."""
    from relaygr.worker.model.engine import load_model
    from relaygr.worker.model.rankers import RankerFolder

    model = load_model(path)
    if isinstance(model, RankerFolder):
        if as_json:
            print_json(_ranker_as_json(model))
        else:
            _print_ranker(model, path)
    elif as_json:
        print_json(_as_json(model))
    else:
        _print_checkpoint(model, path)


@app.command()
def verify(path: Annotated[Path, typer.Argument(help="A checkpoint folder.")], as_json: JsonOption = False) -> None:
    """Read all weights of a checkpoint and compare them with their digests, which loading trusts.

    A copied file, whose time differs, is given its recorded time back, so that it loads without being read.
    """
    from relaygr.worker.model.checkpoint import verify_checkpoint

    found = verify_checkpoint(path, trust=True)
    if as_json:
        print_json(asdict(found))
        if found.changed or not found.has_digests:
            raise typer.Exit(EXIT_UNVERIFIED)
        return
    console = stdout_console()
    if not found.has_digests:
        console.print(
            f"{path} has no digests, because another tool wrote its weights: loading reads all "
            f"{show_size(found.size_bytes)}. Its values and shapes are right."
        )
        raise typer.Exit(EXIT_UNVERIFIED)
    if found.changed:
        console.print(f"{path} was changed after it was written: {', '.join(found.changed)}")
        raise typer.Exit(EXIT_UNVERIFIED)
    console.print(f"{path} agrees with its digests, {show_size(found.size_bytes)}")


def _refuse_beside_config(context: typer.Context) -> None:
    """Raises RelayError for options that conflict with a configuration file."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in _BESIDE_CONFIG and is_given(context, name)
    ]
    if given:
        raise RelayError(f"--config defines the model: leave out {', '.join(given)}.")


def _save_random(out: Path, config: ModelConfig, seed: int, item_ids: NDArray[np.int64] | None) -> None:
    from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint

    random = random_checkpoint(config, seed, item_ids)
    _print_checkpoint(save_checkpoint(out, config, random.tensors), out)


def read_item_ids(path: Path) -> NDArray[np.int64]:
    """Distinct item ids of a file, ascending. Raises RelayError that names a line that is not an integer."""
    try:
        if path.suffix == ".npy":
            ids = read_npy(path)
            if ids.dtype.kind not in "iu" or ids.ndim != 1:
                raise RelayError(f"{path} contains {ids.dtype} {list(ids.shape)}, not one row of integers.")
            if ids.dtype.kind == "u" and ids.size and int(ids.max()) > np.iinfo(np.int64).max:
                raise RelayError(
                    f"{path} contains the id {ids.max()}; the largest item id is {np.iinfo(np.int64).max}."
                )
            found = ids.astype(np.int64)
        else:
            with path.open(encoding="utf-8") as lines:
                found = np.fromiter((_item_id(path, number, line) for number, line in enumerate(lines, 1)), np.int64)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise RelayError(f"{path} cannot be read as item ids: {error}.") from error
    if found.size == 0:
        raise RelayError(f"{path} contains no item id.")
    return np.unique(found)


def _item_id(path: Path, number: int, line: str) -> int:
    try:
        return int(line)
    except ValueError as error:
        raise RelayError(
            f"{path}, line {number}: {line.strip()!r} is not an integer; write one id on each line."
        ) from error


def _config(values: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        raise RelayError(f"The options do not define a model: {describe_problems(error)}.") from error


def _feature(text: str) -> dict[str, str]:
    name, equals, cardinality = text.partition("=")
    if not (name and equals and cardinality.isdecimal()):
        raise RelayError(f"--feature {text}: write NAME=CARDINALITY, such as country=250.")
    return {"name": name, "cardinality": cardinality}


def _layer(config: ModelConfig) -> str:
    if config.family is Family.SOFTMAX:
        return f"soft-max, MLP {config.mlp_dim}"
    return f"SiLU on {config.activated}, output {config.output_form}"


def _inputs(config: ModelConfig) -> str:
    if config.dlrm_inputs is not None:
        return f"{config.inputs}, {len(config.dlrm_inputs.action_weights)} kinds of action"
    return f"{config.inputs}, {config.num_actions:,} actions" if config.num_actions else "items alone"


def _describe(feature: ContextualFeature) -> str:
    tokens = f", {feature.tokens} tokens" if feature.tokens > 1 else ""
    return f"{feature.name} ({feature.cardinality:,}{tokens})"


def _attention(config: ModelConfig) -> str:
    """The options of mask and bias."""
    parts = {
        "contextual tokens see the whole history": config.contextual_mask,
        f"window of {config.max_attn_len} places": config.max_attn_len,
        f"the newest {config.min_full_attn_len} rows ignore the window": config.min_full_attn_len,
        f"candidates in groups of {config.target_group_size}": config.target_group_size > 1,
        "relative bias": config.relative_bias is not None,
    }
    return ", ".join(text for text, is_asked in parts.items() if is_asked) or "the plain mask"


def _rules(rules: PrefixRules, restricted_by: Mapping[str, Sequence[str]] | None = None) -> str:
    """`restricted_by`: the options because of which a rule restricts reuse, if they are known."""

    def because(rule: str) -> str:
        options = (restricted_by or {}).get(rule)
        return f" (because of {' and '.join(options)})" if options else ""

    return ", ".join(
        (
            "may grow" if rules.grows else "never grow" + because("grows"),
            "computed in any chunks" if rules.chunks else "computed in one chunk" + because("chunks"),
            "valid for one query time" + because("uses_query_time") if rules.uses_query_time else "valid at any time",
        )
    )


def _widths(config: ModelConfig) -> str:
    return " to ".join(str(width) for width in (config.embedding_dim, *config.readout_hidden, len(config.tasks)))


def _as_json(checkpoint: Checkpoint) -> dict[str, object]:
    config, rules = checkpoint.config, rules_of(checkpoint.config)
    return {
        "revision": checkpoint.revision,
        "config": config.model_dump(mode="json"),
        "parameters": checkpoint.num_parameters,
        "weights_bytes": checkpoint.weights_bytes,
        "prefixes": asdict(rules),
        "restricted_by": restrictions_of(config),
        "kv_bytes_per_token": {dtype.value: config.geometry(1, dtype).bytes_per_token for dtype in KvDtype},
    }


def _print_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    config = checkpoint.config
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))

    def row(name: str, value: str) -> None:
        table.add_row(name, value)

    row("checkpoint", str(path))
    row("revision", checkpoint.revision)
    row("family", str(config.family))
    row("layers", f"{config.num_layers} of {config.num_heads} heads, q.k {config.attention_dim}, v {config.hidden_dim}")
    row("width", str(config.embedding_dim))
    row("N", "none" if config.normalizer is None else f"{config.normalizer:g}")
    row("layer form", _layer(config))
    row("attention", _attention(config))
    row("prefixes", _rules(rules_of(config), restrictions_of(config)))
    row("items", f"{config.vocabulary_size:,}")
    row("inputs", _inputs(config))
    row("positions", f"{config.num_positions:,}, from the {config.position_origin}" if config.num_positions else "none")
    row("times", f"{config.num_times:,}, {config.time_encoding} of the age" if config.num_times else "none")
    row("features", ", ".join(_describe(feature) for feature in config.contextual_features) or "none")
    row("read-out", f"{config.readout}, norm {config.readout_norm}, MLP {_widths(config)}")
    row("tasks", ", ".join(f"{task.name} ({task.kind})" for task in config.tasks))
    row(
        "limits",
        f"{config.max_prefix_behaviours:,} prefix and {config.max_suffix_behaviours:,} suffix behaviours, "
        f"{config.max_candidates:,} candidates",
    )
    row("parameters", f"{checkpoint.num_parameters:,}, {checkpoint.weights_bytes / _MIB:,.1f} MiB")
    _add_kv(table, description_of(config))
    stdout_console().print(table)


def _ranker_as_json(model: RankerFolder) -> dict[str, object]:
    record, described = model.record, model.record.description()
    return {
        "revision": model.revision,
        "ranker": record.ranker,
        "version": record.version,
        "shape": asdict(record.shape),
        "files_bytes": model.files_bytes,
        "prefixes": asdict(record.rules),
        "kv_bytes_per_token": {dtype.value: described.geometry(1, dtype).bytes_per_token for dtype in KvDtype},
    }


def _print_ranker(model: RankerFolder, path: Path) -> None:
    record, shape = model.record, model.record.shape
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    states = f", {shape.state_dim} numbers of state" if shape.state_dim else ""
    per_behaviour = f"{shape.rows_per_behaviour} a behaviour, {shape.user_rows} for the user"
    for name, value in {
        "ranker": str(path),
        "class": record.ranker,
        "version": record.version,
        "revision": model.revision,
        "layers": f"{shape.layers} of {shape.heads} heads, k {shape.key_dim}, v {shape.value_dim}{states}",
        "rows": per_behaviour,
        "prefixes": f"{_rules(record.rules)}, as `relaygr model check` found",
        "items": f"{shape.num_items:,}",
        "actions": f"{shape.num_actions:,}" if shape.num_actions else "none",
        "features": ", ".join(f"{each:,} values" for each in shape.feature_cardinalities) or "none",
        "tasks": ", ".join(shape.tasks),
        "limits": f"{shape.max_history:,} prefix and {shape.max_suffix:,} suffix behaviours, "
        f"{shape.max_candidates:,} candidates",
        "files": f"{model.files_bytes / _MIB:,.1f} MiB",
    }.items():
        table.add_row(name, value)
    _add_kv(table, record.description())
    module = record.ranker.partition(":")[0]
    table.add_row("needs", f"code: worker.ranker_modules [{module}], for commands --ranker-module {module}")
    stdout_console().print(table)


def _add_kv(table: Table, described: Description) -> None:
    """A row for each element type."""
    for dtype in KvDtype:
        token_bytes = described.geometry(1, dtype).bytes_per_token
        longest = described.layout.tokens(described.limits.max_prefix_behaviours) * token_bytes
        table.add_row(
            f"K,V in {dtype}",
            f"{described.layout.tokens_per_behaviour * token_bytes:,} bytes a behaviour, longest prefix "
            f"{longest / _MIB:,.1f} MiB",
        )
