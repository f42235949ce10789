"""Compares ways to train retrieval over two domains, in pairs of seeds, by the target's held-out behaviours.

Each held-out behaviour is one query: its item is ranked among the target's items that are neither in the user's history
nor held out (*full*), and among 99 random ones of these, the same for every arm (*sampled*). A metric is the mean over
a user's queries, then over users: *warm* ones, and *cold* ones, whose behaviours in the target were left out. The
learning rate of each arm, and the weight of the joint one, are those with the best validation NDCG@10 of the first
seed. Each finished training is a file in the run's folder `arms`, so that an interrupted comparison goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from relaygr.training.contrastive import SOURCE, TARGET, Arm, OnStep, Training, advance
from relaygr.training.domains import Domains
from relaygr.training.options import RetrievalOptions
from relaygr.training.ranking import TOP, Estimate, estimate
from relaygr.training.retrieval import MODEL_FILE, save_retrieval
from relaygr.training.runs import METRICS_FILE, Run, writing
from relaygr.training.splits import Part

SAMPLED: Final = 99
LEARNING_RATES: Final = (3e-3, 1e-2, 3e-2)
JOINT_WEIGHTS: Final = (0.3, 1.0, 3.0)
"""Of the inter-domain loss in the joint arm."""
CHOSEN: Final = "full ndcg@10"
"""The metric by which the directions are judged."""
USERS: Final = "users"
LOSS: Final = "loss"
SPREAD: Final = "spread of the loss"
DIRECTIONS: Final = {
    Arm.JOINT: "separated stages rank better than one joint loss",
    Arm.NO_STOP: "stop-gradient narrows the spread of the loss",
    Arm.RANDOM: "the curriculum ranks better than random negatives",
}
"""What the paper claims, by the arm that the separated one is compared with."""
OnWork = Callable[[str, int], None]
Result = dict[str, Any]
"""Group -> metric -> value. The group `loss` is of the last inter-domain steps. `USERS` -> each user's `CHOSEN`."""
_LAST_SHARE: Final = 0.25
"""Of the inter-domain steps, whose losses' standard deviation is the spread."""
_QUERIES: Final = 4096


class Queries:
    """The held-out behaviours of one part."""

    def __init__(self, domains: Domains, part: Part, seed: int) -> None:
        split, items = domains.split, domains.num_target
        held_out = domains.held_out(part)
        self.users, own = np.unique(domains.owners[held_out], return_inverse=True)
        self.is_cold = domains.is_cold[self.users]
        self._own = torch.from_numpy(own)
        self._items = torch.from_numpy(split.rows[held_out].astype(np.int64).clip(max=items))
        self.histories = domains.histories(part, self.users)
        # The last column is that of items outside the vocabulary.
        is_out = torch.zeros(len(self.users), items + 1, dtype=torch.bool)
        is_out[:, items] = True
        if split.leaves_out_seen:
            users, seen = self.histories[TARGET].nonzero()
            is_out[users, seen] = True
        self._is_missed = is_out[self._own, self._items]
        is_out[self._own, self._items] = True
        self._is_out = is_out[:, :items]
        keys = torch.rand(self._is_out.shape, generator=torch.Generator().manual_seed(seed))
        self._sampled = keys.masked_fill(self._is_out, -1.0).topk(min(SAMPLED, items)).indices

    def metrics(self, scores: torch.Tensor) -> Result:
        """Means over users, and the users' values (NaN: cold). `scores`: float32 [users, target items]."""
        wanted = torch.cat((scores, torch.zeros(len(scores), 1)), 1)[self._own, self._items]
        others = scores.masked_fill(self._is_out, -math.inf)
        found: Result = {"warm": {}, "cold": {}}
        for name, table in (("full", others), ("sampled", others.gather(1, self._sampled))):
            places = self._places(wanted, table)
            hits = (places < TOP).double()
            for metric, values in ((f"hit@{TOP}", hits), (f"ndcg@{TOP}", hits / torch.log2(places + 2))):
                sums = np.bincount(self._own.numpy(), weights=values.numpy())
                means = sums / np.bincount(self._own.numpy())
                for group, kept in (("warm", ~self.is_cold), ("cold", self.is_cold)):
                    found[group][f"{name} {metric}"] = float(means[kept].mean()) if kept.any() else math.nan
                if f"{name} {metric}" == CHOSEN:
                    found[USERS] = np.where(self.is_cold, math.nan, means).tolist()
        return found

    def _places(self, wanted: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """[queries], from 0: the number of better items. Of items equal in score a half is better."""
        places = [
            (rows > own[:, None]).sum(1) + 0.5 * (rows == own[:, None]).sum(1)
            for own, rows in (
                (wanted[part], table[self._own[part]]) for part in torch.split(torch.arange(len(wanted)), _QUERIES)
            )
        ]
        return torch.cat(places).double().masked_fill(self._is_missed, math.inf)


def target_scores(training: Training, queries: Queries, arm: Arm) -> torch.Tensor:
    """[users, target items]: products with the sum of a user's rows in both domains, or with that of the target."""
    if arm is Arm.POPULARITY:
        graph = training.domains.graphs[TARGET]
        counts = np.bincount(graph.items, minlength=graph.num_items).astype(np.float32)
        return torch.from_numpy(counts).expand(len(queries.users), -1)
    with torch.inference_mode():
        rows, hidden = training.tables(TARGET)
        users = training.encoders[TARGET].user_rows(queries.histories[TARGET], hidden)
        if arm is not Arm.ALONE:
            users = users + training.encoders[SOURCE].user_rows(queries.histories[SOURCE], training.tables(SOURCE)[1])
        return users @ rows.T


@dataclass(frozen=True, slots=True)
class Choice:
    """What is searched for an arm."""

    learning_rate: float
    weight: float = 1.0
    """Of the inter-domain loss in the joint arm."""

    def __str__(self) -> str:
        return f"learning rate {self.learning_rate:g}, weight {self.weight:g}"


_CHOICES: Final = {
    Arm.SEPARATED: [Choice(rate) for rate in LEARNING_RATES],
    Arm.JOINT: [Choice(*each) for each in product(LEARNING_RATES, JOINT_WEIGHTS)],
    Arm.ALONE: [Choice(rate) for rate in LEARNING_RATES],
}
"""The other arms differ from the separated one in one thing, so they have its learning rate."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Means over seeds, by arm, group and metric. The group `loss` is of the last inter-domain steps."""

    arms: dict[Arm, dict[str, dict[str, Estimate]]]
    gains: dict[Arm, dict[str, dict[str, Estimate]]]
    """By how much the separated arm is better than another: higher in a metric, lower in the loss and its spread."""
    gains_over_users: dict[Arm, Estimate]
    """The same in `CHOSEN` of warm users, with the users as the sample: of each, the mean over the seeds."""
    searched: dict[Arm, dict[str, float]]
    """Choice -> validation NDCG@10 of the first seed."""
    served: Arm
    """The better of the separated and the joint arm by that, whose model is written."""
    seeds: int

    def sentence(self) -> str:
        """What came out, in one sentence."""
        said = []
        for arm, claim in DIRECTIONS.items():
            gains = {"seeds": self.gains[arm]["warm"][CHOSEN], "users": self.gains_over_users[arm]}
            if arm is Arm.NO_STOP:
                gains = {"seeds": self.gains[arm]["loss"][SPREAD]}
            shown = " and ".join(f"{gain.with_interval()} over {sample}" for sample, gain in gains.items())
            said.append(f"{claim}: {verdict(list(gains.values()))}, {shown}")
        return (
            f"Over {self.seeds} seeds, by {CHOSEN} of warm users and the spread of the loss: {'; '.join(said)}. "
            f"{MODEL_FILE} is the {self.served} arm's, the better one of validation."
        )


def verdict(gains: list[Estimate]) -> str:
    """Undecided if a 95 % interval holds 0, and with one seed."""
    if all(gain.low > 0 for gain in gains):
        return "held"
    return "not held" if all(gain.high < 0 for gain in gains) else "undecided"


def compare(
    logs: Domains, paths: list[Path], options: RetrievalOptions, seeds: int, run: Run, began: OnWork, stepped: OnStep
) -> Compared:
    """Trains what the run's folder does not have. Raises RelayError if it has another run."""
    torch.set_num_threads(options.threads)
    with run.begun(options, logs.log, paths):
        return _train_and_compare(logs, options, seeds, run, began, stepped)


def _train_and_compare(
    logs: Domains, options: RetrievalOptions, seeds: int, run: Run, began: OnWork, stepped: OnStep
) -> Compared:
    trials = [_Trial(logs, options, seed, run.folder, began, stepped) for seed in range(seeds)]
    searched = {
        arm: {choice: trials[0].kept(arm, choice, Part.VALIDATION)["warm"][CHOSEN] for choice in choices}
        for arm, choices in _CHOICES.items()
    }
    best = {arm: max(found, key=found.__getitem__) for arm, found in searched.items()}
    served = max((Arm.SEPARATED, Arm.JOINT), key=lambda arm: searched[arm][best[arm]])
    models = {(served, 0): run.folder / MODEL_FILE}
    results = [
        {
            arm: trial.kept(arm, best.get(arm, best[Arm.SEPARATED]), Part.TEST, models.get((arm, trial.seed)))
            for arm in Arm
        }
        for trial in trials
    ]
    found_by = {arm: {str(each): found[each] for each in found} for arm, found in searched.items()}
    compared = _compared(results, found_by, served)
    run.write_json(METRICS_FILE, {**asdict(compared), "sentence": compared.sentence()})
    return compared


@dataclass(frozen=True, slots=True)
class _Trial:
    """The trainings of one seed."""

    logs: Domains
    options: RetrievalOptions
    seed: int
    folder: Path
    began: OnWork
    stepped: OnStep

    def kept(self, arm: Arm, choice: Choice, part: Part, model: Path | None = None) -> Result:
        """What the folder has of this training, or else what it now gives. `model`: the file to write it to."""
        name = f"{arm}, {choice}, {part}, seed {self.seed}"
        arms, file = Run(self.folder / "arms"), f"{name.replace(', ', '_').replace(' ', '-')}.json"
        if not (arms.folder / file).exists():
            self.began(name, self.options.steps)
            arms.write_json(file, self._judged(arm, choice, part, model))
        return arms.read_json(file)

    def _judged(self, arm: Arm, choice: Choice, part: Part, model: Path | None) -> Result:
        domains = self.logs.with_cold(self.options.cold_share, self.seed)
        training = Training(domains, self.options, choice.learning_rate, self.seed)
        steps = 0 if arm is Arm.POPULARITY else self.options.steps
        losses = advance(training, arm, choice.weight, steps, self.stepped)
        last = losses[-math.ceil(_LAST_SHARE * len(losses)) :]
        loss = {LOSS: float(np.mean(last)), SPREAD: float(np.std(last))} if losses else {}
        if model is not None:
            with writing(model) as partial:
                save_retrieval(partial, training)
        queries = Queries(domains, part, self.seed)
        return {**queries.metrics(target_scores(training, queries, arm)), "loss": loss}


def _compared(results: list[dict[Arm, Result]], searched: dict[Arm, dict[str, float]], served: Arm) -> Compared:
    arms: dict[Arm, dict[str, dict[str, Estimate]]] = {}
    gains: dict[Arm, dict[str, dict[str, Estimate]]] = {}
    over_users: dict[Arm, Estimate] = {}
    # JSON has no NaN, so None: of cold users, or without them.
    users = {arm: np.array([each[arm][USERS] for each in results], dtype=np.float64) for arm in Arm}
    for arm in Arm:
        over_users[arm] = estimate(np.ma.masked_invalid(users[Arm.SEPARATED] - users[arm]).mean(0).filled(math.nan))
        arms[arm], gains[arm] = {}, {}
        for group in ("warm", "cold", "loss"):
            arms[arm][group], gains[arm][group] = {}, {}
            for metric in results[0][arm][group]:
                values, ours = (
                    np.array([result[each][group][metric] for result in results], dtype=np.float64)
                    for each in (arm, Arm.SEPARATED)
                )
                arms[arm][group][metric] = estimate(values)
                gains[arm][group][metric] = estimate(values - ours if group == "loss" else ours - values)
    return Compared(arms, gains, over_users, searched, served, len(results))
