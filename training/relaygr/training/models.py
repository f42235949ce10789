"""A trained ranker as models that are judged: its tasks, its retrieval, and both as they are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.training.layers import Tensors
from relaygr.training.ranker import LIKED, NEXT, score_items, search_row
from relaygr.training.ranking import Model, candidates_of
from relaygr.training.sampling import FOUND
from relaygr.training.sequence_loss import cosines
from relaygr.training.splits import Part, Split
from relaygr.worker.model.config import ModelConfig

RANKER: Final = "ranker"
RETRIEVAL: Final = "retrieval"
CASCADE: Final = "cascade"


@dataclass(frozen=True, slots=True)
class RankerModel:
    """Scores by the tasks of a ranker that is served at most the newest `most` behaviours; 0: all that it may have."""

    split: Split
    config: ModelConfig
    tensors: Tensors
    most: int = 0

    def next_scores(self, user: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
        return self._logits(user, part, rows)[:, NEXT]

    def liked_probabilities(self, user: int, part: Part) -> torch.Tensor | None:
        if not self.split.has_liked:
            return None
        asked = torch.from_numpy(self.split.rows[self.split.targets(user, part)].astype(np.int64))
        return torch.sigmoid(self._logits(user, part, asked)[:, LIKED])

    def _logits(self, user: int, part: Part, asked: torch.Tensor) -> torch.Tensor:
        served = _served(self.split, user, part, self.most)
        return score_items(self.config, self.tensors, self.split.rows[served], self.split.actions[served], asked)


@dataclass(frozen=True, slots=True)
class RetrievalModel:
    """Scores by the retrieval of a ranker, the cosine of an unknown candidate's row and the item. `most` as there."""

    split: Split
    config: ModelConfig
    tensors: Tensors
    most: int = 0

    def next_scores(self, user: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
        served = _served(self.split, user, part, self.most)
        row = search_row(self.config, self.tensors, self.split.rows[served], self.split.actions[served])
        return cosines(row, self.tensors["items.weight"][rows])

    def liked_probabilities(self, user: int, part: Part) -> torch.Tensor | None:  # noqa: ARG002 - of the protocol
        return None


@dataclass(frozen=True, slots=True)
class CascadeModel:
    """What is served: of the candidates the best of `retrieval`, ordered by `ranker`, and below them the others."""

    retrieval: Model
    ranker: Model
    found: int = FOUND

    def next_scores(self, user: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
        scores = self.retrieval.next_scores(user, part, rows)
        if not len(rows):
            return scores
        best = torch.topk(scores, min(self.found, len(rows))).indices
        ranked = self.ranker.next_scores(user, part, rows[best])
        below = ranked.min() - 1 + scores - scores.max()
        return below.scatter(0, best, ranked)

    def liked_probabilities(self, user: int, part: Part) -> torch.Tensor | None:
        return self.ranker.liked_probabilities(user, part)


def _served(split: Split, user: int, part: Part, most: int) -> slice:
    """The places in the split of a history."""
    start, end = int(split.starts[user]), split.history_end(user, part)
    return slice(max(start, end - most) if most else start, end)


def found_share(split: Split, model: Model, users: NDArray[np.int64], on_user: Callable[[], None]) -> float:
    """The mean over users of the share of their validation items that are among the `FOUND` best of the candidates."""
    shares = []
    for user in users.tolist():
        held_out = np.unique(split.rows[split.targets(user, Part.VALIDATION)])
        candidates = torch.from_numpy(candidates_of(split, user, Part.VALIDATION))
        scores = model.next_scores(user, Part.VALIDATION, candidates)
        best = candidates[torch.topk(scores, min(FOUND, len(candidates))).indices]
        shares.append(np.isin(held_out, best.numpy()).mean())
        on_user()
    return float(np.mean(shares))
