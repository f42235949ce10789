"""How far two sets of scores are apart: errors, rank correlation, and the share of the best candidates that stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaygr.compare.requests import Scores
from relaygr.worker.score_error import kept_share


@dataclass(frozen=True, slots=True)
class TaskAgreement:
    """Agreement on one task. Errors are relative to the largest score of the source."""

    worst_error: float
    typical_error: float
    """The median."""
    rank_correlation: float | None
    """Spearman's, the mean of all requests in which the source's scores differ; None if there is no such request."""
    topk_overlap: float | None
    """The mean share of the source's best candidates that are among our best, of all requests with more candidates;
    None if there is no such request."""


def agreement(ours: Sequence[Scores], theirs: Sequence[Scores], top_k: int) -> tuple[TaskAgreement, ...]:
    """The agreement on each task. Scores [candidates, tasks] of each request."""
    errors = np.concatenate(relative_errors(ours, theirs))
    found = []
    for task in range(errors.shape[1]):
        pairs = [(mine[:, task], source[:, task]) for mine, source in zip(ours, theirs, strict=True)]
        correlations = [_rank_correlation(mine, source) for mine, source in pairs if np.ptp(source) > 0]
        overlaps = [kept_share(source, mine, top_k) for mine, source in pairs if source.size > top_k]
        found.append(
            TaskAgreement(
                float(errors[:, task].max()),
                float(np.median(errors[:, task])),
                float(np.mean(correlations)) if correlations else None,
                float(np.mean(overlaps)) if overlaps else None,
            )
        )
    return tuple(found)


def relative_errors(ours: Sequence[Scores], theirs: Sequence[Scores]) -> list[Scores]:
    """|ours - theirs| of each request, divided by the largest of theirs in the same task over all requests."""
    largest = np.abs(np.concatenate(theirs)).max(axis=0)
    largest = np.where(largest > 0, largest, 1.0)
    pairs = zip(ours, theirs, strict=True)
    return [np.nan_to_num(np.abs(mine - source), nan=np.inf) / largest for mine, source in pairs]


def _rank_correlation(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> float:
    mine, source = _ranks(ours), _ranks(theirs)
    mine, source = mine - mine.mean(), source - source.mean()
    size = float(np.sqrt((mine**2).sum() * (source**2).sum()))
    return float((mine * source).sum()) / size if size else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0; equal values have the mean of their ranks."""
    _, groups, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means = ends - (counts + 1) / 2
    return np.asarray(means[groups], np.float64)
