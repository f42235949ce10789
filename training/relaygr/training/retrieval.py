"""Candidates for a user: exact search over the items of a ranker, of a baseline, or of `relaygr train retrieval`.

The trainer's retrieval loss makes the cosine of an unknown candidate's row and the embedding of the item that came next
large (`sequence_loss.py`). The row is computed from the newest behaviours only: on MovieLens, more of them found no
more of the next items.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import require_regular
from relaygr.schemas.messages import Behaviours
from relaygr.training.baselines import fit, histories, items_matrix
from relaygr.training.contrastive import Encoder, Training
from relaygr.training.domains import mean_matrix
from relaygr.training.ranker import search_row
from relaygr.training.runs import FOUND_SHARES, METRICS_FILE, Run
from relaygr.training.splits import Part, Split
from relaygr.worker.model.checkpoint import load_checkpoint

MODEL_FILE: Final = "retrieval.safetensors"
_DOMAINS: Final = ("target.", "source.")
"""Prefixes of the tensors."""
NEWEST: Final = 64
"""Behaviours from which the last row is computed."""


class ItemSearch:
    """Searches the items of one checkpoint that `relaygr train ranker` wrote."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises RelayError for a folder that is no checkpoint."""
        found = load_checkpoint(checkpoint)
        self._config, self._tensors = found.config, dict(found.tensors)
        self._ids: NDArray[np.int64] = self._tensors["items.ids"].numpy()
        self._table = F.normalize(self._tensors["items.weight"][: len(self._ids)], dim=-1)

    def find(self, history: Behaviours, count: int, leave_out: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids of the `count` best items, the best first: fewer if there are fewer. `leave_out` is no longer left
        out where nothing else is left.

        `history`: the user's behaviours, oldest first; at least one.
        """
        newest = history[-NEWEST:]
        rows, is_known = _rows_of(self._ids, newest.items)
        items = np.where(is_known, rows, self._config.vocabulary_size).astype(np.int32)
        row = search_row(self._config, self._tensors, items, newest.actions)
        return _best(self._ids, self._table @ row, count, leave_out)


class BaselineSearch:
    """Searches by iALS or item neighbours with the parameters of a run, fitted again to its training part."""

    def __init__(self, run: Run, split: Split, name: str) -> None:
        parameters, options = run.read_json(METRICS_FILE)["baselines"][name]["parameters"], run.options()
        self._ids = split.item_ids
        self._scores = fit(name, histories(split, Part.VALIDATION), parameters, options.seed, options.threads)

    def find(self, history: Behaviours, count: int, leave_out: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `ItemSearch.find`."""
        rows, is_known = _rows_of(self._ids, history.items)
        known = rows[is_known].astype(np.int32)
        own = items_matrix(known, np.zeros(len(known), dtype=np.int64), (1, len(self._ids)))
        return _best(self._ids, torch.from_numpy(self._scores(own)), count, leave_out)


def found_shares(run: Run) -> dict[str, float]:
    """By the ranker's own retrieval and the baselines of a finished run: the share of the validation items that it
    found, the largest first. Raises RelayError.
    """
    shares: dict[str, float] = run.read_json(METRICS_FILE)[FOUND_SHARES]
    return dict(sorted(shares.items(), key=lambda each: -each[1]))


class GraphSearch:
    """Searches the items of both domains in a file that `relaygr train retrieval` wrote."""

    def __init__(self, path: Path) -> None:
        """Raises RelayError for another file."""
        self._domains, tables = [], []
        try:
            require_regular(path)
            found = load_file(path)
            for domain in _DOMAINS:
                own = {key.removeprefix(domain): value for key, value in found.items() if key.startswith(domain)}
                ids, hidden, rows = (own.pop(name) for name in ("ids", "hidden", "rows"))
                encoder = Encoder(own["items"])
                encoder.load_state_dict(own)
                self._domains.append((ids.numpy(), encoder, hidden))
                tables.append(rows)
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise RelayError(
                f"{path} is no {MODEL_FILE} of `relaygr train retrieval` ({error}): give the one in its --out folder."
            ) from error
        # Of an item that is in both domains, the target's row.
        self._ids, first = np.unique(np.concatenate([ids for ids, _, _ in self._domains]), return_index=True)
        self._table = torch.cat(tables)[first]

    def find(self, history: Behaviours, count: int, leave_out: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `ItemSearch.find`, by the sum of the history's rows in both domains."""
        row = torch.zeros(self._table.shape[1])
        with torch.inference_mode():
            for ids, encoder, hidden in self._domains:
                rows, is_known = _rows_of(ids, history.items)
                items = np.unique(rows[is_known])
                means = mean_matrix(np.zeros_like(items), items, (1, len(ids)))
                row += encoder.user_rows(means, hidden)[0]
            return _best(self._ids, self._table @ row, count, leave_out)


def save_retrieval(path: Path, training: Training) -> None:
    """Writes what `GraphSearch` reads: of both domains the encoder, its tables and the ids of the items."""
    ids = np.split(training.domains.item_ids, [training.domains.num_target])
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for place, domain in enumerate(_DOMAINS):
            rows, hidden = training.tables(place)
            own = {"ids": torch.from_numpy(ids[place].copy()), "hidden": hidden, "rows": rows}
            own |= training.encoders[place].state_dict()
            tensors |= {f"{domain}{name}": value.contiguous() for name, value in own.items()}
    save_file(tensors, path)


def _best(ids: NDArray[np.int64], scores: torch.Tensor, count: int, leave_out: NDArray[np.int64]) -> NDArray[np.int64]:
    rows, is_known = _rows_of(ids, leave_out)
    is_left = np.ones(len(ids), dtype=bool)
    is_left[rows[is_known]] = False
    left = np.flatnonzero(is_left if is_left.any() else ~is_left)
    # Only the best are sorted. With all of a million items that would take twenty times as long as their scores.
    keys, last = -scores.numpy()[left], min(count, left.size) - 1
    best = np.flatnonzero(keys <= np.partition(keys, last)[last])
    found: NDArray[np.int64] = ids[left[best[np.argsort(keys[best], kind="stable")[:count]]]]
    return found


def _rows_of(ids: NDArray[np.int64], items: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The place of each item in the ascending ids, and whether it is there (else the place means nothing)."""
    rows = np.minimum(np.searchsorted(ids, items), len(ids) - 1)
    return rows, ids[rows] == items
