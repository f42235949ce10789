"""A trial: a model and requests with some changes, each of which is a usual cause of different scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from relaygr.compare.requests import Request
from relaygr.worker.model.checkpoint import Checkpoint
from relaygr.worker.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Change:
    """What was changed, and how to make the change last. A change takes the place of an earlier one of its kind."""

    text: str
    remedy: str
    kind: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A model, requests of the file, and the changes of both."""

    checkpoint: Checkpoint
    requests: tuple[Request, ...]
    """As the file has them. Another set of requests gives the same trial on them."""
    transforms: tuple[Callable[[Request], Request], ...] = ()
    normalizer_of: Callable[[Request], float] | None = None
    """N of each request, if the source has no constant N."""
    changes: tuple[Change, ...] = ()

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def _with(self, change: Change) -> tuple[Change, ...]:
        return (*(other for other in self.changes if not change.kind or other.kind != change.kind), change)

    def changed_requests(self) -> list[Request]:
        """The requests after all transforms."""
        changed = list(self.requests)
        for transform in self.transforms:
            changed = [transform(request) for request in changed]
        return changed

    def configured(self, change: Change, **fields: Any) -> Trial:
        """With other fields of the configuration."""
        return self.converted(change, {}, **fields)

    def converted(self, change: Change, tensors: Mapping[str, torch.Tensor], **fields: Any) -> Trial:
        """With other tensors, and other fields of the configuration."""
        checkpoint = replace(
            self.checkpoint,
            config=self.config.model_copy(update=fields),
            tensors={**self.checkpoint.tensors, **tensors},
        )
        return replace(self, checkpoint=checkpoint, changes=self._with(change))

    def asked(self, change: Change, transform: Callable[[Request], Request]) -> Trial:
        """With other requests."""
        return replace(self, transforms=(*self.transforms, transform), changes=self._with(change))

    def scaled(self, change: Change, normalizer_of: Callable[[Request], float]) -> Trial:
        """With a separate N for each request."""
        return replace(self, normalizer_of=normalizer_of, changes=self._with(change))
