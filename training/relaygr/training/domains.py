"""Two logs with common users: one split by time, and a graph of users and items for each log.

A user's behaviours of both logs are split together, so that no behaviour of the other domain is later than what is
held out. Vocabulary, features, graphs and Katz centrality come from the training part only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from relaygr.runtime.errors import RelayError
from relaygr.training.logs import Log, order_in_time, usable
from relaygr.training.options import Protocol
from relaygr.training.splits import Part, Split, split_log

KATZ_SHARE: Final = 0.5
"""Katz' alpha as a share of 1 / lambda_max."""
DIM: Final = 32
"""The width of all rows."""
LEAST_COMMON: Final = 10
"""Common users: of fewer, hardly any is a negative."""
_ITERATIONS: Final = 20
_KATZ_ERROR: Final = 1e-6


@dataclass(frozen=True)
class Graph:
    """The edges of a domain between rows of users and items, each once, sorted by user."""

    num_users: int
    num_items: int
    users: NDArray[np.int64]
    items: NDArray[np.int64]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """[users + 1]: the places of each user's edges."""
        return np.searchsorted(self.users, np.arange(self.num_users + 1))

    @cached_property
    def features(self) -> NDArray[np.float32]:
        """[items, at most `DIM`]: singular vectors of the edges, each weighed by 1 / sqrt(its ends' degrees)."""
        degrees = np.bincount(self.users)[self.users] * np.bincount(self.items)[self.items]
        values, vectors = _largest(self._matrix(1 / np.sqrt(degrees)), DIM)
        found: NDArray[np.float32] = (vectors * values * self.num_items**0.5).astype(np.float32)
        return found

    def katz(self, beta: NDArray[np.float64]) -> NDArray[np.float64]:
        """x = alpha A x + beta over users, then items, with alpha = KATZ_SHARE / lambda_max."""
        edges = self._matrix(np.ones(self.users.size))
        alpha = KATZ_SHARE / float(_largest(edges, 1)[0][0])
        found, before = beta, np.zeros_like(beta)
        while np.abs(found - before).max() > _KATZ_ERROR:
            before = found
            users, items = np.split(found, [self.num_users])
            found = beta + alpha * np.concatenate((edges @ items, edges.T @ users))
        return found

    def _matrix(self, weights: NDArray[np.float64]) -> csr_matrix:
        return csr_matrix((weights, (self.users, self.items)), (self.num_users, self.num_items))

    def means(self, kept: NDArray[np.bool_]) -> tuple[csr_matrix, csr_matrix]:
        """[users, items] and [items, users]: products are means over the neighbours by the kept edges."""
        users, items = self.users[kept], self.items[kept]
        shape = self.num_users, self.num_items
        return mean_matrix(users, items, shape), mean_matrix(items, users, shape[::-1])

    def neighbours(self, users: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
        """A random item of each user; each must have one."""
        first = self.starts[users]
        found: NDArray[np.int64] = self.items[first + random.integers(0, self.starts[users + 1] - first)]
        return found


def _largest(edges: csr_matrix, most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The largest singular values and their vectors [items, at most so many], by subspace iteration.

    ARPACK draws random vectors where a graph falls apart, so that a run would not be repeatable.
    """
    vectors = np.random.default_rng(0).normal(size=(edges.shape[1], min(most, *edges.shape)))
    for _ in range(_ITERATIONS):
        vectors = np.linalg.qr(edges.T @ (edges @ vectors))[0]
    return np.linalg.norm(edges @ vectors, axis=0), vectors


def mean_matrix(rows: NDArray[np.int64], columns: NDArray[np.integer[Any]], shape: tuple[int, int]) -> csr_matrix:
    """float32 of this shape, whose product is the mean over each row's columns, and 0 of none."""
    weights = (1.0 / np.bincount(rows, minlength=shape[0]).clip(1))[rows].astype(np.float32)
    return csr_matrix((weights, (rows, columns)), shape)


@dataclass(frozen=True)
class Domains:
    """Two logs as one, split by time. Items are rows of the vocabulary, first those of the target."""

    log: Log
    split: Split
    item_ids: NDArray[np.int64]
    """[vocabulary]: as in messages."""
    is_target: NDArray[np.bool_]
    """[behaviours]: of the target's log, in the vocabulary or not."""
    num_target: int
    """Items of the target in the vocabulary."""
    is_cold: NDArray[np.bool_]
    """[users]: whose behaviours in the target are in no graph and no history."""

    def with_cold(self, share: float, seed: int) -> Domains:
        """The same logs, with this share of the common users cold."""
        is_cold = np.zeros(len(self.split.users), dtype=bool)
        common = np.random.default_rng([seed, 0]).permutation(self.common)
        is_cold[common[: int(share * common.size)]] = True
        return replace(self, is_cold=is_cold)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """The user of each behaviour."""
        return np.repeat(np.arange(len(self.split.users)), np.diff(self.split.starts))

    @cached_property
    def graphs(self) -> tuple[Graph, ...]:
        """Of target and source, from the training part; the items of each begin at 0."""
        found, trained = [], self.split.training_places()
        for is_own, first, end in self._own():
            pairs = np.unique(self.owners[trained & is_own] * np.int64(end) + self.split.rows[trained & is_own])
            users, rows = np.divmod(pairs, end)
            found.append(Graph(len(self.split.users), end - first, users, rows - first))
        return tuple(found)

    @cached_property
    def common(self) -> NDArray[np.int64]:
        """Users with edges in both graphs."""
        return np.intersect1d(self.graphs[0].users, self.graphs[1].users)

    @cached_property
    def easy_first(self) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]:
        """Of each domain, users with edges and items by Katz centrality around common users, the least first."""
        found = []
        for graph in self.graphs:
            beta = np.zeros(graph.num_users + graph.num_items)
            beta[self.common] = 1.0
            users, items = np.split(graph.katz(beta), [graph.num_users])
            own = np.unique(graph.users)
            found.append((own[np.argsort(users[own], kind="stable")], np.argsort(items, kind="stable")))
        return tuple(found)

    def held_out(self, part: Part) -> NDArray[np.int64]:
        """The places of the target's behaviours of this part."""
        ends = self.split.validation_ends if part is Part.VALIDATION else self.split.starts[1:]
        places = np.arange(len(self.owners))
        return np.flatnonzero(self.is_target & ~self._is_before(part) & (places < ends[self.owners]))

    def histories(self, part: Part, users: NDArray[np.int64]) -> tuple[csr_matrix, ...]:
        """[these users, items] of target and source: products are means over histories that predict the part."""
        is_read = self._is_before(part) & (self.split.rows < self.split.num_items) & np.isin(self.owners, users)
        found = []
        for is_own, first, end in self._own():
            rows = np.searchsorted(users, self.owners[is_read & is_own])
            found.append(mean_matrix(rows, self.split.rows[is_read & is_own] - first, (len(users), end - first)))
        return tuple(found)

    def _is_before(self, part: Part) -> NDArray[np.bool_]:
        ends = self.split.train_ends if part is Part.VALIDATION else self.split.validation_ends
        return np.arange(len(self.owners)) < ends[self.owners]

    def _own(self) -> tuple[tuple[NDArray[np.bool_], int, int], ...]:
        """Of target and source: which behaviours can be read, and the domain's first row and end in the vocabulary."""
        target = self.is_target & ~self.is_cold[self.owners]
        return (target, 0, self.num_target), (~self.is_target, self.num_target, self.split.num_items)


def join_logs(target: Log, source: Log) -> Domains:
    """Equal times are ordered as in the target's log. Raises RelayError for logs that cannot be used."""
    ids, numbers = zip(*(np.unique(log.items, return_inverse=True) for log in (target, source)), strict=True)
    users, places = np.unique(target.users + source.users, return_inverse=True)
    owners = np.repeat(places, np.concatenate((target.lengths, source.lengths)))
    times = np.concatenate((target.times_ms, source.times_ms))
    items = np.concatenate((numbers[0], ids[0].size + numbers[1]))
    actions = np.concatenate((target.actions, source.actions))
    order = order_in_time(users.tolist(), owners, times, np.concatenate(ids)[items], actions, ties=target.ties)
    starts = np.searchsorted(owners[order], np.arange(len(users) + 1))
    has_times, has_ratings = target.has_times and source.has_times, target.has_ratings and source.has_ratings
    log = Log(users.tolist(), starts, items[order], actions[order], times[order], has_times, has_ratings)
    log = usable(replace(log, ties=target.ties))
    split, is_cold = split_log(log, Protocol.TIME), np.zeros(len(log.users), dtype=bool)
    num_target = int((split.item_ids < ids[0].size).sum())
    found = Domains(log, split, np.concatenate(ids)[split.item_ids], log.items < ids[0].size, num_target, is_cold)
    if found.common.size < LEAST_COMMON:
        raise RelayError(
            f"The logs have {found.common.size} common users with behaviours of both in the training part, and at "
            f"least {LEAST_COMMON} are needed: give two logs of one system, whose users have the same ids."
        )
    return found
