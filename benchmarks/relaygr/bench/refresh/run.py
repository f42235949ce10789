"""Ranks the users of a log's test part with K,V of the same weights and of earlier ones. See `__main__`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.training.ranker import NEXT
from relaygr.training.ranking import NDCG, Estimate, estimate, judge
from relaygr.training.splits import Part, Split
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
