"""Group-relative policy optimisation of a ranker, in the way of DeepSeek-R1 (arXiv 2501.12948).

The policy draws slates of the best ten without replacement, by Plackett-Luce on the scores. The reward of a slate is a
rule: its NDCG, where only the behaviour that came next is relevant. No reward model is trained. With one relevant item
the return "from place k on" of Rank-GRPO is this number at all places up to the hit, so NDCG, which is reported, is the
reward.

Scores are [requests, candidates], where the first candidate came next; slates are [requests, group, places].
"""

from __future__ import annotations

from typing import Final

import torch

from relaygr.training.ranking import TOP

CLIP: Final = 0.2
"""The ratio of probabilities counts from 1 - CLIP to 1 + CLIP."""
_EPS: Final = 1e-6
_TAKEN: Final = -1e9


def draw_slates(scores: torch.Tensor, group: int) -> torch.Tensor:
    """Places of candidates, int64 [requests, group, at most TOP]: the largest of scores with Gumbel noise."""
    noise = -torch.empty(len(scores), group, scores.shape[1]).exponential_().log()
    return (scores[:, None] + noise).topk(min(TOP, scores.shape[1])).indices


def slate_log_probabilities(scores: torch.Tensor, slates: torch.Tensor) -> torch.Tensor:
    """[requests, group]: the sum over places of the score less the log-sum of all that were left at that place."""
    every = scores[:, None].expand(-1, slates.shape[1], -1)
    chosen = every.gather(-1, slates)
    rest = every.scatter(-1, slates, _TAKEN).logsumexp(-1, keepdim=True)
    left = torch.cat((chosen, rest), dim=-1).flip(-1).logcumsumexp(-1).flip(-1)[..., :-1]
    return (chosen - left).sum(-1)


def slate_rewards(slates: torch.Tensor) -> torch.Tensor:
    """[requests, group]: 1 / log2(place + 1) of the behaviour that came next, 0 where it is not in the slate."""
    return ((slates == 0) / torch.log2(torch.arange(slates.shape[-1]) + 2.0)).sum(-1)


def has_spread(rewards: torch.Tensor) -> torch.Tensor:
    """bool [requests]: a group of equal rewards says nothing about which slate is better."""
    return rewards.amax(1) > rewards.amin(1)


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """[requests, group]: (reward - mean) / (std + eps) within each group."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, correction=0, keepdim=True) + _EPS)


def clipped_loss(ratios: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """The negative objective of each slate: no gain from a ratio beyond the clip."""
    return -torch.minimum(ratios * advantage, ratios.clamp(1 - CLIP, 1 + CLIP) * advantage)


def divergence(ours: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """DeepSeek-R1's estimate, from log-probabilities of slates: never negative, and with slates that are drawn from
    `ours` its mean is the Kullback-Leibler divergence from the start.
    """
    log_ratio = start - ours
    return log_ratio.exp() - log_ratio - 1


def group_relative_loss(
    scores: torch.Tensor,
    drawn_scores: torch.Tensor,
    start_scores: torch.Tensor,
    slates: torch.Tensor,
    rewards: torch.Tensor,
    kl_weight: float,
) -> torch.Tensor:
    """Mean over the slates of groups with spread; 0 without such a group.

    `drawn_scores`: of the policy that drew the slates.
    """
    kept = has_spread(rewards)
    if not bool(kept.any()):
        return scores.sum() * 0
    ours, drawn, start = (
        slate_log_probabilities(each[kept], slates[kept]) for each in (scores, drawn_scores, start_scores)
    )
    gained = clipped_loss((ours - drawn).exp(), advantages(rewards[kept]))
    return (gained + kl_weight * divergence(ours, start)).mean()
