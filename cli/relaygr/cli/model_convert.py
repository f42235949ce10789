"""`relaygr model convert SOURCE OUT --from KIND`: converts a checkpoint of another implementation.

The command imports torch only when it runs, so that `--help` answers without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from relaygr.cli.options import require_writable, takes
from relaygr.cli.texts import stdout_console
from relaygr.runtime.errors import RelayError
from relaygr.worker.model.config import CONFIG_FILE
from relaygr.worker.model.convert.options import ConvertOptions, SourceKind, read_options

if TYPE_CHECKING:
    from relaygr.worker.model.convert.conversion import Converted
    from relaygr.worker.model.convert.mapping import ConversionReport

EXIT_INCOMPLETE = 1


@takes(ConvertOptions)
def convert_command(
    source: Annotated[
        Path, typer.Argument(help="A file with a state dict, or a folder as training saves it (docs/checkpoints.md).")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write: config.json and model.safetensors.")],
    kind: Annotated[SourceKind, typer.Option("--from", help="The implementation that saved the checkpoint.")],
    config: Annotated[
        Path | None, typer.Option(help="YAML or JSON file of these options, by name. The command line overrides it.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="One of these options, as in the file; may be repeated."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="File for the report about every tensor, as JSON.")] = None,
    allow_left_over: Annotated[
        bool, typer.Option("--allow-left-over", help="Write the checkpoint even if tensors are left over or missing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing checkpoint.")] = False,
    strip: Annotated[str, typer.Option(help="Prefix to remove from the name of each tensor.")] = "",
    **given: Any,
) -> None:
    """Convert a checkpoint of Meta's DLRM-v3, NVIDIA's recsys-examples, the research model or TorchEasyRec."""
    if (out / CONFIG_FILE).exists() and not force:
        raise RelayError(f"{out} already contains a checkpoint: choose another folder, or give --force.")
    if report is not None:
        require_writable("--report", report)
    from relaygr.worker.model.convert.conversion import convert

    options = read_options(config, option or (), {name: value for name, value in given.items() if value is not None})
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
