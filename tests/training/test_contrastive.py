"""The losses of retrieval over two domains, and what each arm does in its steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from relaygr.training import contrastive
from relaygr.training.contrastive import (
    ALL_FROM,
    EASY_SHARE,
    SOURCE,
    TARGET,
    TEMPERATURE,
    Arm,
    Inter,
    Training,
    advance,
    contrastive_loss,
    drawn_share,
    product,
)
from relaygr.training.domains import join_logs, mean_matrix
from relaygr.training.options import RetrievalOptions
from tests.training.test_domains import SOURCE_LOG, TARGET_LOG

DOMAINS = join_logs(TARGET_LOG, SOURCE_LOG)
OPTIONS = RetrievalOptions(intra_steps=3, inter_steps=4)


def test_the_loss_is_the_soft_max_of_the_positive_among_the_negatives() -> None:
    anchors, positives, others = (torch.tensor(each) for each in ([[1.0, 0]], [[0.6, 0.8]], [[0.0, 1], [0.8, -0.6]]))
    wanted, unwanted = math.exp(0.6 / TEMPERATURE), math.exp(0) + math.exp(0.8 / TEMPERATURE)
    none = torch.zeros(1, 2, dtype=torch.bool)
    found = contrastive_loss(anchors, positives, others, none)
    assert float(found) == pytest.approx(-math.log(wanted / (wanted + unwanted)), abs=1e-6)
    own = contrastive_loss(anchors, positives, others, torch.tensor([[False, True]]))
    assert float(own) == pytest.approx(-math.log(wanted / (wanted + 1)), abs=1e-6), "an own item is no negative"


@pytest.mark.parametrize("stops", [True, False])
def test_no_gradient_reaches_the_other_domain(stops: bool) -> None:
    """Items are only ever on the other domain's side, so their last layer has a gradient only if it is not stopped."""
    training = Training(DOMAINS, OPTIONS, 5e-3, seed=0)
    training.update((), Inter(1.0, stops=stops))
    for encoder in training.encoders:
        assert encoder.user_out.weight.grad is not None, "the anchors learn"
        assert (encoder.item_out.weight.grad is None) is stops


def test_the_first_negatives_are_easy_and_the_last_are_all() -> None:
    shares = [drawn_share(progress) for progress in np.linspace(0, 1, 11)]
    assert shares[0] == EASY_SHARE and shares == sorted(shares)
    assert drawn_share(ALL_FROM) == 1 and drawn_share(ALL_FROM - 0.05) < 1


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_negatives_are_drawn_from_the_easiest_of_the_other_domain(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, loss = [], contrastive._loss
    monkeypatch.setattr(contrastive, "_loss", lambda *args: (drawn.append(args[-1]), loss(*args))[1])
    Training(DOMAINS, OPTIONS, 5e-3, seed=0).update((), Inter(share))
    allowed = [order for place in (SOURCE, TARGET) for order in DOMAINS.easy_first[place]]
    for found, order in zip(drawn, allowed, strict=True):
        assert set(found.tolist()) == set(order[: math.ceil(share * order.size)].tolist())


@pytest.mark.parametrize(("arm", "inter"), [(Arm.SEPARATED, 2), (Arm.JOINT, 7), (Arm.NO_STOP, 2), (Arm.ALONE, 0)])
def test_every_arm_has_the_same_number_of_updates(arm: Arm, inter: int) -> None:
    training, steps = Training(DOMAINS, OPTIONS, 5e-3, seed=0), []
    losses = advance(training, arm, 1.0, OPTIONS.steps, lambda: steps.append(1))
    updates = training._optimizer.state[training.encoders[TARGET].items]["step"]
    assert (int(updates), len(steps), len(losses)) == (7, 7, inter)
    is_trained = [
        not np.array_equal(encoder.items.detach(), graph.features)
        for encoder, graph in zip(training.encoders, DOMAINS.graphs, strict=True)
    ]
    assert is_trained == [True, arm is not Arm.ALONE]


def test_the_gradient_of_the_product_is_that_of_the_matrix() -> None:
    matrix = mean_matrix(np.array([0, 0, 2]), np.array([1, 3, 3]), (3, 4))
    rows = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(product(matrix, rows)[0], (rows[1] + rows[3]) / 2) and not product(matrix, rows)[1].any()
    torch.autograd.gradcheck(lambda each: product(matrix, each), rows)


def test_a_user_without_a_history_has_a_row_of_zero() -> None:
    training = Training(DOMAINS, OPTIONS, 5e-3, seed=0)
    graph = DOMAINS.graphs[TARGET]
    rows, *_ = training.encoders[TARGET](*graph.means(graph.users != graph.users[0]))
    assert not rows[graph.users[0]].any() and torch.allclose(rows.norm(dim=1).max(), torch.tensor(1.0))
