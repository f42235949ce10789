"""Logs with a known structure, for tests of training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from relaygr.training.logs import Log
from relaygr.training.options import Stage, TrainingOptions
from relaygr.training.runs import Run
from relaygr.training.splits import Split

QUICK = TrainingOptions(
    dim=16, epochs=3, candidate_epochs=2, places=8, negatives=15, dropout=0.1, validation_users=0, threads=1,
    max_history=64, seed=3,
)  # fmt: skip


def cyclic_log(users: int = 60, length: int = 40, items: int = 60, seed: int = 0, rated: bool = True) -> Log:
    """Each user keeps to one of six groups of items, nearly always takes the next of the group, and likes even items.

    The most popular items are those of other users, so popularity is a bad guess. Lengths differ by up to a half.
    """
    random = np.random.default_rng(seed)
    group = items // 6
    rows, lengths = [], []
    for user in range(users):
        count = int(random.integers(length // 2, length + 1))
        first = group * int(random.integers(6))
        at = int(random.integers(group))
        for _ in range(count):
            rows.append(100 + first + at)
            at = (at + 1) % group if random.random() < 0.9 else int(random.integers(group))
        lengths.append(count)
        _ = user
    item_ids = np.array(rows, dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    actions = np.where(item_ids % 2 == 0, 10, 4).astype(np.uint16) if rated else np.zeros(len(rows), np.uint16)
    times = np.concatenate([1_600_000_000_000 + 60_000 * np.arange(count) for count in lengths]).astype(np.int64)
    return Log([f"u{user}" for user in range(users)], starts, item_ids, actions, times, True, rated)


def with_test_behaviours(log: Log, split: Split, items: np.ndarray) -> Log:
    """The log with other items in the test part."""
    changed = log.items.copy()
    for user in range(len(split.users)):
        part = slice(int(split.validation_ends[user]), int(split.starts[user + 1]))
        changed[part] = items[part]
    return replace(log, items=changed, actions=np.where(changed == log.items, log.actions, 2).astype(np.uint16))


def write_inter(path: Path, log: Log) -> Path:
    """The log in RecBole's layout."""
    owners = np.repeat(log.users, log.lengths)
    with path.open("w", encoding="utf-8") as file:
        file.write("user_id:token\titem_id:token\trating:float\ttimestamp:float\n")
        for user, item, action, time_ms in zip(owners, log.items, log.actions, log.times_ms, strict=True):
            file.write(f"{user}\t{item}\t{action / 2:g}\t{time_ms // 1000}\n")
    return path


class Recorder:
    """A watcher that may stop the training after some epochs, as a killed process would."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.epochs: list[tuple[Stage, int]] = []
        self.losses: list[float] = []

    def step(self, stage: Stage, epoch: int, share: float, loss: float) -> None:
        self.losses.append(loss)
        if self.stop_after is not None and len(self.epochs) >= self.stop_after and share > 0.5:
            raise KeyboardInterrupt

    def epoch_ended(self, record) -> None:  # type: ignore[no-untyped-def]
        self.epochs.append((record.stage, record.epoch))


def revision_of(run: Run) -> str:
    """Of the run's checkpoint."""
    from relaygr.worker.model.checkpoint import load_checkpoint

    return load_checkpoint(run.checkpoint).revision
