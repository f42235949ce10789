"""Compares ways to train retrieval over two domains, in pairs of seeds, by the target's held-out behaviours.

Each held-out behaviour is one query: its item is ranked among the target's items that are neither in the user's history
nor held out (*full*), and among 99 random ones of these, the same for every arm (*sampled*). A metric is the mean over
a user's queries, then over users: *warm* ones, and *cold* ones, whose behaviours in the target were left out. Each
finished arm of a seed is a file in the run's folder `arms`, so that an interrupted comparison goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.training.contrastive import SOURCE, TARGET, Arm, OnStep, RetrievalOptions, Training, advance
from relaygr.training.domains import Domains
from relaygr.training.ranking import TOP, Estimate, estimate_in_groups
from relaygr.training.retrieval import MODEL_FILE, save_retrieval
from relaygr.training.runs import METRICS_FILE, Run
from relaygr.training.splits import Part

SAMPLED: Final = 99
JOINT_WEIGHTS: Final = (0.3, 1.0, 3.0)
"""Of the inter-domain loss in the joint arm: the best by validation NDCG@10 of the first seed is taken."""
CHOSEN: Final = "full ndcg@10"
"""The metric by which the directions are judged."""
LOSS: Final = "loss"
SPREAD: Final = "spread of the loss"
DIRECTIONS: Final = {
    Arm.JOINT: "separated stages rank better than one joint loss",
    Arm.NO_STOP: "stop-gradient narrows the spread of the loss",
    Arm.RANDOM: "the curriculum ranks better than random negatives",
}
"""What the paper claims, by the arm that the separated one is compared with."""
OnWork = Callable[[str, int], None]
Result = dict[str, dict[str, Any]]
"""Group -> metric -> value. The group `loss` is of the last inter-domain steps, with the CPU time."""
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
            users, seen = self.histories[TARGET].coalesce().indices()
            is_out[users, seen] = True
        self._is_missed = is_out[self._own, self._items]
        is_out[self._own, self._items] = True
        self._is_out = is_out[:, :items]
        keys = torch.rand(self._is_out.shape, generator=torch.Generator().manual_seed(seed))
        self._sampled = keys.masked_fill(self._is_out, -1.0).topk(min(SAMPLED, items)).indices

    def metrics(self, scores: torch.Tensor) -> dict[str, dict[str, float]]:
        """Group -> metric -> mean over users. `scores`: float32 [users, target items]."""
        wanted = torch.cat((scores, torch.zeros(len(scores), 1)), 1)[self._own, self._items]
        others = scores.masked_fill(self._is_out, -math.inf)
        found: dict[str, dict[str, float]] = {"warm": {}, "cold": {}}
        for name, table in (("full", others), ("sampled", others.gather(1, self._sampled))):
            places = self._places(wanted, table)
            hits = (places < TOP).double()
            for metric, values in ((f"hit@{TOP}", hits), (f"ndcg@{TOP}", hits / torch.log2(places + 2))):
                sums = np.bincount(self._own.numpy(), weights=values.numpy())
                means = sums / np.bincount(self._own.numpy())
                for group, kept in (("warm", ~self.is_cold), ("cold", self.is_cold)):
                    found[group][f"{name} {metric}"] = float(means[kept].mean()) if kept.any() else math.nan
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
        hidden, rows = training.tables(TARGET)
        users = training.encoders[TARGET].user_rows(queries.histories[TARGET], hidden)
        if arm is not Arm.ALONE:
            users = users + training.encoders[SOURCE].user_rows(queries.histories[SOURCE], training.tables(SOURCE)[0])
        return users @ rows.T


@dataclass(frozen=True, slots=True)
class Compared:
    """Means over seeds, by arm, group and metric. The group `loss` is of the last inter-domain steps."""

    arms: dict[Arm, dict[str, dict[str, Estimate]]]
    gains: dict[Arm, dict[str, dict[str, Estimate]]]
    """By how much the separated arm is better than another: higher in a metric, lower in the loss and its spread."""
    joint_weights: dict[float, float]
    """Weight of the inter-domain loss -> validation NDCG@10 of the first seed."""
    seeds: int

    def sentence(self) -> str:
        """What came out, in one sentence."""
        said = []
        for arm, claim in DIRECTIONS.items():
            gain = self.gains[arm]["loss"][SPREAD] if arm is Arm.NO_STOP else self.gains[arm]["warm"][CHOSEN]
            said.append(f"{claim}: {verdict(gain)}, {gain.with_interval()}")
        return f"Over {self.seeds} seeds, by {CHOSEN} of warm users and the spread of the loss: {'; '.join(said)}."


def verdict(gain: Estimate) -> str:
    """Undecided if the 95 % interval holds 0, and with one seed."""
    if gain.low > 0:
        return "held"
    return "not held" if gain.high < 0 else "undecided"


def compare(
    logs: Domains, paths: list[Path], options: RetrievalOptions, seeds: int, run: Run, began: OnWork, stepped: OnStep
) -> Compared:
    """Trains the arms that the run's folder does not have. Raises RelayError if it has another run."""
    torch.set_num_threads(options.threads)
    run.begin(options, logs.log, paths)
    weights: dict[float, float] = {}
    results = []
    for seed in range(seeds):
        trial = _Trial(logs.with_cold(options.cold_share, seed), options, seed, run.folder, began, stepped)
        weights = weights or {
            weight: trial.kept(f"weight {weight}", Arm.JOINT, weight, Part.VALIDATION)["warm"][CHOSEN]
            for weight in JOINT_WEIGHTS
        }
        best = max(weights, key=weights.__getitem__)
        results.append({arm: trial.kept(arm, arm, best, Part.TEST) for arm in Arm})
    compared = _compared(results, weights)
    run.write_json(METRICS_FILE, {**asdict(compared), "sentence": compared.sentence()})
    return compared


@dataclass
class _Trial:
    """The arms of one seed."""

    domains: Domains
    options: RetrievalOptions
    seed: int
    folder: Path
    began: OnWork
    stepped: OnStep

    def kept(self, name: str, arm: Arm, weight: float, part: Part) -> Result:
        """What the folder has under this name, or else what the arm now gives."""
        arms, file = Run(self.folder / "arms"), f"{name.replace(' ', '-')}-{self.seed}.json"
        if not (arms.folder / file).exists():
            self.began(f"{name}, seed {self.seed}", self.options.steps)
            arms.write_json(file, self._judged(arm, weight, part))
        return arms.read_json(file)

    def _judged(self, arm: Arm, weight: float, part: Part) -> Result:
        """Metrics by group. The separated arm of the first seed is written as the model."""
        started_s = time.process_time()
        training, losses = self._trained(arm, weight)
        queries = Queries(self.domains, part, self.seed)
        found = queries.metrics(target_scores(training, queries, arm))
        last = losses[-math.ceil(_LAST_SHARE * len(losses)) :]
        loss = {LOSS: float(np.mean(last)), SPREAD: float(np.std(last))} if losses else {}
        if arm is Arm.SEPARATED and not self.seed:
            save_retrieval(self.folder / MODEL_FILE, training)
        return {**found, "loss": {**loss, "cpu_s": time.process_time() - started_s}}

    def _trained(self, arm: Arm, weight: float) -> tuple[Training, list[float]]:
        """After all steps. Arms that have stage 1 in common begin with its result."""
        begins_anew = arm in (Arm.JOINT, Arm.ALONE, Arm.POPULARITY)
        training = Training(self.domains, self.options, self.seed) if begins_anew else deepcopy(self._after_stage_1)
        steps = 0 if arm is Arm.POPULARITY else self.options.steps
        return training, advance(training, arm, weight, steps, self.stepped)

    @cached_property
    def _after_stage_1(self) -> Training:
        training = Training(self.domains, self.options, self.seed)
        advance(training, Arm.SEPARATED, 1.0, self.options.intra_steps, self.stepped)
        return training


def _compared(results: list[dict[Arm, Result]], weights: dict[float, float]) -> Compared:
    arms: dict[Arm, dict[str, dict[str, Estimate]]] = {arm: {} for arm in Arm}
    gains = deepcopy(arms)
    for arm, group in product(Arm, results[0][Arm.SEPARATED]):
        arms[arm][group], gains[arm][group] = {}, {}
        for metric in results[0][arm][group]:
            # JSON has no NaN, so None: without cold users.
            values, ours = (
                np.array([result[each].get(group, {}).get(metric) for result in results], dtype=np.float64)
                for each in (arm, Arm.SEPARATED)
            )
            arms[arm][group][metric] = _over_seeds(values)
            gains[arm][group][metric] = _over_seeds(values - ours if group == "loss" else ours - values)
    return Compared(arms, gains, weights, len(results))


def _over_seeds(values: NDArray[np.float64]) -> Estimate:
    return estimate_in_groups(values, [str(seed) for seed in range(len(values))])
