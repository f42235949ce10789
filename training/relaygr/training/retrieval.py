"""Candidates for a user: exact search over a ranker's item embeddings.

The trainer's retrieval loss makes the product of a history's last row and an item's embedding large for the behaviour
that came next (`trainer.py`). The last row is computed by the dense model from the newest behaviours only: on
MovieLens, more of them found no more of the next items.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.training.dense.small import layer_norm
from relaygr.training.ranker import Batch, forward
from relaygr.worker.model.checkpoint import load_checkpoint

NEWEST: Final = 64
"""Behaviours from which the last row is computed."""


class ItemSearch:
    """Searches the items of one checkpoint that `relaygr train ranker` wrote."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises RelayError for a folder that is no checkpoint."""
        found = load_checkpoint(checkpoint)
        self._config, self._tensors = found.config, dict(found.tensors)
        self._ids: NDArray[np.int64] = self._tensors["items.ids"].numpy()
        self._table = self._tensors["items.weight"][: len(self._ids)]

    def find(self, history: Behaviours, count: int, leave_out: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids of the `count` best items, the best first: fewer if there are fewer. `leave_out` is no longer left
        out where nothing else is left.

        `history`: the user's behaviours, oldest first; at least one.
        """
        rows, is_known = self._rows_of(leave_out)
        is_left = np.ones(len(self._ids), dtype=bool)
        is_left[rows[is_known]] = False
        left = np.flatnonzero(is_left if is_left.any() else ~is_left)
        logits = (self._table @ self._last_row(history[-NEWEST:])).numpy()[left]
        best = np.argsort(-logits, kind="stable")[:count]
        found: NDArray[np.int64] = self._ids[left[best]]
        return found

    def _last_row(self, newest: Behaviours) -> torch.Tensor:
        """[D]"""
        rows, is_known = self._rows_of(newest.items)
        items = torch.from_numpy(np.where(is_known, rows, self._config.vocabulary_size))[None]
        actions = torch.from_numpy(newest.actions.astype(np.int64))[None]
        nothing = torch.zeros(1, 1, 0, dtype=torch.int64)
        place, first = torch.tensor([[len(newest)]]), torch.zeros(1, dtype=torch.int64)
        with torch.inference_mode():
            _, history = forward(
                self._config, self._tensors, Batch(items, actions, nothing, place, first), 0.0, reads_history=True
            )
            weight, bias = self._tensors["readout.norm.weight"], self._tensors["readout.norm.bias"]
            return layer_norm(history[0, -1], weight, bias, self._config.norm_eps)

    def _rows_of(self, items: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The row of each item in the table, and whether it is in the vocabulary (else the row means nothing)."""
        rows = np.minimum(np.searchsorted(self._ids, items), len(self._ids) - 1)
        return rows, self._ids[rows] == items
