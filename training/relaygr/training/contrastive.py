"""Graph encoders of two domains with common users, trained in the way of SCCDR (arXiv 2502.16239).

    stage 1, intra   in each domain: a user and an item of theirs, against random items
    stage 2, inter   every second step, for common users and in both directions: a user's row in one domain, against the
                     row of the same user (alignment) or of an item of theirs (neighbourhood) in the other, with
                     negatives drawn from the easy ones first; no gradient reaches the other domain's rows

The paper's formulas are not public, so the forms here and the constants below are choices of ours. Encoders are
GraphSAGE with means of sampled neighbours. Users have no weights of their own: a row is computed from any history, and
of none it is 0.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from relaygr.runtime.errors import RelayError
from relaygr.training.domains import DIM, Domains
from relaygr.training.options import RetrievalOptions

TEMPERATURE: Final = 0.1
EASY_SHARE: Final = 0.2
"""Of the negatives, by Katz centrality, from which stage 2 draws at first."""
ALL_FROM: Final = 0.6
"""The share of the inter-domain steps after which all negatives are drawn."""
_KEPT_EDGES: Final = 0.3
"""The share of the edges in each step's graph. The others are what a step predicts."""
BATCH: Final = 1024
NEGATIVES: Final = 512
"""Of a step, shared by the batch."""
_EXCLUDED: Final = -1e9


class Arm(enum.StrEnum):
    """What is compared."""

    SEPARATED = "separated"
    JOINT = "joint"
    NO_STOP = "no stop-gradient"
    RANDOM = "random negatives"
    ALONE = "one domain"
    POPULARITY = "popularity"


TARGET: Final = 0
SOURCE: Final = 1
BOTH: Final = (TARGET, SOURCE)
"""Places of the domains."""


@dataclass(frozen=True, slots=True)
class Inter:
    """How a step takes the inter-domain loss."""

    share: float
    """Of the negatives, the easiest ones, that are drawn from."""
    weight: float = 1.0
    stops: bool = True
    """No gradient reaches the other domain's rows."""


OnStep = Callable[[], None]
Rows = tuple[torch.Tensor, torch.Tensor]
"""Two tables, float32 [users or items, dim]."""


class _Product(torch.autograd.Function):
    """A constant sparse matrix times rows. torch's own takes ten times as long for the gradient."""

    @staticmethod
    def forward(ctx: Any, matrix: csr_matrix, rows: torch.Tensor) -> torch.Tensor:
        ctx.matrix = matrix
        return torch.from_numpy(matrix @ rows.detach().numpy())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, torch.from_numpy(ctx.matrix.T @ gradient.numpy())


def product(matrix: csr_matrix, rows: torch.Tensor) -> torch.Tensor:
    # Some releases of torch have no type for `apply`, and others one of several results.
    apply = cast(Callable[[csr_matrix, torch.Tensor], torch.Tensor], _Product.apply)
    return apply(matrix, rows)


class Encoder(torch.nn.Module):
    """GraphSAGE over one domain, two hops, without biases: a user without neighbours has a row of 0."""

    def __init__(self, features: torch.Tensor) -> None:
        super().__init__()
        width = features.shape[1]
        self.items = torch.nn.Parameter(features.clone())
        self.user_hop = torch.nn.Linear(width, DIM, bias=False)
        self.item_hop = torch.nn.Linear(width + DIM, DIM, bias=False)
        self.user_out = torch.nn.Linear(2 * DIM, DIM, bias=False)
        self.item_out = torch.nn.Linear(width + DIM, DIM, bias=False)

    def forward(self, to_users: csr_matrix, to_items: csr_matrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Users, items, and items after one hop. `to_users`, `to_items`: means over the neighbours."""
        users = self._users(to_users)
        hidden = F.relu(self.item_hop(torch.cat((self.items, product(to_items, users)), 1)))
        items = F.normalize(self.item_out(torch.cat((self.items, hidden), 1)), dim=1)
        return self._user_rows(to_users, users, hidden), items, hidden

    def user_rows(self, to_users: csr_matrix, hidden: torch.Tensor) -> torch.Tensor:
        """`to_users`: means over each user's history. `hidden`: items after one hop."""
        return self._user_rows(to_users, self._users(to_users), hidden)

    def _users(self, to_users: csr_matrix) -> torch.Tensor:
        """[users, dim]: after one hop."""
        return F.relu(self.user_hop(product(to_users, self.items)))

    def _user_rows(self, to_users: csr_matrix, users: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.user_out(torch.cat((users, product(to_users, hidden)), 1)), dim=1)


def contrastive_loss(
    anchors: torch.Tensor, positives: torch.Tensor, others: torch.Tensor, is_own: torch.Tensor
) -> torch.Tensor:
    """InfoNCE: the mean of -log(e^(a p / t) / (e^(a p / t) + sum of e^(a o / t))).

    anchors, positives: [n, dim]. others: [m, dim], shared negatives. is_own: bool [n, m], a negative that is none.
    """
    wanted = (anchors * positives).sum(1, keepdim=True)
    unwanted = (anchors @ others.T).masked_fill(is_own, _EXCLUDED)
    logits = torch.cat((wanted, unwanted), 1) / TEMPERATURE
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


def drawn_share(progress: float) -> float:
    """The share of the negatives, the easiest ones, that are drawn from at this share of the steps."""
    return min(1.0, EASY_SHARE + (1 - EASY_SHARE) * progress / ALL_FROM)


class Training:
    """The encoders of target and source while they are trained."""

    def __init__(self, domains: Domains, options: RetrievalOptions, learning_rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.domains, self.options, self.learning_rate = domains, options, learning_rate
        self.encoders = tuple(Encoder(torch.from_numpy(graph.features)) for graph in domains.graphs)
        weights = [weight for encoder in self.encoders for weight in encoder.parameters()]
        self._optimizer = torch.optim.Adam(weights)
        self._random = np.random.default_rng([seed, 1])
        self.steps = 0

    def update(self, intra: Sequence[int], inter: Inter | None) -> float:
        """One step, by the intra-domain losses of these domains and the inter-domain loss. Returns the latter, or 0.

        The learning rate falls to 0 with the steps. Raises RelayError if the loss is not finite.
        """
        self._optimizer.param_groups[0]["lr"] = self.learning_rate * (1 - self.steps / self.options.steps)
        self.steps += 1
        graphs = self.domains.graphs
        kept = [self._random.random(graph.users.size) < _KEPT_EDGES for graph in graphs]
        rows = {
            place: self.encoders[place](*graphs[place].means(kept[place]))[:2] for place in (BOTH if inter else intra)
        }
        losses = [self._intra(place, rows[place], np.flatnonzero(~kept[place])) for place in intra]
        between = torch.zeros(())
        if inter is not None:
            between = self._inter(rows[TARGET], rows[SOURCE], inter)
            losses.append(inter.weight * between)
        loss = torch.stack(losses).sum()
        if not bool(torch.isfinite(loss)):
            raise RelayError(
                f"The loss is {loss.item()} at a learning rate of {self.learning_rate:g}: give fewer --intra-steps "
                "and --inter-steps."
            )
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(between.detach())

    def tables(self, place: int) -> Rows:
        """A domain's items after both hops and after one, over all its edges."""
        graph = self.domains.graphs[place]
        _, rows, hidden = self.encoders[place](*graph.means(np.ones(graph.users.size, dtype=bool)))
        return rows, hidden

    def _intra(self, place: int, rows: Rows, predicted: NDArray[np.int64]) -> torch.Tensor:
        graph = self.domains.graphs[place]
        edges = self._random.choice(predicted, BATCH)
        others = self._random.integers(0, graph.num_items, NEGATIVES)
        return _loss(rows[0], graph.users[edges], rows[1], graph.items[edges], others)

    def _inter(self, target: Rows, source: Rows, inter: Inter) -> torch.Tensor:
        users = self._random.choice(self.domains.common, min(BATCH, self.domains.common.size), False)
        losses = []
        for place, (here, there) in ((SOURCE, (target, source)), (TARGET, (source, target))):
            if inter.stops:
                there = there[0].detach(), there[1].detach()
            other_users, other_items = (
                self._random.choice(each[: math.ceil(inter.share * each.size)], NEGATIVES)
                for each in self.domains.easy_first[place]
            )
            items = self.domains.graphs[place].neighbours(users, self._random)
            losses.append(_loss(here[0], users, there[0], users, other_users))
            losses.append(_loss(here[0], users, there[1], items, other_items))
        return torch.stack(losses).mean()


def _loss(
    anchors: torch.Tensor,
    own: NDArray[np.int64],
    table: torch.Tensor,
    positives: NDArray[np.int64],
    others: NDArray[np.int64],
) -> torch.Tensor:
    is_own = torch.from_numpy(positives[:, None] == others)
    return contrastive_loss(anchors[own], table[positives], table[others], is_own)


def advance(training: Training, arm: Arm, weight: float, until: int, on_step: OnStep) -> list[float]:
    """Trains up to this step of an arm. Returns its inter-domain losses. `weight`: of these in the joint arm.

    Every arm has the same number of steps. A step of the joint arm has all losses.
    """
    options, losses = training.options, []
    for step in range(training.steps, until):
        of_stage_2 = step - options.intra_steps
        if arm is Arm.ALONE:
            training.update((TARGET,), None)
        elif arm is Arm.JOINT:
            losses.append(training.update(BOTH, Inter(drawn_share(step / options.steps), weight)))
        elif of_stage_2 < 0 or of_stage_2 % 2 == 0:
            training.update(BOTH, None)
        else:
            share = 1.0 if arm is Arm.RANDOM else drawn_share(of_stage_2 / options.inter_steps)
            losses.append(training.update((), Inter(share, stops=arm is not Arm.NO_STOP)))
        on_step()
    return losses
