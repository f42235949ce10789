"""The parts of the group-relative loss against hand values, and a policy that learns from it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from relaygr.training.group_relative import (
    advantages,
    clipped_loss,
    divergence,
    draw_slates,
    group_relative_loss,
    has_spread,
    slate_log_probabilities,
    slate_rewards,
)

SCORES = torch.tensor([[1.0, 0.0, -0.5], [0.2, 2.0, 0.3]])
ORDERS = list(itertools.permutations(range(3)))


def brute_force(scores: list[float], order: tuple[int, ...]) -> float:
    """The probability that this order is drawn, one place after the other."""
    probability, left = 1.0, dict(enumerate(map(math.exp, scores)))
    for item in order:
        probability *= left[item] / sum(left.values())
        del left[item]
    return probability


@pytest.mark.parametrize("places", [1, 2, 3])
def test_the_log_probability_of_a_slate_is_that_of_drawing_place_after_place(places: int) -> None:
    slates = torch.tensor([[order[:places] for order in ORDERS]] * 2)
    found = slate_log_probabilities(SCORES, slates).exp()
    for row, scores in enumerate(SCORES.tolist()):
        expected = [brute_force(scores, order[:places]) for order in ORDERS]
        assert found[row].tolist() == pytest.approx(expected, rel=1e-5)


def test_slates_are_drawn_as_often_as_their_probability_says() -> None:
    torch.manual_seed(0)
    slates = draw_slates(SCORES, 40_000)
    for row, scores in enumerate(SCORES.tolist()):
        drawn = [tuple(slate) for slate in slates[row].tolist()]
        for order in ORDERS:
            assert drawn.count(order) / len(drawn) == pytest.approx(brute_force(scores, order), abs=0.01)


def test_the_gradient_of_log_probabilities_is_finite_with_candidates_that_are_left_out() -> None:
    scores = torch.tensor([[1.0, 0.0, -1e9]], requires_grad=True)
    slate_log_probabilities(scores, torch.tensor([[[0, 1, 2], [1, 0, 2]]])).sum().backward()
    assert scores.grad is not None and bool(torch.isfinite(scores.grad).all())


def test_the_reward_is_the_ndcg_of_the_behaviour_that_came_next() -> None:
    slates = torch.tensor([[[0, 1, 2], [1, 0, 2], [3, 1, 0], [3, 1, 2]]])
    assert slate_rewards(slates)[0].tolist() == pytest.approx([1.0, 1 / math.log2(3), 0.5, 0.0])


def test_advantages_and_clipping_have_their_hand_values() -> None:
    assert advantages(torch.tensor([[1.0, 0.0, 0.5, 0.5]]))[0].tolist() == pytest.approx(
        [math.sqrt(2), -math.sqrt(2), 0.0, 0.0], abs=1e-4
    )
    ratios, signs = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0]), torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    assert clipped_loss(ratios, signs).tolist() == pytest.approx([-1.2, -0.5, 1.5, 0.8, -2.0])


def test_the_mean_divergence_of_drawn_slates_is_that_of_the_distributions() -> None:
    """Exact over all orders, where each counts as often as it is drawn; and one hand value."""
    slates = torch.tensor([ORDERS] * 2)
    ours, start = (slate_log_probabilities(scores, slates) for scores in (SCORES, SCORES.flip(0)))
    assert divergence(ours, ours).tolist() == torch.zeros(2, 6).tolist()
    assert divergence(ours, start).min() >= 0
    assert ((ours.exp() * divergence(ours, start)).sum(1)).tolist() == pytest.approx(
        (ours.exp() * (ours - start)).sum(1).tolist(), rel=1e-4
    )
    assert divergence(torch.tensor(0.0), torch.tensor(math.log(3))).item() == pytest.approx(2 - math.log(3))


def test_a_group_without_spread_changes_nothing() -> None:
    """Its slates would have the advantage 0, and their number would dilute the others."""
    slates = torch.tensor([[[0, 1], [1, 0]], [[1, 2], [2, 1]]])
    rewards = slate_rewards(slates)
    assert has_spread(rewards).tolist() == [True, False]
    both, one = (group_relative_loss(SCORES[kept], SCORES[kept] + 0.1, SCORES.flip(0)[kept], slates[kept],
                                     rewards[kept], 0.5) for kept in (slice(2), slice(1)))  # fmt: skip
    assert both.item() == one.item() != 0
    none = SCORES[1:].clone().requires_grad_(True)
    group_relative_loss(none, SCORES[1:], SCORES[:1], slates[1:], rewards[1:], 1.0).backward()  # type: ignore[no-untyped-call]
    assert none.grad is not None and none.grad.abs().max() == 0


def test_a_policy_learns_the_item_that_the_reward_prefers() -> None:
    torch.manual_seed(0)
    start = torch.zeros(4, 30)
    scores = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([scores], lr=0.1)
    for _ in range(60):
        drawn = scores.detach().clone()
        slates = draw_slates(drawn, 16)
        for _ in range(2):
            loss = group_relative_loss(scores, drawn, start, slates, slate_rewards(slates), 1e-3)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert scores.argmax(1).tolist() == [0] * 4
    assert slate_rewards(draw_slates(scores.detach(), 64)).mean() > 0.9
