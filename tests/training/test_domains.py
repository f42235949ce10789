"""Two logs as two domains: the split, the graphs and Katz centrality."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from relaygr.runtime.errors import RelayError
from relaygr.training.contrastive import Arm, Training, advance
from relaygr.training.domains import KATZ_SHARE, Domains, Graph, join_logs
from relaygr.training.logs import Log, Ties
from relaygr.training.options import RetrievalOptions
from relaygr.training.splits import Part
from tests.training.made_logs import cyclic_log

TARGET_LOG = cyclic_log(users=30, length=30, seed=1)
OTHER = cyclic_log(users=30, length=40, seed=2)
SOURCE_LOG = replace(OTHER, items=OTHER.items + 1000, times_ms=OTHER.times_ms + 30_000)
"""Its behaviours are half a minute after those of the target, so that no two times are equal."""


def test_katz_centrality_is_the_solution_of_its_equation() -> None:
    graph = Graph(3, 2, np.array([0, 0, 1, 2]), np.array([0, 1, 1, 1]))
    whole = np.zeros((5, 5))
    whole[graph.users, 3 + graph.items] = whole[3 + graph.items, graph.users] = 1
    alpha, beta = KATZ_SHARE / np.linalg.eigvalsh(whole).max(), np.array([1.0, 0, 1, 0, 0])
    assert graph.katz(beta) == pytest.approx(np.linalg.solve(np.eye(5) - alpha * whole, beta), abs=1e-5)


def test_the_easiest_negatives_are_those_with_the_least_centrality_around_common_users() -> None:
    domains = join_logs(TARGET_LOG, SOURCE_LOG)
    for graph, (users, items) in zip(domains.graphs, domains.easy_first, strict=True):
        beta = np.zeros(graph.num_users + graph.num_items)
        beta[domains.common] = 1
        found = graph.katz(beta)
        assert sorted(users.tolist()) == np.unique(graph.users).tolist()
        assert (np.diff(found[users]) >= 0).all() and (np.diff(found[graph.num_users + items]) >= 0).all()
        assert found[graph.num_users + items[0]] < found[graph.num_users + items[-1]]


def changed(log: Log, domains: Domains, from_ms: np.ndarray) -> Log:
    """The log with other items in what each user did from this time on."""
    owners = np.repeat(np.searchsorted(domains.split.users, log.users), log.lengths)
    is_late = log.times_ms >= from_ms[owners]
    return replace(log, items=np.where(is_late, np.roll(np.unique(log.items), 7)[0], log.items))


def weights(domains: Domains) -> list[torch.Tensor]:
    training = Training(domains, RetrievalOptions(intra_steps=1, inter_steps=2), 5e-3, seed=0)
    advance(training, Arm.JOINT, 1.0, 2, lambda: None)
    return [weight for encoder in training.encoders for weight in encoder.parameters()]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """More of them add the parts of a gradient in any order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_held_out_behaviours_of_either_domain_change_nothing_that_is_trained() -> None:
    domains = join_logs(TARGET_LOG, SOURCE_LOG)
    first_held_out = domains.log.times_ms[domains.split.train_ends]
    other = join_logs(*(changed(log, domains, first_held_out) for log in (TARGET_LOG, SOURCE_LOG)))
    assert (other.item_ids == domains.item_ids).all()
    assert not np.array_equal(other.log.items, domains.log.items)
    assert all(torch.equal(*pair) for pair in zip(weights(domains), weights(other), strict=True))
    earlier = join_logs(*(changed(log, domains, first_held_out - 300_000) for log in (TARGET_LOG, SOURCE_LOG)))
    assert not all(a.equal(b) for a, b in zip(weights(domains), weights(earlier), strict=True))


def test_of_a_cold_user_only_the_source_is_known() -> None:
    domains = join_logs(TARGET_LOG, SOURCE_LOG).with_cold(0.2, seed=0)
    cold = np.flatnonzero(domains.is_cold)
    assert cold.size == 6
    target, source = domains.graphs
    assert not np.isin(cold, target.users).any() and np.isin(cold, source.users).all()
    assert not np.isin(cold, domains.common).any()
    of_target, of_source = (each.sum(1) for each in domains.histories(Part.TEST, cold))
    assert not of_target.any() and of_source == pytest.approx(np.ones((6, 1)))
    assert np.isin(cold, domains.owners[domains.held_out(Part.TEST)]).any(), "their test part is there"


def test_at_equal_times_no_domain_comes_before_the_other_unless_the_order_of_the_files_is_asked_for() -> None:
    logs = [replace(log, times_ms=log.times_ms // 10**9 * 10**9) for log in (TARGET_LOG, SOURCE_LOG)]
    logs[1].times_ms[SOURCE_LOG.starts[1:] - 1] += 10**9  # Since a log of one time for each user is refused.
    shares = {}
    for ties in Ties:
        domains = join_logs(*(replace(log, ties=ties) for log in logs))
        assert domains.log.ties is ties
        firsts = domains.is_target[domains.split.starts[:-1]]
        shares[ties] = float(firsts.mean())
    assert shares[Ties.FILE] == 1.0 and 0.1 < shares[Ties.HASH] < 0.8


def test_logs_without_common_users_are_refused() -> None:
    strangers = replace(SOURCE_LOG, users=[f"v{user}" for user in range(30)])
    with pytest.raises(RelayError, match="0 common users"):
        join_logs(TARGET_LOG, strangers)
