"""Compares a model's scores with those of its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relaygr.compare.measures import TaskAgreement, agreement, relative_errors
from relaygr.compare.requests import Request, task_names
from relaygr.compare.running import Scorer
from relaygr.worker.device import Device
from relaygr.worker.model.engine import Model
from relaygr.worker.model.rankers import RankerFolder

_ROUNDED_ERROR = 3e-2
_ROUNDED_CORRELATION = 0.98


@dataclass(frozen=True, slots=True)
class Comparison:
    """The agreement of each task, and of full with cached inference."""

    requests: int
    candidates: int
    item_ids: int
    unknown_items: int
    unknown_actions: int
    unknown_features: int
    cached_error: float
    """The largest difference of full and cached inference, as a share of the task's largest score."""
    top_k: int
    tasks: Mapping[str, TaskAgreement]
    errors: tuple[float, ...]
    """The worst error of each request."""

    def agrees(self, tolerance: float) -> bool:
        """Whether all scores agree, and full with cached inference."""
        return max(self.cached_error, *self.errors) <= tolerance

    def looks_rounded(self) -> bool:
        """Whether the errors are small and the order of candidates is nearly the same."""
        return all(
            task.worst_error <= _ROUNDED_ERROR and (task.rank_correlation or 0.0) >= _ROUNDED_CORRELATION
            for task in self.tasks.values()
        )


def compare(
    model: Model, device: Device, requests: Sequence[Request], top_k: int, ranker_modules: Sequence[str] = ()
) -> Comparison:
    """Scores all requests in both ways. Raises RelayError if one is too long for the model."""
    scorer = Scorer(model, device, requests, ranker_modules)
    full, cached = scorer.full(requests), scorer.cached(requests)
    unknown_actions, unknown_features = scorer.unknown_inputs(requests)
    theirs = [request.scores for request in requests]
    found = agreement(full.scores, theirs, top_k)
    tasks = task_names(model.record if isinstance(model, RankerFolder) else model.config)
    return Comparison(
        requests=len(requests),
        candidates=sum(int(request.candidates.size) for request in requests),
        item_ids=sum(len(request.behaviours) + int(request.candidates.size) for request in requests),
        unknown_items=full.unknown_items,
        unknown_actions=unknown_actions,
        unknown_features=unknown_features,
        cached_error=max(float(errors.max()) for errors in relative_errors(cached.scores, full.scores)),
        top_k=top_k,
        tasks=dict(zip(tasks, found, strict=True)),
        errors=tuple(float(errors.max()) for errors in relative_errors(full.scores, theirs)),
    )
