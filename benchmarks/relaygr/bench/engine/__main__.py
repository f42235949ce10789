"""`python -m benchmarks.engine`: pre-infer, append, ranking on a cached prefix and full inference on this device.

All variants of a shape run in turn in each round. A large matrix product, measured in the same rounds, is the peak for
comparison. Passes are timed in the same way as in a calibration (`relaygr.worker.measuring`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from relaygr.progress import progress_bars
from relaygr.runtime.errors import RelayError

T = TypeVar("T")

HERE = Path("benchmarks/results/engine")
SHAPE_NAMES = ("tiny", "small", "dlrm-v3", "nvidia")


def main(
    shapes: Annotated[str, typer.Option(help=f"Shapes, comma-separated: {', '.join(SHAPE_NAMES)}.")] = "small,dlrm-v3",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, npu.", show_default="the accelerator, else cpu")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    dtypes: Annotated[
        str, typer.Option(help="Element types of products and K,V; the first is the base of comparison.")
    ] = ("float32,bfloat16"),
    prefixes: Annotated[str, typer.Option(help="Lengths of prefixes, tokens.")] = "512,1024,2048,4096",
    candidates: Annotated[str, typer.Option(help="Candidates of a request.")] = "128,512",
    appends: Annotated[str, typer.Option(help="New tokens on the longest prefix.")] = "16,64,256",
    batches: Annotated[str, typer.Option(help="Requests of one forward, on the longest prefix.")] = "4",
    graphs: Annotated[bool, typer.Option(help="Measure each variant with captured graphs, too.")] = False,
    simple: Annotated[
        bool, typer.Option(help="Measure the same weights as a ranker in the simple form, too (CPU, float32).")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to measure.")] = 5,
    out: Annotated[Path, typer.Option(help="CSV file to append to.")] = HERE / "results.csv",
    plots: Annotated[Path, typer.Option(help="Folder for plots.")] = HERE,
) -> None:
    """Measure pre-infer, append, ranking on a cached prefix and full inference on one device."""
    from relaygr.bench.engine.report import plot, print_tables
    from relaygr.bench.engine.run import EngineVariant, Figure, SideBySide, Sizes
    from relaygr.bench.engine.shapes import SHAPES
    from relaygr.bench.rows import append_rows, refuse_other_columns
    from relaygr.worker.device import open_device, set_threads
    from relaygr.worker.kv import KvDtype
    from relaygr.worker.model.options import ComputeDtype
    from relaygr.worker.score_error import TOP_K

    element_types = {
        "float32": (ComputeDtype.FLOAT32, KvDtype.FLOAT32),
        "bfloat16": (ComputeDtype.BFLOAT16, KvDtype.BFLOAT16),
        "int8": (ComputeDtype.INT8, KvDtype.FLOAT32),
        "float32-kv-int8": (ComputeDtype.FLOAT32, KvDtype.INT8),
        "bfloat16-kv-int8": (ComputeDtype.BFLOAT16, KvDtype.INT8),
        "bfloat16-kv-float8": (ComputeDtype.BFLOAT16, KvDtype.FLOAT8),
    }
    console = Console(highlight=False)
    refuse_other_columns(out, [field.name for field in fields(Figure)])
    set_threads(threads)
    opened = open_device(device)
    console.print(f"device: {opened.name} ({opened.description}), {threads} threads", soft_wrap=True)
    sizes = Sizes(_numbers(prefixes), _numbers(candidates), _numbers(appends), _numbers(batches))
    variants = [
        EngineVariant(*_named(element_types, name), from_graphs)
        for name in dtypes.split(",")
        for from_graphs in ((False, True) if graphs else (False,))
    ]
    if simple:
        if not opened.is_cpu:
            raise RelayError("--simple is measured on a CPU: add --device cpu.")
        variants.append(EngineVariant(ComputeDtype.FLOAT32, KvDtype.FLOAT32, simple=True))
    for shape in shapes.split(","):
        _named(SHAPES, shape)
        bench = SideBySide(shape, variants, sizes, opened)
        with progress_bars() as bars:
            bars.began(shape, (rounds + 1) * len(variants))
            bench.run(rounds, lambda _, bars=bars: bars.stepped())  # type: ignore[misc]
        figures = bench.figures()
        print_tables(console, figures)
        for name, error in bench.errors().items():
            console.print(
                f"{name}: scores change by at most {error.max_score_error:.2%} of the largest, on average by "
                f"{error.mean_score_error:.3%}; {error.topk_overlap:.0%} of the top {TOP_K} stay",
                soft_wrap=True,
            )
        append_rows(out, [asdict(figure) for figure in figures])
        picture = plots / f"{shape}-{opened.torch_device.type}.png"
        plot(figures, picture)
        console.print(f"appended to {out}; plotted in {picture}", soft_wrap=True)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError as error:
        raise RelayError(f"{text!r} is not a list of integers such as 512,2048.") from error


def _named(known: Mapping[str, T], name: str) -> T:
    if name not in known:
        raise RelayError(f"{name!r} is unknown; there are {', '.join(known)}.")
    return known[name]


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
