"""What K,V of the weights before a refresh are worth: `python -m benchmarks.refresh LOG --before DIR --after DIR`.

    fresh   K,V and scores by the new weights: what a worker does, since the key of a prefix names the weights
    mixed   K,V by the old weights, scores by the new ones: what a worker would do that kept its cache
    old     K,V and scores by the old weights: no refresh

Both checkpoints are of one training, an earlier and a later one. Users, histories, held-out behaviours and candidates
are those of the log's test part, as `relaygr train` judges them, by the worker's engine in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from relaygr.cli.texts import figures_table, plain_console, stdout_console
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.training.logs import usable
from relaygr.training.ranker import NEXT
from relaygr.training.ranking import NDCG, Estimate, chosen_users, estimate, judge
from relaygr.training.splits import Part, Protocol, Split, split_log
from relaygr.training_progress import progress_bars, read_training_log
from relaygr.worker.device import open_device
from relaygr.worker.kv import KvDtype
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.checkpoint import load_checkpoint
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.interface import Engine, PrefixChunk
from relaygr.worker.model.options import DEFAULT_PAGE_TOKENS

TOP = 10
_CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Refresh:
    """NDCG@10 of the three ways, their differences in pairs of the same user, and how far mixed scores are off."""

    after: str
    users: int
    fresh: Estimate
    mixed: Estimate
    old: Estimate
    gained: Estimate
    """Fresh less old: what the refresh brings."""
    lost: Estimate
    """Fresh less mixed: what old K,V take away from it."""
    mean_error: float
    """The largest difference of mixed and fresh scores as a share of the spread of the fresh ones, mean over users."""
    overlap: float
    """The mean share of the 10 best candidates by fresh scores that are among the 10 best by mixed ones."""


@dataclass
class Served:
    """Two engines with one arena, judged as one model: the first computes K,V, the second ranks."""

    split: Split
    prefixes: Engine
    ranks: Engine
    pages: NDArray[np.int32]
    scores: dict[int, torch.Tensor] = field(default_factory=dict)
    """By user."""

    def next_scores(self, user: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows]: logits of the next item after the user's whole history."""
        limits = self.ranks.limits
        end = self.split.history_end(user, part)
        kept = slice(max(int(self.split.starts[user]), end - limits.max_prefix_behaviours), end)
        times = np.arange(end - kept.start, dtype="<i8")
        history = Behaviours(self.split.behaviour_ids[kept], self.split.actions[kept], times)
        inputs = self.prefixes.prefix_inputs(np.empty(0, "<i8"), history, 0)
        for start in range(0, inputs.tokens, _CHUNK_TOKENS):
            chunk = PrefixChunk(inputs, start, min(start + _CHUNK_TOKENS, inputs.tokens), self.pages)
            self.prefixes.pre_infer(chunk)
        found = []
        for part_of_rows in torch.split(rows, limits.max_candidates):
            asked = self.ranks.rank_inputs(
                inputs.tokens, self.pages, Behaviours.empty(), self.split.item_ids[part_of_rows.numpy()], 0, times
            )
            found.append(torch.from_numpy(self.ranks.rank([asked])[0].scores[:, NEXT].copy()))
        self.scores[user] = torch.cat(found)
        return self.scores[user]

    def liked_probabilities(self, user: int, part: Part) -> None:
        """Not judged."""


def compare(split: Split, before: Path, after: Path, users: NDArray[np.int64], stepped: Callable[[], None]) -> Refresh:
    """Judges the three ways on these users. Raises RelayError for checkpoints that are not of one training."""
    checkpoints = [load_checkpoint(folder) for folder in (before, after)]
    if checkpoints[0].config != checkpoints[1].config:
        raise RelayError(f"{before} and {after} have other configurations: give two checkpoints of one training.")
    device = open_device("cpu")
    old, new = (build_engine(each, device, KvDtype.FLOAT32, DEFAULT_PAGE_TOKENS) for each in checkpoints)
    arena = bind_own_arena(old)
    new.bind(arena)
    pages = np.arange(arena.shape[0], dtype=np.int32)
    ways = [Served(split, first, second, pages) for first, second in ((new, new), (old, new), (old, old))]
    fresh, mixed, kept = (judge(split, way, Part.TEST, users, on_user=stepped).values[NDCG] for way in ways)
    errors, overlaps = [], []
    for user, exact in ways[0].scores.items():
        inexact = ways[1].scores[user]
        errors.append(float((inexact - exact).abs().max() / (exact.max() - exact.min())))
        best = (set(each.topk(min(TOP, len(each))).indices.tolist()) for each in (exact, inexact))
        overlaps.append(len(set.intersection(*best)) / min(TOP, len(exact)))
    return Refresh(
        after=str(after),
        users=len(users),
        fresh=estimate(fresh),
        mixed=estimate(mixed),
        old=estimate(kept),
        gained=estimate(fresh - kept),
        lost=estimate(fresh - mixed),
        mean_error=float(np.mean(errors)),
        overlap=float(np.mean(overlaps)),
    )


def main(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="The log of the training.")],
    before: Annotated[Path, typer.Option(help="The checkpoint before the refresh.")],
    after: Annotated[list[Path], typer.Option(help="A later checkpoint. May be repeated.")],
    users: Annotated[int, typer.Option(min=2, help="Users to judge.")] = 300,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file, as a list.")] = None,
) -> None:
    """Measure what scores on K,V of the previous weights lose after a refresh."""
    split = split_log(usable(read_training_log(logs, 100, plain_console(stderr=True))), Protocol.TIME)
    chosen = chosen_users(split, users, 0)
    with progress_bars() as bars:
        bars.began("ranking", 3 * len(chosen) * len(after))
        rows = [compare(split, before, each, chosen, bars.stepped) for each in after]
    table = figures_table(
        "NDCG@10 after a refresh of the weights",
        *("after", "fresh", "K,V before", "no refresh", "refresh gains", "K,V before lose", "error", "top 10 kept"),
    )
    for row in rows:
        table.add_row(
            Path(row.after).name,
            *(f"{each.mean:.4f}" for each in (row.fresh, row.mixed, row.old)),
            *(each.with_interval() for each in (row.gained, row.lost)),
            *(f"{share:.1%}" for share in (row.mean_error, row.overlap)),
        )
    stdout_console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
