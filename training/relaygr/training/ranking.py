"""Judges a model by full ranking: each user's held-out behaviours among all items of the vocabulary.

Every metric is a number for each user, so that two models are compared on the same users in pairs. `ndcg@10` and
`hr@10` treat all held-out items of a user as relevant; items equal in score share their places. `auc` and
`log_loss` judge the probability of a rating of at least 4 among a user's held-out behaviours; a user without both kinds
has no AUC. A held-out item that is no candidate (not in the vocabulary, or in the history of a log without
repetitions) counts as relevant and is never found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray
from scipy.stats import t as student_t

from relaygr.runtime.errors import RelayError
from relaygr.training.splits import Part, Split

try:
    from torchmetrics.functional.classification import binary_auroc
    from torchmetrics.functional.retrieval import retrieval_hit_rate, retrieval_normalized_dcg
except OSError as error:
    # It imports matplotlib if that is installed, which needs a folder for its cache, though nothing is drawn.
    raise RelayError(f"torchmetrics cannot be imported: {error}.") from error

TOP: Final = 10
NDCG: Final = f"ndcg@{TOP}"
HIT_RATE: Final = f"hr@{TOP}"
AUC: Final = "auc"
LOG_LOSS: Final = "log_loss"
MOST_RANKED: Final = 20_000
"""Candidates of a user. From a larger vocabulary so many are drawn, the same for every model."""


class Model(Protocol):
    """What is judged."""

    def next_scores(self, user: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
        """float32 [items]: of these rows of the vocabulary, higher for what the user is more likely to take next."""

    def liked_probabilities(self, user: int, part: Part) -> torch.Tensor | None:
        """float32 [held-out behaviours]: probabilities of a rating of at least 4; None: the model has none."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One user's ranking, as it is written. All ids are those of messages."""

    user: str
    history: int
    held_out: list[int]
    top: list[int]
    """The best candidates, best first."""
    top_scores: list[float]
    liked: list[bool]
    """Of the held-out behaviours; empty without ratings."""
    liked_probabilities: list[float]


@dataclass(slots=True)
class Judged:
    """The metrics of a model on some users: float64 [users] by name; NaN where a user has none."""

    users: NDArray[np.int64]
    values: dict[str, NDArray[np.float64]]
    predictions: list[Prediction] = field(default_factory=list)

    def summary(self) -> dict[str, Estimate]:
        """The mean of each metric that some user has."""
        found = {name: estimate(values) for name, values in self.values.items()}
        return {name: each for name, each in found.items() if each.users}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over users with its 95 % interval."""

    mean: float
    low: float
    high: float
    users: int

    def with_half_width(self) -> str:
        """Such as `0.1478 ± 0.0082`."""
        return f"{self.mean:.4f} ± {(self.high - self.low) / 2:.4f}"

    def with_interval(self) -> str:
        """Of a difference, such as `+0.0865 (+0.0773 to +0.0957)`."""
        return f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f})"


def estimate(values: NDArray[np.float64], groups: Sequence[str] | None = None) -> Estimate:
    """The mean of the values that are not NaN. Of its interval (Student's t) the groups, such as the users of the
    values, are the sample; by default each value is.
    """
    is_known = ~np.isnan(values)
    values = values[is_known]
    if not values.size:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(values.mean())
    names = np.arange(values.size) if groups is None else np.asarray(groups)[is_known]
    sums = np.bincount(np.unique(names, return_inverse=True)[1], weights=values - mean)
    count = sums.size
    error = math.sqrt(float(np.square(sums).sum()) * count / (count - 1)) / values.size if count > 1 else math.nan
    half = float(student_t.ppf(0.975, count - 1)) * error if count > 1 else math.nan
    return Estimate(mean, mean - half, mean + half, count)


def chosen_users(split: Split, part: Part, most: int, seed: int) -> NDArray[np.int64]:
    """At most so many of the users that this part judges, the same for the same seed, ascending; 0: all."""
    judged = split.judged_users(part)
    if not most or most >= judged.size:
        return judged
    return np.sort(judged[np.random.default_rng([seed, judged.size]).permutation(judged.size)[:most]])


def candidates_of(split: Split, user: int, part: Part) -> NDArray[np.int64]:
    """Ascending rows of the vocabulary that are ranked for this part. They do not depend on the history served."""
    is_candidate = np.ones(split.num_items + 1, dtype=bool)
    if split.num_items > MOST_RANKED:
        is_candidate[:] = False
        is_candidate[np.random.default_rng(user).integers(0, split.num_items, MOST_RANKED)] = True
        is_candidate[split.rows[split.targets(user, part)]] = True
    if split.leaves_out_seen:
        is_candidate[split.rows[split.starts[user] : split.history_end(user, part)]] = False
    return np.flatnonzero(is_candidate[:-1])


def judge(
    split: Split,
    model: Model,
    part: Part,
    users: Sequence[int] | NDArray[np.int64],
    *,
    keeps_predictions: bool = False,
    on_user: Callable[[], None] = lambda: None,
) -> Judged:
    """Ranks all candidates for each user. Raises RelayError for scores that are not finite."""
    rows: list[dict[str, float]] = []
    predictions = []
    for user in np.asarray(users).tolist():
        targets = split.targets(user, part)
        candidates = candidates_of(split, user, part)
        scores = model.next_scores(user, part, torch.from_numpy(candidates))
        probabilities = model.liked_probabilities(user, part)
        if not bool(torch.isfinite(scores).all()):
            # Comparisons with NaN are false, so such scores could look like a perfect ranking.
            raise RelayError(
                f"The scores of user {split.users[user]} are not finite: the model is broken. Train again."
            )
        rows.append(
            _ranking_metrics(scores, np.isin(candidates, split.rows[targets]), split.behaviour_ids[targets])
            | _liked_metrics(probabilities, split.liked[targets])
        )
        if keeps_predictions:
            predictions.append(_prediction(split, user, part, scores, candidates, probabilities))
        on_user()
    values = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in (NDCG, HIT_RATE, AUC, LOG_LOSS)}
    return Judged(np.asarray(users), values, predictions)


def _ranking_metrics(
    ranked: torch.Tensor, is_held_out: NDArray[np.bool_], held_out: NDArray[np.int64]
) -> dict[str, float]:
    target = torch.from_numpy(is_held_out)
    lost = len(np.unique(held_out)) - int(is_held_out.sum())
    # Only the best places count, so what cannot reach them is left out; items equal to the last of them stay.
    if ranked.numel() > TOP:
        kept = (ranked >= torch.topk(ranked, TOP).values[-1]) | target
        ranked, target = ranked[kept], target[kept]
    # Held-out items that are no candidates stand below all others, and are never found. The candidates' scores become
    # whole numbers in the same order, so that "below" holds for scores of any size.
    ranked = torch.unique(ranked, return_inverse=True)[1].float()
    places_left = max(0, TOP - ranked.numel())
    ranked = torch.cat((ranked, -1.0 - torch.arange(places_left + lost)))
    target = torch.cat((target, torch.arange(places_left + lost) >= places_left))
    # Equal scores in a random order, so that no model gains from the order of the items.
    shuffled = torch.from_numpy(np.random.default_rng(len(ranked)).permutation(len(ranked)))
    return {
        NDCG: float(retrieval_normalized_dcg(ranked, target, top_k=TOP)),
        HIT_RATE: float(retrieval_hit_rate(ranked[shuffled], target[shuffled], top_k=TOP)),
    }


def _liked_metrics(probabilities: torch.Tensor | None, liked: NDArray[np.bool_]) -> dict[str, float]:
    if probabilities is None or not liked.size:
        return {AUC: math.nan, LOG_LOSS: math.nan}
    target = torch.from_numpy(liked.astype(np.int64))
    has_both = 0 < int(target.sum()) < target.numel()
    return {
        AUC: float(binary_auroc(probabilities, target)) if has_both else math.nan,
        LOG_LOSS: float(F.binary_cross_entropy(probabilities, target.float())),
    }


def _prediction(
    split: Split,
    user: int,
    part: Part,
    scores: torch.Tensor,
    candidates: NDArray[np.int64],
    probabilities: torch.Tensor | None,
) -> Prediction:
    targets = split.targets(user, part)
    best = torch.topk(scores, min(TOP, candidates.size))
    return Prediction(
        split.users[user],
        split.history_end(user, part) - int(split.starts[user]),
        split.behaviour_ids[targets].tolist(),
        split.item_ids[candidates[best.indices.numpy()]].tolist(),
        best.values.tolist(),
        split.liked[targets].tolist() if probabilities is not None else [],
        probabilities.tolist() if probabilities is not None else [],
    )


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """One JSON line for each user, from which the metrics can be computed again."""
    with path.open("w", encoding="utf-8") as file:
        for each in predictions:
            line: dict[str, Any] = {name: getattr(each, name) for name in Prediction.__slots__}
            file.write(json.dumps(line) + "\n")
