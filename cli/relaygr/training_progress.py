"""The log that a training reads, and a line for each of its epochs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from relaygr.ingest.gather import Interactions, Limits
from relaygr.ingest.log_map import NO_MAP, LogMap
from relaygr.ingest.reading import joined, log_bytes, read_interactions
from relaygr.progress import Bars, progress_bars
from relaygr.training.logs import Log, Ties
from relaygr.training.options import Stage, TrainingOptions

if TYPE_CHECKING:
    from relaygr.training.trainer import EpochRecord


def read_training_log(paths: list[Path], max_bad_lines: int, console: Console, names: LogMap = NO_MAP) -> Log:
    """Reads the files as one log. Raises RelayError for a file that is no log, or has more bad lines than that."""
    parts: list[Interactions] = []
    for path in paths:
        with progress_bars() as bars:
            bars.began(f"reading {path.name}", log_bytes(path))
            parts.append(read_interactions(path, Limits(max_bad_lines=max_bad_lines), bars.reached, names))
        report = parts[-1].report
        console.print(
            f"{path.name}: {report.layout.kind}, {report.interactions:,} behaviours, {report.users:,} users, "
            f"{report.items:,} items, {len(report.bad_lines):,} bad lines"
        )
        for note in (note for note in report.notes if "repeat" in note):
            console.print(f"  {note}")
        for bad in report.bad_lines[:5]:
            console.print(f"  line {bad.number}: {bad.reason}")
    return training_log(parts)


def training_log(parts: Sequence[Interactions]) -> Log:
    """One log of these files, which are in the order of time.

    Its users are in the order of their ids, unless equal times are ordered as in the files: then the same rows give the
    same log, with the same digest, and the same model, whatever the files are sorted by.
    """
    layouts = [part.report.layout for part in parts]
    whole = joined(parts)
    users, lengths = whole.users, np.diff(whole.starts)
    order = np.arange(len(users))
    if layouts[0].map.ties is Ties.HASH:
        order = np.array(sorted(range(len(users)), key=users.__getitem__), np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths[order])))
    rows = np.arange(starts[-1]) + np.repeat(whole.starts[:-1][order] - starts[:-1], lengths[order])
    return Log(
        [users[place] for place in order],
        starts,
        whole.behaviours.items[rows],
        whole.behaviours.actions[rows],
        whole.behaviours.timestamps_ms[rows],
        has_times=all(layout.has_times for layout in layouts),
        has_ratings=all(layout.has_ratings for layout in layouts),
        columns=layouts[0].map.columns,
        action_names=layouts[0].map.actions,
        ties=layouts[0].map.ties,
    )


class EpochLines:
    """The epoch's bar with its loss, and a line for each epoch."""

    def __init__(self, bars: Bars, console: Console, options: TrainingOptions) -> None:
        self._bars, self._console, self._options = bars, console, options
        self._at: tuple[Stage, int] | None = None
        self._best: dict[Stage, float] = {}
        self._epoch_s = 0.0
        """Of the last one of the stage; 0: none has ended."""

    def step(self, stage: Stage, epoch: int, share: float, loss: float) -> None:
        if (stage, epoch) != self._at:
            self._bars.began("", 1)
            self._epoch_s = self._epoch_s if epoch else 0.0
            self._at = stage, epoch
        said = f"{stage}, epoch {epoch + 1} of {self._options.epochs_of(stage)}, loss {loss:.3f}"
        if stage in self._best:
            said += f", best validation NDCG@10 {self._best[stage]:.4f}"
        self._bars.share(share, said + self._left(stage, epoch))

    def _left(self, stage: Stage, epoch: int) -> str:
        """The longest that the stage may still take, by its last epoch."""
        if not self._epoch_s or self._options.max_minutes:
            return ""
        return f", at most {self._epoch_s * (self._options.epochs_of(stage) - epoch) / 60:.0f} min"

    def epoch_ended(self, record: EpochRecord) -> None:
        self._best[record.stage] = max(self._best.get(record.stage, 0.0), record.ndcg)
        self._epoch_s = record.seconds
        losses = f"retrieval {record.retrieval_loss:.4f}  liked {record.liked_loss:.4f}"
        if record.stage is Stage.CANDIDATES:
            losses += f"  next {record.next_loss:.4f}"
        self._console.print(
            f"{record.stage:10} {record.epoch + 1:3}  {losses}  validation NDCG@10 {record.ndcg:.4f}  "
            f"{record.seconds:.0f} s"
        )
