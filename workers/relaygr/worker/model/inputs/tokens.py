"""Looked-up tokens: one array of numbers, so that it is sliced, joined and moved to the device as one.

tokens int64 [tokens, 5], columns:
    CONTENT   row of the item table; below zero: ~row of the table of all else (features, interleaved actions)
    ACTION    what the form of the inputs makes of the action (a row, or a set of bits); -1: nothing is added
    PLACE     row of the position table
    AGE       row of the time table
    TIME      the token's time, whole seconds since the epoch; of a candidate: the query's
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


class Column(enum.IntEnum):
    """Columns of looked-up tokens."""

    CONTENT = 0
    ACTION = 1
    PLACE = 2
    AGE = 3
    TIME = 4


@dataclass(frozen=True, slots=True)
class FoundTokens:
    """Tokens [n, 5], and how many items among them the vocabulary does not hold."""

    tokens: Tokens
    unknown_items: int


def no_tokens(count: int) -> Tokens:
    """`count` tokens that add nothing yet, at place, age and time 0."""
    tokens = np.zeros((count, len(Column)), dtype=np.int64)
    tokens[:, Column.ACTION] = -1
    return tokens
