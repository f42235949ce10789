"""The batches of an epoch: windows of the users' training parts; for candidates places in them, and negatives.

A number generator of (seed, stage, epoch) makes an epoch, so that a run that goes on after an interruption trains on
the same batches as one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from relaygr.training.layers import Tensors
from relaygr.training.ranker import Batch, candidate_states
from relaygr.training.sequence_loss import MOST_ITEMS, SAMPLED
from relaygr.training.splits import Split
from relaygr.worker.model.config import ModelConfig

FOUND: Final = 128
"""Items that retrieval finds for a request, which are ranked."""
_SEQUENCE, _CANDIDATES = 0, 1
"""Streams of random numbers."""
_NAMED: Final = 0.5
"""The share of the rows that learn to search which get a random item's embedding, so that a candidate's own item does
not hide what its row knows of the history.
"""
_FORGOTTEN: Final = 0.01
"""The share of history items that are read as unknown, so that the row of unknown items is trained."""
_ROWS: Final = 1024
"""Behaviours of a batch of sequences, but for one longer window. Small batches, and so more steps, learn faster."""
_LEAST_BATCHES: Final = 64
"""Of an epoch: those of a small log are smaller."""
_EACH: Final = 16
"""At least one of so many places of a window has candidates."""
_ELEMENTS: Final = 1_600_000
"""The largest number of weights in one layer's attention of candidates, which bounds a batch's memory."""
_MOST_USERS: Final = 32
_FOUND_SHARE: Final = 0.5
"""Of the negatives; the others are random items."""

Window = tuple[int, int, int]
"""User, and the places in the split where the window starts and ends. Its last behaviour is only predicted."""


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Windows with two candidates after each behaviour: the row of the first searches for what came next, which is the
    second.
    """

    inputs: Batch
    wanted: torch.Tensor
    """int64 [users, behaviours]: the row of the vocabulary of the behaviour that came next; its size: there is none."""
    liked: torch.Tensor
    """float32 [users, behaviours]: it is a rating of at least 4."""


@dataclass(frozen=True, slots=True)
class CandidateBatch:
    """Windows with candidates at some places. The first candidate of a place is the behaviour that came next."""

    inputs: Batch
    is_target: torch.Tensor
    """bool [users, places]: false where a user has fewer places."""
    is_excluded: torch.Tensor
    """bool [users, places, candidates]: a negative that is none."""
    liked: torch.Tensor
    """float32 [users, places]: the next behaviour is a rating of at least 4."""
    never: list[torch.Tensor]
    """int64, for each user: no negatives. The items of the training part, unless users come back to items."""


def sequence_batches(split: Split, seed: int, epoch: int, max_history: int) -> Iterator[tuple[float, SequenceBatch]]:
    """The batches of an epoch, each with the share of the epoch that is done after it."""
    random = np.random.default_rng([seed, _SEQUENCE, epoch])
    chosen = _windows(split, random, max_history)
    most = min(_ROWS, sum(end - start - 1 for _, start, end in chosen) // _LEAST_BATCHES)
    batches = _batched(chosen, random, lambda users, longest: users * (longest - 1) <= most)
    for number, windows in enumerate(batches):
        items, actions = _history(split, random, windows)
        wanted = np.full(items.shape, split.num_items, dtype=np.int64)
        liked = np.zeros(items.shape, dtype=np.float32)
        for index, (_, start, end) in enumerate(windows):
            wanted[index, : end - start - 1] = split.rows[start + 1 : end]
            liked[index, : end - start - 1] = split.liked[start + 1 : end]
        searching = random.integers(0, split.num_items, items.shape)
        searching[random.random(items.shape) >= _NAMED] = split.num_items
        candidates = np.stack((searching, wanted), axis=2) if split.has_liked else searching[..., None]
        places = np.broadcast_to(1 + np.arange(items.shape[1]), items.shape).copy()
        inputs = Batch(*map(torch.from_numpy, (items, actions, candidates, places)))
        yield (number + 1) / len(batches), SequenceBatch(inputs, *map(torch.from_numpy, (wanted, liked)))


def candidate_batches(
    split: Split, seed: int, epoch: int, places: int, negatives: int, max_history: int
) -> Iterator[tuple[float, CandidateBatch]]:
    """As `sequence_batches`, with random negatives."""
    random = np.random.default_rng([seed, _CANDIDATES, epoch])

    def fits(users: int, longest: int) -> bool:
        cost = _places(longest - 1, places) * (negatives + 1) * longest
        return users <= _MOST_USERS and users * cost <= _ELEMENTS

    batches = _batched(_windows(split, random, max_history), random, fits)
    for number, windows in enumerate(batches):
        yield (number + 1) / len(batches), _with_candidates(split, random, windows, places, negatives)


def _windows(split: Split, random: np.random.Generator, max_history: int) -> list[Window]:
    """One of each user: the training part, or as much of it as a history may have, with a random end. By length."""
    windows = []
    for user in random.permutation(len(split.users)).tolist():
        start, end = int(split.starts[user]), int(split.train_ends[user])
        if end - start > max_history + 1:
            end = int(random.integers(start + max_history + 1, end + 1))
            start = end - max_history - 1
        if end - start >= 2:
            windows.append((user, start, end))
    return sorted(windows, key=lambda window: window[2] - window[1])


def _batched(
    windows: list[Window], random: np.random.Generator, fits: Callable[[int, int], bool]
) -> list[list[Window]]:
    """Windows of like lengths together, so that little is padded, in a random order. `fits` (users, longest window)."""
    batches: list[list[Window]] = []
    for window in windows:
        if batches and fits(len(batches[-1]) + 1, window[2] - window[1]):
            batches[-1].append(window)
        else:
            batches.append([window])
    return [batches[index] for index in random.permutation(len(batches)).tolist()]


def _history(
    split: Split, random: np.random.Generator, windows: list[Window]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Items and actions of the windows but for their last behaviours, [users, behaviours]."""
    longest = max(end - start for _, start, end in windows) - 1
    items = np.full((len(windows), longest), split.num_items, dtype=np.int64)
    actions = np.zeros_like(items)
    for index, (_, start, end) in enumerate(windows):
        items[index, : end - start - 1] = split.rows[start : end - 1]
        actions[index, : end - start - 1] = split.actions[start : end - 1]
    items[random.random(items.shape) < _FORGOTTEN] = split.num_items
    return items, actions


def _places(length: int, least: int) -> int:
    """How many places of a window of `length` behaviours are trained: more of a long one, whose contexts are rare."""
    return min(length, max(least, length // _EACH))


def _with_candidates(
    split: Split, random: np.random.Generator, windows: list[Window], places: int, negatives: int
) -> CandidateBatch:
    items, actions = _history(split, random, windows)
    shape = (len(windows), _places(items.shape[1], places))
    # A user with fewer places has candidates that count nowhere.
    at = np.ones(shape, dtype=np.int64)
    is_target = np.zeros(shape, dtype=bool)
    liked = np.zeros(shape, dtype=np.float32)
    candidates = random.integers(0, split.num_items, (*shape, negatives + 1))
    never = []
    for index, (user, start, end) in enumerate(windows):
        length = end - start - 1
        chosen = 1 + random.permutation(length)[: _places(length, places)]
        at[index, : chosen.size] = chosen
        is_target[index, : chosen.size] = True
        candidates[index, : chosen.size, 0] = split.rows[start + chosen]
        liked[index, : chosen.size] = split.liked[start + chosen]
        own = split.rows[split.starts[user] : split.train_ends[user]] if split.leaves_out_seen else split.rows[:0]
        never.append(torch.from_numpy(np.unique(own).astype(np.int64)))
    inputs = Batch(*map(torch.from_numpy, (items, actions, candidates, at)))
    excluded = _excluded(inputs.candidates, never)
    return CandidateBatch(inputs, torch.from_numpy(is_target), excluded, torch.from_numpy(liked), never)


def _excluded(candidates: torch.Tensor, never: list[torch.Tensor]) -> torch.Tensor:
    """bool as `candidates`: the negatives that are the next behaviour, or of the user's `never`."""
    found = candidates == candidates[..., :1]
    found |= torch.stack([torch.isin(own, items) for own, items in zip(candidates, never, strict=True)])
    found[..., 0] = False
    return found


@torch.no_grad()
def with_found_negatives(config: ModelConfig, tensors: Tensors, batch: CandidateBatch) -> CandidateBatch:
    """A share of the negatives becomes random ones of the items that retrieval finds there: a ranker has to order what
    retrieval cannot tell apart. Of a large vocabulary a sample is searched.
    """
    candidates = batch.inputs.candidates.clone()
    changed = round(_FOUND_SHARE * (candidates.shape[2] - 1))
    unknown = torch.full_like(candidates[..., :1], config.vocabulary_size)
    rows = candidate_states(config, tensors, replace(batch.inputs, candidates=unknown))[:, :, 0]
    is_large = config.vocabulary_size > MOST_ITEMS
    searched = torch.randint(config.vocabulary_size, (SAMPLED,)) if is_large else torch.arange(config.vocabulary_size)
    table = F.normalize(F.embedding(searched, tensors["items.weight"]), dim=-1)
    for user, never in enumerate(batch.never):
        scores = (rows[user] @ table.T).masked_fill(torch.isin(searched, never), -math.inf)
        found = scores.topk(min(FOUND, len(searched)), sorted=False).indices
        drawn = torch.randint(found.shape[1], (len(found), changed))
        candidates[user, :, 1 : changed + 1] = searched[found.gather(1, drawn)]
    inputs = replace(batch.inputs, candidates=candidates)
    return replace(batch, inputs=inputs, is_excluded=_excluded(candidates, batch.never))
