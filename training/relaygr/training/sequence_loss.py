"""The loss of retrieval: a soft-max over all items of their cosine with a history's row.

    loss = -log( exp(cos(row, wanted) / T) / sum over items of exp(cos(row, item) / T) ),   T = TEMPERATURE

It is HSTU's (arXiv 2402.17152) over all items instead of a sample, which learns more in a minute of a CPU. Rows are
taken in pieces that fit a core's cache, and the gradient is computed with the loss, so that the logits of all rows are
never in memory; torch's cross-entropy takes three times as long. A cosine is at most 1, so no exponential is too large.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

TEMPERATURE: Final = 0.05
MOST_ITEMS: Final = 20_000
"""Of a larger vocabulary, `SAMPLED` random items of each batch stand for all."""
SAMPLED: Final = 8192
_PIECE: Final = 128
"""Rows of one piece."""


def retrieval_loss(rows: torch.Tensor, table: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean over the rows, a scalar; 0 without rows.

    `rows`: float32 [rows, D], of histories. `table`: float32 [items, D], the embeddings. `wanted`: int64 [rows], the
    items that came next.
    """
    if not len(rows):
        return torch.zeros(())
    queries = F.normalize(rows, dim=-1) / TEMPERATURE
    own = F.normalize(F.embedding(wanted, table), dim=-1)
    sampled = torch.randint(len(table), (SAMPLED,)) if len(table) > MOST_ITEMS else None
    others = F.normalize(table if sampled is None else F.embedding(sampled, table), dim=-1)
    found: torch.Tensor = _SoftMaxLoss.apply(queries, others, own, wanted, sampled, len(table))  # type: ignore[no-untyped-call]
    return found


def cosines(row: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """float32 [items]: of a history's row [D] with each item, by which retrieval orders them."""
    return F.normalize(table, dim=-1) @ F.normalize(row, dim=-1)


class _SoftMaxLoss(torch.autograd.Function):
    """`others` [items, D] are all items, or those of `sampled`. Each of a sample then stands for so many that its sum
    is, on average, the sum over all items but the wanted one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: torch.Tensor,
        others: torch.Tensor,
        own: torch.Tensor,
        wanted: torch.Tensor,
        sampled: torch.Tensor | None,
        num_items: int,
    ) -> torch.Tensor:
        of_own = (queries * own).sum(1)
        sums, of_queries, of_others = torch.empty_like(of_own), torch.empty_like(queries), torch.zeros_like(others)
        for piece in torch.split(torch.arange(len(queries)), _PIECE):
            at = slice(int(piece[0]), int(piece[-1]) + 1)
            weights = (queries[at] @ others.T).exp_()
            if sampled is not None:
                weights *= (sampled != wanted[at, None]) * (num_items / len(sampled))
            sums[at] = weights.sum(1)
            if sampled is not None:
                sums[at] += of_own[at].exp()
            torch.mm(weights, others, out=of_queries[at])
            of_others.addmm_(weights.T, queries[at] / sums[at, None])
        # A full soft-max has the wanted item among the others, where its probability is counted.
        probability = torch.zeros_like(of_own) if sampled is None else of_own.exp() / sums
        missing = ((probability - 1) / len(queries))[:, None]
        ctx.save_for_backward(
            of_queries / (sums[:, None] * len(queries)) + missing * own, of_others / len(queries), missing * queries
        )
        return (sums.log() - of_own).mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_queries, of_others, of_own = ctx.saved_tensors
        return gradient * of_queries, gradient * of_others, gradient * of_own, None, None, None
