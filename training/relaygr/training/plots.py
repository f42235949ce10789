"""The plots of runs, as PNG or SVG by the name of the file.

A plot that cannot be drawn is a sentence and no error: it must not end the training whose result it shows. matplotlib
is imported only here, since it needs a folder for its cache, and a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relaygr.runtime.errors import RelayError
from relaygr.training.options import Stage
from relaygr.training.runs import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from relaygr.training.lengths import LengthPoint
    from relaygr.training.post_training import Validation
    from relaygr.training.trainer import EpochRecord


def plot_training(path: Path, epochs: Sequence[EpochRecord]) -> str:
    """The losses and the validation NDCG@10 of each epoch. Returns why there is no plot; empty: it was drawn."""
    return _drawn(path, (9, 3.6), lambda figure: _training(figure, epochs))


def _training(figure: Figure, epochs: Sequence[EpochRecord]) -> None:
    left, right = figure.subplots(1, 2)
    for name in ("retrieval_loss", "next_loss", "liked_loss"):
        # Sequences train retrieval alone.
        at = [number for number, record in enumerate(epochs, 1) if getattr(record, name)]
        left.plot(at, [getattr(epochs[number - 1], name) for number in at], label=name.replace("_", " "))
    left.legend()
    for stage, said in ((Stage.SEQUENCE, "retrieval"), (Stage.CANDIDATES, "what it finds, by `next`")):
        at = [number for number, record in enumerate(epochs, 1) if record.stage is stage]
        right.plot(at, [epochs[number - 1].ndcg for number in at], marker="o", markersize=3, label=said)
    right.set_ylabel("validation NDCG@10")
    right.set_ylim(bottom=0)
    right.legend()
    for axes in (left, right):
        axes.set_xlabel("epoch")


def plot_lengths(path: Path, points: Sequence[LengthPoint], title: str) -> str:
    """NDCG@10 with its interval, T_full and T_hit, by the number of behaviours served. Returns why there is none."""
    return _drawn(path, (9, 3.8), lambda figure: _lengths(figure, points, title))


def _lengths(figure: Figure, points: Sequence[LengthPoint], title: str) -> None:
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    lengths = [point.length for point in points]
    ndcg = [point.metrics["ndcg@10"] for point in points]
    errors = [[each.mean - each.low for each in ndcg], [each.high - each.mean for each in ndcg]]
    left.errorbar(lengths, [each.mean for each in ndcg], yerr=errors, marker="o", markersize=4, capsize=3)
    left.set_ylabel("NDCG@10, 95 % interval")
    right.plot(lengths, [point.full_ms for point in points], marker="o", markersize=4, label="T_full")
    right.plot(lengths, [point.hit_ms for point in points], marker="o", markersize=4, label="T_hit")
    right.set_ylabel("median, ms")
    right.set_ylim(bottom=0)
    right.legend()
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45)
        axes.set_xlabel("newest behaviours served")


def plot_post_training(path: Path, arms: Mapping[str, Sequence[Sequence[Validation]]]) -> str:
    """Validation NDCG@10 by the CPU time of training: a line for each seed of each arm. Returns why there is none."""
    return _drawn(path, (7, 3.8), lambda figure: _post_training(figure, arms))


def _post_training(figure: Figure, arms: Mapping[str, Sequence[Sequence[Validation]]]) -> None:
    axes = figure.subplots()
    for number, (arm, seeds) in enumerate(arms.items()):
        for seed, validations in enumerate(seeds):
            at, ndcg = [each.cpu_s for each in validations], [each.ndcg for each in validations]
            axes.plot(at, ndcg, color=f"C{number}", marker="o", markersize=3, label=None if seed else arm)
    axes.set_xlabel("CPU seconds of training")
    axes.set_ylabel("validation NDCG@10")
    axes.legend()


def _drawn(path: Path, size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    try:
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        with writing(path) as partial:
            figure.savefig(partial, dpi=120, format=path.suffix.removeprefix("."))
    # matplotlib raises OSError where its cache cannot be written.
    except (OSError, ValueError, RelayError) as error:
        return f"{path} was not drawn: {str(error).rstrip('.')}."
    return ""
