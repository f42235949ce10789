"""Baselines on the same split: popularity, iALS and item neighbours (library `implicit`).

Each learns from the training part only. Parameters are chosen by NDCG@10 on the validation part, for the same users as
the ranker's. For the test a user's vector is computed from training and validation part, as the ranker's history is.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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

POPULARITY: Final = "popularity"
IALS: Final = "ials"
NEIGHBOURS: Final = "item neighbours"
IALS_ITERATIONS: Final = 15
_WEIGHTINGS: Final = {"cosine": CosineRecommender, "bm25": BM25Recommender}
GRIDS: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    # `alpha`: how much more a behaviour weighs than an item without one.
    IALS: [
        {"factors": factors, "regularization": regularization, "alpha": alpha}
        for factors, regularization, alpha in itertools.product((32, 96), (0.01, 0.1), (1.0, 8.0))
    ],
    # `neighbours` of each item are kept, which bounds the memory.
    NEIGHBOURS: [
        {"weighting": weighting, "neighbours": neighbours}
        for weighting, neighbours in itertools.product(_WEIGHTINGS, (50, 200))
    ],
}
Scores = Callable[[csr_matrix], NDArray[np.float32]]
"""The items of one history [1, vocabulary] -> a score of each item of the vocabulary, higher is better."""


def items_matrix(rows: NDArray[np.int32], owners: NDArray[np.int64], shape: tuple[int, int]) -> csr_matrix:
    """[users, vocabulary]: 1 for each item that a user had. `rows` [behaviours] of the vocabulary and their users; rows
    outside the vocabulary are left out.
    """
    kept = rows < shape[1]
    found = csr_matrix((np.ones(int(kept.sum()), dtype=np.float32), (owners[kept], rows[kept])), shape=shape)
    found.data[:] = 1.0
    return found


def histories(split: Split, part: Part) -> csr_matrix:
    """The items of each user's history that predicts this part, as `items_matrix`."""
    ends = split.train_ends if part is Part.VALIDATION else split.validation_ends
    lengths = np.diff(split.starts)
    kept = np.arange(len(split.rows)) < np.repeat(ends, lengths)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    return items_matrix(split.rows[kept], owners[kept], (len(lengths), split.num_items))


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
    """A fitted baseline, its parameters, and the validation NDCG@10 of each of its grid."""

    name: str
    model: Model
    parameters: Mapping[str, Any]
    folds: list[dict[str, Any]]


def popularity(split: Split) -> Baseline:
    """Items by their number of behaviours in the training part."""
    rows = split.rows[split.training_places()]
    counts = np.bincount(rows, minlength=split.num_items).astype(np.float32)
    return Baseline(POPULARITY, _Scored(lambda user, part: counts), {}, [])  # noqa: ARG005 - of the protocol


def fitted_baselines(
    split: Split, users: NDArray[np.int64], seed: int, threads: int, on_fold: Callable[[], None] = lambda: None
) -> Iterator[Baseline]:
    """All baselines, with the parameters that are best on the validation part of these users."""
    yield popularity(split)
    of_part = {part: histories(split, part) for part in Part}
    for name, grid in GRIDS.items():
        folds: list[dict[str, Any]] = []
        best: tuple[float, Model, Mapping[str, Any]] | None = None
        for parameters in grid:
            scores = fit(name, of_part[Part.VALIDATION], parameters, seed, threads)
            model = _Scored(lambda user, part, scores=scores: scores(of_part[part][user]))  # type: ignore[misc]
            ndcg = judge(split, model, Part.VALIDATION, users).summary()[NDCG].mean
            folds.append({**parameters, f"validation {NDCG}": ndcg})
            on_fold()
            if best is None or ndcg > best[0]:
                best = ndcg, model, parameters
        assert best is not None
        yield Baseline(name, best[1], best[2], folds)


def folds_count() -> int:
    """The number of fits of `fitted_baselines`."""
    return sum(len(grid) for grid in GRIDS.values())


def fit(name: str, trained_on: csr_matrix, parameters: Mapping[str, Any], seed: int, threads: int) -> Scores:
    """Fits iALS or item neighbours to histories [users, vocabulary]."""
    return (_ials if name == IALS else _neighbours)(trained_on, parameters, seed, threads)


def _ials(trained_on: csr_matrix, parameters: Mapping[str, Any], seed: int, threads: int) -> Scores:
    """ "Collaborative Filtering for Implicit Feedback Datasets" (Hu, Koren, Volinsky 2008)."""
    # The library's threads and those of the linear algebra below them slow each other down.
    with threadpool_limits(1, "blas"):
        model = AlternatingLeastSquares(
            **parameters, iterations=IALS_ITERATIONS, num_threads=threads, random_state=seed
        )
        model.fit(trained_on, show_progress=False)

    def scores(history: csr_matrix) -> NDArray[np.float32]:
        with threadpool_limits(1, "blas"):
            own = model.recalculate_user(0, history)
        found: NDArray[np.float32] = model.item_factors @ np.ravel(own)
        return found

    return scores


def _neighbours(trained_on: csr_matrix, parameters: Mapping[str, Any], seed: int, threads: int) -> Scores:  # noqa: ARG001 - nothing is random
    """Items by the sum of their similarities to those of the history."""
    model = _WEIGHTINGS[parameters["weighting"]](K=parameters["neighbours"], num_threads=threads)
    with warnings.catch_warnings():
        # The library converts its own intermediate matrix, and warns of it.
        warnings.simplefilter("ignore", ParameterWarning)
        model.fit(trained_on, show_progress=False)
    similarity = model.similarity.tocsr()

    def scores(history: csr_matrix) -> NDArray[np.float32]:
        found: NDArray[np.float32] = np.ravel((history @ similarity).todense())
        return found

    return scores
