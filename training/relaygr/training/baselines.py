"""Baselines on the same split: popularity, iALS and item neighbours (library `implicit`).

Each learns from the training part only. A fold of the grid is chosen by NDCG@10 on the validation part, for the same
users as the ranker's. For the test a user's vector is computed from training and validation part, as the ranker's
history is.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from implicit.cpu.als import AlternatingLeastSquares
from implicit.nearest_neighbours import BM25Recommender, CosineRecommender
from implicit.utils import ParameterWarning
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from threadpoolctl import threadpool_limits

from relaygr.training.ranking import NDCG, Model, judge
from relaygr.training.splits import Part, Split

IALS_FACTORS: Final = (32, 96)
IALS_REGULARIZATION: Final = (0.01, 0.1)
IALS_ALPHA: Final = (1.0, 8.0)
"""How much more a behaviour weighs than an item without one."""
IALS_ITERATIONS: Final = 15
NEIGHBOURS: Final = (50, 200)
"""Neighbours kept of each item, which bound the memory."""


class _Histories:
    """The users' items as a sparse matrix [users, vocabulary] for each part's history; each item counts once."""

    def __init__(self, split: Split) -> None:
        self._of = {part: self._matrix(split, part) for part in Part}

    def __getitem__(self, part: Part) -> csr_matrix:
        return self._of[part]

    @staticmethod
    def _matrix(split: Split, part: Part) -> csr_matrix:
        ends = split.train_ends if part is Part.VALIDATION else split.validation_ends
        lengths = np.diff(split.starts)
        kept = (np.arange(len(split.rows)) < np.repeat(ends, lengths)) & (split.rows < split.num_items)
        owners = np.repeat(np.arange(len(lengths)), lengths)[kept]
        shape = (len(split.users), split.num_items)
        found = csr_matrix((np.ones(owners.size, dtype=np.float32), (owners, split.rows[kept])), shape=shape)
        found.data[:] = 1.0
        return found


@dataclass(frozen=True, slots=True)
class _Scored:
    """A baseline by one user's scores of the whole vocabulary."""

    scores: Callable[[int, Part], NDArray[np.float32]]

    def next_scores(self, user: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.scores(user, part), dtype=np.float32))[rows]

    def liked_probabilities(self, user: int, part: Part) -> torch.Tensor | None:  # noqa: ARG002 - of the protocol
        return None


@dataclass(frozen=True, slots=True)
class Baseline:
    """A fitted baseline, its parameters, and the validation NDCG@10 of each fold of its grid."""

    name: str
    model: Model
    parameters: dict[str, object]
    folds: list[dict[str, object]]


def popularity(split: Split) -> Baseline:
    """Items by their number of behaviours in the training part."""
    rows = split.rows[split.training_places()]
    counts = np.bincount(rows, minlength=split.num_items).astype(np.float32)
    return Baseline("popularity", _Scored(lambda user, part: counts), {}, [])  # noqa: ARG005 - of the protocol


def fitted_baselines(
    split: Split, users: NDArray[np.int64], seed: int, threads: int, on_fold: Callable[[], None] = lambda: None
) -> Iterator[Baseline]:
    """All baselines, the best fold of each on the validation part of these users."""
    yield popularity(split)
    histories = _Histories(split)
    kinds: dict[str, Iterator[tuple[Model, dict[str, object]]]] = {
        "ials": _ials(histories, seed, threads),
        "item neighbours": _neighbours(histories, threads),
    }
    for name, fits in kinds.items():
        folds: list[dict[str, object]] = []
        best: tuple[float, Model, dict[str, object]] | None = None
        for model, parameters in fits:
            ndcg = judge(split, model, Part.VALIDATION, users).summary()[NDCG].mean
            folds.append({**parameters, f"validation {NDCG}": ndcg})
            on_fold()
            if best is None or ndcg > best[0]:
                best = ndcg, model, parameters
        assert best is not None
        yield Baseline(name, best[1], best[2], folds)


def folds_count() -> int:
    """The number of fits of `fitted_baselines`."""
    return len(IALS_FACTORS) * len(IALS_REGULARIZATION) * len(IALS_ALPHA) + 2 * len(NEIGHBOURS)


def _ials(histories: _Histories, seed: int, threads: int) -> Iterator[tuple[Model, dict[str, object]]]:
    """ "Collaborative Filtering for Implicit Feedback Datasets" (Hu, Koren, Volinsky 2008)."""
    for factors, regularization, alpha in itertools.product(IALS_FACTORS, IALS_REGULARIZATION, IALS_ALPHA):
        # The library's threads and those of the linear algebra below them slow each other down.
        with threadpool_limits(1, "blas"):
            model = AlternatingLeastSquares(
                factors=factors,
                regularization=regularization,
                alpha=alpha,
                iterations=IALS_ITERATIONS,
                num_threads=threads,
                random_state=seed,
            )
            model.fit(histories[Part.VALIDATION], show_progress=False)

        def scores(user: int, part: Part, model: AlternatingLeastSquares = model) -> NDArray[np.float32]:
            with threadpool_limits(1, "blas"):
                own = model.recalculate_user(user, histories[part][user])
            found: NDArray[np.float32] = model.item_factors @ np.ravel(own)
            return found

        yield _Scored(scores), {"factors": factors, "regularization": regularization, "alpha": alpha}


def _neighbours(histories: _Histories, threads: int) -> Iterator[tuple[Model, dict[str, object]]]:
    """Items by the sum of their similarities to those of the history."""
    for weighting, neighbours in itertools.product((CosineRecommender, BM25Recommender), NEIGHBOURS):
        model = weighting(K=neighbours, num_threads=threads)
        with warnings.catch_warnings():
            # The library converts its own intermediate matrix, and warns of it.
            warnings.simplefilter("ignore", ParameterWarning)
            model.fit(histories[Part.VALIDATION], show_progress=False)
        similarity = model.similarity.tocsr()

        def scores(user: int, part: Part, similarity: csr_matrix = similarity) -> NDArray[np.float32]:
            found: NDArray[np.float32] = np.ravel((histories[part][user] @ similarity).todense())
            return found

        name = "cosine" if weighting is CosineRecommender else "bm25"
        yield _Scored(scores), {"weighting": name, "neighbours": neighbours}
