"""Candidates for a user: exact search over item embeddings, of a ranker, or of `relaygr train retrieval`.

The trainer's retrieval loss makes the product of a history's last row and an item's embedding large for the behaviour
that came next (`trainer.py`). The last row is computed by the dense model from the newest behaviours only: on
MovieLens, more of them found no more of the next items.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.training.contrastive import Encoder
from relaygr.training.dense.small import layer_norm
from relaygr.training.domains import mean_matrix
from relaygr.training.ranker import Batch, forward
from relaygr.worker.model.checkpoint import load_checkpoint

if TYPE_CHECKING:
    from relaygr.training.contrastive import Training

MODEL_FILE: Final = "retrieval.safetensors"
_DOMAINS: Final = ("target", "source")
NEWEST: Final = 64
"""Behaviours from which the last row is computed."""


class ExactSearch:
    """Searches a table of items by the row of a history."""

    def __init__(self, ids: NDArray[np.int64], table: torch.Tensor) -> None:
        """`ids` ascend; `table`: float32 [ids, D]."""
        self._ids, self._table = ids, table

    def find(self, history: Behaviours, count: int, leave_out: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids of the `count` best items, the best first: fewer if there are fewer. `leave_out` is no longer left
        out where nothing else is left.

        `history`: the user's behaviours, oldest first; at least one.
        """
        rows, is_known = self._rows_of(leave_out)
        is_left = np.ones(len(self._ids), dtype=bool)
        is_left[rows[is_known]] = False
        left = np.flatnonzero(is_left if is_left.any() else ~is_left)
        logits = (self._table @ self._row(history)).numpy()[left]
        best = np.argsort(-logits, kind="stable")[:count]
        found: NDArray[np.int64] = self._ids[left[best]]
        return found

    def _row(self, history: Behaviours) -> torch.Tensor:
        """[D]"""
        raise NotImplementedError

    def _rows_of(self, items: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The row of each item in the table, and whether it is in it (else the row means nothing)."""
        return rows_of(self._ids, items)


def rows_of(ids: NDArray[np.int64], items: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The place of each item in the ascending ids, and whether it is there (else the place means nothing)."""
    rows = np.minimum(np.searchsorted(ids, items), len(ids) - 1)
    return rows, ids[rows] == items


class ItemSearch(ExactSearch):
    """Searches the items of one checkpoint that `relaygr train ranker` wrote."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises RelayError for a folder that is no checkpoint."""
        found = load_checkpoint(checkpoint)
        self._config, self._tensors = found.config, dict(found.tensors)
        ids = self._tensors["items.ids"].numpy()
        super().__init__(ids, self._tensors["items.weight"][: len(ids)])

    def _row(self, history: Behaviours) -> torch.Tensor:
        """[D]"""
        newest = history[-NEWEST:]
        rows, is_known = self._rows_of(newest.items)
        items = torch.from_numpy(np.where(is_known, rows, self._config.vocabulary_size))[None]
        actions = torch.from_numpy(newest.actions.astype(np.int64))[None]
        nothing = torch.zeros(1, 1, 0, dtype=torch.int64)
        place, first = torch.tensor([[len(newest)]]), torch.zeros(1, dtype=torch.int64)
        with torch.inference_mode():
            _, rows_of_history = forward(
                self._config, self._tensors, Batch(items, actions, nothing, place, first), 0.0, reads_history=True
            )
            weight, bias = self._tensors["readout.norm.weight"], self._tensors["readout.norm.bias"]
            return layer_norm(rows_of_history[0, -1], weight, bias, self._config.norm_eps)


class GraphSearch(ExactSearch):
    """Searches the items of both domains of a file that `relaygr train retrieval` wrote, by all of a history."""

    def __init__(self, path: Path) -> None:
        """Raises RelayError for another file."""
        try:
            found = load_file(path)
            self._domains = [_domain(found, name) for name in _DOMAINS]
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise RelayError(f"{path} is no {MODEL_FILE} of `relaygr train retrieval` ({error}).") from error
        ids = torch.cat([domain.ids for domain in self._domains]).numpy()
        # Of an id that is in both domains, the target's row.
        ids, first = np.unique(ids, return_index=True)
        super().__init__(ids, torch.cat([domain.rows for domain in self._domains])[first])

    def _row(self, history: Behaviours) -> torch.Tensor:
        with torch.inference_mode():
            return torch.stack([self._row_of(domain, history) for domain in self._domains]).sum(0)

    @staticmethod
    def _row_of(domain: _Domain, history: Behaviours) -> torch.Tensor:
        rows, is_known = rows_of(domain.ids.numpy(), history.items)
        items = np.unique(rows[is_known])
        means = mean_matrix(np.zeros_like(items), items, (1, len(domain.ids)))
        return domain.encoder.user_rows(means, domain.hidden)[0]


@dataclass(frozen=True, slots=True)
class _Domain:
    """`ids` ascend; `hidden` and `rows` are the tables of the encoder."""

    ids: torch.Tensor
    encoder: Encoder
    hidden: torch.Tensor
    rows: torch.Tensor


def save_retrieval(path: Path, training: Training) -> None:
    """Writes what `GraphSearch` reads: encoders and tables of both domains, and the ids of their items."""
    tensors, domains = {}, training.domains
    ids = np.split(domains.item_ids, [domains.num_target])
    for place, name in enumerate(_DOMAINS):
        with torch.no_grad():
            hidden, rows = training.tables(place)
        weights = {f"encoder.{key}": value for key, value in training.encoders[place].state_dict().items()}
        for key, value in {"ids": torch.from_numpy(ids[place]), "hidden": hidden, "rows": rows, **weights}.items():
            tensors[f"{name}.{key}"] = value.contiguous()
    save_file(tensors, path)


def _domain(tensors: dict[str, torch.Tensor], name: str) -> _Domain:
    encoder = Encoder(tensors[f"{name}.encoder.items"])
    own = f"{name}.encoder."
    encoder.load_state_dict({key.removeprefix(own): value for key, value in tensors.items() if key.startswith(own)})
    return _Domain(tensors[f"{name}.ids"], encoder, tensors[f"{name}.hidden"], tensors[f"{name}.rows"])
