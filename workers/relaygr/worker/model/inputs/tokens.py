"""Looked-up tokens: one array of numbers, so that it is sliced, joined and moved to the device as one.

tokens int64 [tokens, 5], columns:
    CONTENT   row of the item table; below zero: ~row of the table of everything else (features, interleaved actions)
    ACTION    the form's code of the action (a row, or a set of bits); -1: nothing is added
    PLACE     row of the position table
    AGE       row of the time table
    TIME      the token's time, whole seconds since the epoch; of a candidate: the query's

A *form* makes the columns CONTENT and ACTION of behaviours and candidates, in numpy:

    added         behaviour: item, with the action's row added; candidate: item, with an action row of its own
    interleaved   behaviour: two tokens, item then action; candidate: item alone
    dlrm          behaviour: item, with the action as a set of bits; candidate: item, with no action known

Sources: Meta's generative-recommenders adds, NVIDIA's recsys-examples interleaves.
"""

from __future__ import annotations

import enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.record import record

Tokens = NDArray[np.int64]


class Column(enum.IntEnum):
    """Columns of looked-up tokens."""

    CONTENT = 0
    ACTION = 1
    PLACE = 2
    AGE = 3
    TIME = 4


@record(frozen=True, slots=True)
class FoundTokens:
    """Tokens [n, 5], and the number of items among them that are not in the vocabulary."""

    tokens: Tokens
    unknown_items: int


def no_tokens(count: int) -> Tokens:
    """`count` tokens without an action, at place, age and time 0."""
    tokens = np.zeros((count, len(Column)), dtype=np.int64)
    tokens[:, Column.ACTION] = -1
    return tokens


Int64Array = NDArray[np.int64]
Codes = NDArray[np.uint16]


class Form(Protocol):
    """Makes tokens from item rows and action codes."""

    tokens_per_behaviour: int

    def behaviours(self, rows: Int64Array, codes: Codes) -> Tokens:
        """Tokens of behaviours: `rows` of the item table, action `codes`."""

    def candidates(self, rows: Int64Array) -> Tokens:
        """One token for each candidate."""


def _items(rows: Int64Array) -> Tokens:
    tokens = no_tokens(rows.size)
    tokens[:, Column.CONTENT] = rows
    return tokens


class ItemsAlone:
    """A model without actions."""

    tokens_per_behaviour = 1

    def behaviours(self, rows: Int64Array, codes: Codes) -> Tokens:  # noqa: ARG002 - this model does not use them
        return _items(rows)

    def candidates(self, rows: Int64Array) -> Tokens:
        return _items(rows)


class Added:
    """Codes 0 to n - 1 are rows of the action table; row n is for any other code, row n + 1 for candidates."""

    tokens_per_behaviour = 1

    def __init__(self, num_actions: int) -> None:
        self._num_actions = num_actions

    def behaviours(self, rows: Int64Array, codes: Codes) -> Tokens:
        tokens = _items(rows)
        np.minimum(codes.astype(np.int64), self._num_actions, out=tokens[:, Column.ACTION])
        return tokens

    def candidates(self, rows: Int64Array) -> Tokens:
        tokens = _items(rows)
        tokens[:, Column.ACTION] = self._num_actions + 1
        return tokens


class Interleaved:
    """Actions are tokens. Their rows follow the features in the table of everything that is not an item."""

    tokens_per_behaviour = 2

    def __init__(self, num_actions: int, first_row: int) -> None:
        self._num_actions = num_actions
        self._first_row = first_row

    def behaviours(self, rows: Int64Array, codes: Codes) -> Tokens:
        tokens = no_tokens(2 * rows.size)
        tokens[0::2, Column.CONTENT] = rows
        tokens[1::2, Column.CONTENT] = ~(np.minimum(codes.astype(np.int64), self._num_actions) + self._first_row)
        return tokens

    def candidates(self, rows: Int64Array) -> Tokens:
        return _items(rows)


class Bits:
    """The column ACTION holds the code itself, a set of bits. Candidates have -1, which selects a learned row."""

    tokens_per_behaviour = 1

    def behaviours(self, rows: Int64Array, codes: Codes) -> Tokens:
        tokens = _items(rows)
        tokens[:, Column.ACTION] = codes
        return tokens

    def candidates(self, rows: Int64Array) -> Tokens:
        return _items(rows)
