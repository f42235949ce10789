"""`relaygr model convert SOURCE OUT --from KIND`: converts a checkpoint of another implementation.

The command imports torch only when it runs, so that `--help` answers without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from relaygr.cli.texts import parse_pairs, parse_task, stdout_console
from relaygr.runtime.errors import RelayError
from relaygr.worker.model.config import CONFIG_FILE
from relaygr.worker.model.convert.options import ProjectionLayout, SourceKind, read_options
from relaygr.worker.model.options import ReadoutActivation

if TYPE_CHECKING:
    from relaygr.worker.model.convert.conversion import Converted
    from relaygr.worker.model.convert.mapping import ConversionReport

EXIT_INCOMPLETE = 1

_NONE = "none"


def convert_command(
    source: Annotated[
        Path, typer.Argument(help="A file with a state dict, or a folder as training saves it (docs/checkpoints.md).")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write: config.json and model.safetensors.")],
    kind: Annotated[SourceKind, typer.Option("--from", help="The implementation that saved the checkpoint.")],
    config: Annotated[
        Path | None, typer.Option(help="YAML or JSON file of these options, by name. The command line overrides it.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="File for the report about every tensor, as JSON.")] = None,
    allow_left_over: Annotated[
        bool, typer.Option("--allow-left-over", help="Write the checkpoint even if tensors are left over or missing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing checkpoint.")] = False,
    strip: Annotated[str, typer.Option(help="Prefix to remove from the name of each tensor.")] = "",
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads.")] = None,
    normalizer: Annotated[
        float | None,
        typer.Option(help="N: by which the source divides attention; Meta: the padded length of its batch."),
    ] = None,
    eps: Annotated[
        float | None, typer.Option(help="Epsilon of the layers' norms.", show_default="the source's own")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Scale of q.k.", show_default="the source's own")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:binary|:regression]", help="A column of the scores; repeat in order."),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=TOKENS]", help="A contextual feature; repeat in the source's order."),
    ] = None,
    hide_below: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TOKENS|none", help="Meta: hide this feature from sequences with fewer tokens."),
    ] = None,
    item_feature: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A feature of each item beside its id; repeat in order.")
    ] = None,
    item_values: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE.npy", help="The values of an item feature, one row for each item."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TABLE|FILE.npy", help="The embedding table of item, action or a feature."),
    ] = None,
    table_rows: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE=ROWS", help="Rows of a table that shares one tensor with others."),
    ] = None,
    items: Annotated[
        Path | None,
        typer.Option(help=".npy: the id of each row of the item table.", show_default="the number of the row"),
    ] = None,
    projection: Annotated[
        ProjectionLayout | None,
        typer.Option(help="The order of the joint projection's columns, if unclear from names."),
    ] = None,
    concatenated: Annotated[
        bool | None,
        typer.Option("--concatenated/--not-concatenated", help="Research: the output projection reads three blocks."),
    ] = None,
    contextual_mask: Annotated[
        bool | None,
        typer.Option("--contextual-mask/--no-contextual-mask", help="Contextual tokens see the whole history."),
    ] = None,
    max_attn_len: Annotated[int | None, typer.Option(min=0, help="Window of attention, places.")] = None,
    min_full_attn_len: Annotated[
        int | None, typer.Option(min=0, help="Rows within this many places of the end ignore the window.")
    ] = None,
    target_group_size: Annotated[
        int | None, typer.Option(min=1, help="Candidates in a group, which see each other.")
    ] = None,
    activation: Annotated[
        ReadoutActivation | None,
        typer.Option(help="The activation between the layers of the task MLP.", show_default="the source's own"),
    ] = None,
    action_weight: Annotated[
        list[int] | None, typer.Option(min=1, help="Meta: the bit of a kind of action, if no tensor holds it.")
    ] = None,
    pipeline: Annotated[
        Path | None,
        typer.Option(
            help="TorchEasyRec: its pipeline.config.", show_default="pipeline.config in SOURCE or in the folder above"
        ),
    ] = None,
    log_base: Annotated[
        float | None, typer.Option(help="Research: base of the bias by time.", show_default="0.301")
    ] = None,
    max_prefix: Annotated[
        int | None, typer.Option(min=8, help="Longest prefix, behaviours.", show_default="from N")
    ] = None,
    max_suffix: Annotated[
        int | None, typer.Option(min=0, help="Longest suffix, behaviours.", show_default="128")
    ] = None,
    max_candidates: Annotated[
        int | None, typer.Option(min=1, help="Most candidates of a request.", show_default="2048")
    ] = None,
) -> None:
    """Convert a checkpoint of Meta's DLRM-v3, NVIDIA's recsys-examples, the research model or TorchEasyRec."""
    if (out / CONFIG_FILE).exists() and not force:
        raise RelayError(f"{out} already contains a checkpoint: choose another folder, or give --force.")
    given: dict[str, Any] = {
        "heads": heads,
        "normalizer": normalizer,
        "eps": eps,
        "alpha": alpha,
        "tasks": [parse_task(text) for text in task or ()] or None,
        "features": _features(feature or [], hide_below or []) or None,
        "item_features": item_feature or None,
        "item_values": parse_pairs("--item-values", item_values) or None,
        "tables": parse_pairs("--table", table) or None,
        "table_rows": parse_pairs("--table-rows", table_rows) or None,
        "items": items,
        "projection": projection,
        "concatenated": concatenated,
        "contextual_mask": contextual_mask,
        "max_attn_len": max_attn_len,
        "min_full_attn_len": min_full_attn_len,
        "target_group_size": target_group_size,
        "activation": activation,
        "action_weights": action_weight or None,
        "pipeline": pipeline,
        "log_base": log_base,
        "max_prefix": max_prefix,
        "max_suffix": max_suffix,
        "max_candidates": max_candidates,
    }
    from relaygr.worker.model.convert.conversion import convert

    options = read_options(config, {name: value for name, value in given.items() if value is not None})
    # The first folder above OUT that exists: on the disk that has room for the result.
    scratch = next(folder for folder in out.absolute().parents if folder.is_dir())
    converted = convert(source, kind, options, strip, scratch)
    print_report(converted.report)
    if report is not None:
        _write_report(report, converted.report)
    if not converted.report.is_complete and not allow_left_over:
        raise typer.Exit(EXIT_INCOMPLETE)
    _save(out, converted)


def _save(out: Path, converted: Converted) -> None:
    from relaygr.worker.model.checkpoint import save_checkpoint

    saved = save_checkpoint(out, converted.config, converted.tensors)
    stdout_console().print(f"{out}: {saved.num_parameters:,} parameters, revision {saved.revision}")


def print_report(report: ConversionReport) -> None:
    """Prints a line for each tensor, then the notes of the report."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "from", "to", "shape", "how"):
        table.add_column(column, no_wrap=True)
    for mapped in report.mapped:
        shapes = _shape(mapped.shape)
        if mapped.source_shape and mapped.source_shape != mapped.shape:
            shapes = f"{_shape(mapped.source_shape)} to {shapes}"
        table.add_row("mapped", mapped.source, mapped.target, shapes, mapped.transform)
    for unused in report.unused:
        table.add_row("unused", unused.source, "", _shape(unused.shape), unused.why)
    for left in report.left_over:
        table.add_row(Text("left over", style="yellow"), left.source, "", _shape(left.shape), "not used")
    for missing in report.missing:
        looked = f"the source has no {missing.looked_for}"
        table.add_row(Text("missing", style="red"), "", missing.target, _shape(missing.shape), looked)
    # Each tensor is one line, however long it is; only the terminal may wrap it.
    console = stdout_console()
    console.print(table)
    for note in report.notes:
        console.print(f"note: {note}")
    console.print(
        f"{len(report.mapped)} mapped, {len(report.unused)} unused, "
        f"{len(report.left_over)} left over, {len(report.missing)} missing"
    )
    if not report.is_complete:
        console.print(
            "With --allow-left-over the checkpoint is written: missing weights of norms are ones, other tensors zeros."
        )


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)


def _write_report(path: Path, report: ConversionReport) -> None:
    try:
        path.write_text(report.to_json(), encoding="utf-8")
    except OSError as error:
        raise RelayError(f"{path} cannot be written: {error}.") from error


def _features(texts: list[str], hide_below: list[str]) -> list[dict[str, str]]:
    """The features, with their fewest tokens only if --hide-below was given for any, or `none`."""
    hidden_below = {} if hide_below == [_NONE] else parse_pairs("--hide-below", hide_below)
    features = []
    for text in texts:
        name, _, tokens = text.partition("=")
        if not name or (tokens and not tokens.isdecimal()):
            raise RelayError(f"--feature {text}: write NAME, or NAME=TOKENS, such as genre=3.")
        least = {"min_tokens": hidden_below.pop(name, "0")} if hide_below else {}
        features.append({"name": name, "tokens": tokens or "1", **least})
    if hidden_below:
        raise RelayError(f"--hide-below {next(iter(hidden_below))}: there is no such --feature.")
    return features
