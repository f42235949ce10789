"""The batches of an epoch: windows of the users' training parts, places in them, and negatives.

A number generator of (seed, epoch) makes an epoch, so that a run that goes on after an interruption trains on the same
batches as one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from relaygr.training.ranker import SUFFIX_BEHAVIOURS, Batch
from relaygr.training.splits import Split

_SHORTENED: Final = 0.5
"""The share of windows that begin later than they could: a worker may be asked to serve only the newest behaviours."""
_SHORTEST: Final = 8
_SHIFTED: Final = 0.5
"""The share of windows that begin at a random position."""
_EACH: Final = 16
"""One of so many places of a long window is trained."""
_FORGOTTEN: Final = 0.01
"""The share of history items that are read as unknown, so that the row of unknown items is trained."""
_ELEMENTS: Final = 400_000
"""The largest number of weights in one layer's attention of candidates, which bounds a batch's memory."""
_MOST_USERS: Final = 16


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A batch with what the losses need. The first candidate of a place is the behaviour that came next."""

    inputs: Batch
    is_target: torch.Tensor
    """bool [users, places]: false where a user has fewer places."""
    is_excluded: torch.Tensor
    """bool [users, places, candidates]: a negative that is none."""
    liked: torch.Tensor
    """float32 [users, places]: the next behaviour is a rating of at least 4."""


Window = tuple[int, int, int]
"""User, and the places in the split where the window starts and ends. Its last behaviour is only predicted."""


def epoch_batches(
    split: Split, seed: int, epoch: int, places: int, negatives: int, max_history: int
) -> list[list[Window]]:
    """The windows of each batch of an epoch."""
    random = np.random.default_rng([seed, epoch, 0])
    windows = []
    for user in random.permutation(len(split.users)).tolist():
        start, end = int(split.starts[user]), int(split.train_ends[user])
        end = end if end - start <= max_history + 1 else int(random.integers(start + max_history + 1, end + 1))
        length = min(end - start, max_history + 1)
        if length > _SHORTEST and random.random() < _SHORTENED:
            length = int(_SHORTEST * (length / _SHORTEST) ** random.random())
            end = int(random.integers(start + length, end + 1))
        if length >= 2:
            windows.append((user, end - length, end))
    # Windows of like lengths together, so that little is padded.
    windows.sort(key=lambda window: window[2] - window[1])
    batches: list[list[Window]] = []
    for window in windows:
        longest = window[2] - window[1]
        cost = _places(longest - 1, places) * (negatives + 1) * longest
        if batches and len(batches[-1]) < _MOST_USERS and (len(batches[-1]) + 1) * cost <= _ELEMENTS:
            batches[-1].append(window)
        else:
            batches.append([window])
    return [batches[index] for index in random.permutation(len(batches)).tolist()]


def _places(length: int, least: int) -> int:
    """How many places of a window of `length` behaviours are trained: more of a long one, whose contexts are rare."""
    return min(length, max(least, length // _EACH))


def training_batches(
    split: Split, seed: int, epoch: int, places: int, negatives: int, max_history: int
) -> Iterator[tuple[float, TrainingBatch]]:
    """The batches of an epoch, each with the share of the epoch that is done after it."""
    batches = epoch_batches(split, seed, epoch, places, negatives, max_history)
    for number, windows in enumerate(batches):
        random = np.random.default_rng([seed, epoch, 1, number])
        yield (number + 1) / len(batches), _batch(split, random, windows, places, negatives, max_history)


def _batch(
    split: Split, random: np.random.Generator, windows: list[Window], places: int, negatives: int, max_history: int
) -> TrainingBatch:
    longest = max(end - start for _, start, end in windows) - 1
    shape = (len(windows), _places(longest, places))
    items = np.full((len(windows), longest), split.num_items, dtype=np.int64)
    actions = np.zeros_like(items)
    # A user with fewer places has candidates that count nowhere.
    at = np.ones(shape, dtype=np.int64)
    is_target = np.zeros(shape, dtype=bool)
    liked = np.zeros(shape, dtype=np.float32)
    candidates = random.integers(0, split.num_items, (*shape, negatives + 1))
    is_excluded = np.zeros(candidates.shape, dtype=bool)
    for index, (user, start, end) in enumerate(windows):
        length = end - start - 1
        items[index, :length] = split.rows[start : end - 1]
        actions[index, :length] = split.actions[start : end - 1]
        chosen = 1 + random.permutation(length)[: _places(length, places)]
        at[index, : chosen.size] = chosen
        is_target[index, : chosen.size] = True
        candidates[index, : chosen.size, 0] = split.rows[start + chosen]
        liked[index, : chosen.size] = split.liked[start + chosen]
        if split.leaves_out_seen:
            own = split.rows[split.starts[user] : split.train_ends[user]]
            is_excluded[index] = np.isin(candidates[index], own)
        else:
            is_excluded[index] = candidates[index] == candidates[index, :, :1]
    is_excluded[:, :, 0] = False
    items[random.random(items.shape) < _FORGOTTEN] = split.num_items
    latest = np.array([max_history + SUFFIX_BEHAVIOURS - (end - start - 1) for _, start, end in windows])
    first = random.integers(0, latest + 1) * (random.random(len(windows)) < _SHIFTED)
    inputs = Batch(*map(torch.from_numpy, (items, actions, candidates, at, first)))
    return TrainingBatch(inputs, *map(torch.from_numpy, (is_target, is_excluded, liked)))
