"""Compares ways to train retrieval over two domains, in pairs of seeds, by the target's held-out behaviours.

Each held-out behaviour is one query: its item is ranked among the target's items that are neither in the user's history
nor held out (*full*), and among 99 random ones of these, the same for every arm (*sampled*). A metric is the mean over
a user's queries, then over users: *warm* ones, and *cold* ones, whose behaviours in the target were left out. Each
finished arm of a seed is a file in the run's folder `arms`, so that an interrupted comparison goes on.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.training.contrastive import SOURCE, TARGET, Arm, OnStep, RetrievalOptions, Training, advance
from relaygr.training.domains import Domains, TwoLogs
from relaygr.training.ranking import TOP, Estimate, estimate_in_groups
from relaygr.training.retrieval import MODEL_FILE, save_retrieval
from relaygr.training.runs import METRICS_FILE, Run
from relaygr.training.splits import Part

SAMPLED: Final = 99
JOINT_WEIGHTS: Final = (0.1, 0.3, 1.0)
"""Of the inter-domain loss in the joint arm: the best by validation NDCG@10 of the first seed is taken."""
CHOSEN: Final = "full ndcg@10"
"""The metric by which the directions are judged."""
SPREAD: Final = "loss spread"
DIRECTIONS: Final = {
    Arm.JOINT: "separated stages rank better than one joint loss",
    Arm.NO_STOP: "stop-gradient narrows the spread of the loss",
    Arm.RANDOM: "the curriculum ranks better than random negatives",
}
"""What the paper claims, by the arm that the separated one is compared with."""
OnWork = Callable[[str, int], None]
_LAST_SHARE: Final = 0.25
"""Of the inter-domain steps, whose losses' standard deviation is the spread."""
_QUERIES: Final = 4096


class Verdict(enum.StrEnum):
    """Of a direction, by the 95 % interval of the difference."""

    HELD = "held"
    NOT_HELD = "not held"
    UNDECIDED = "undecided"


class Queries:
    """The held-out behaviours of one part."""

    def __init__(self, domains: Domains, part: Part, seed: int) -> None:
        split, items = domains.split, domains.num_target
        is_held_out = domains.in_part(part) & domains.is_target
        self.users, own = np.unique(domains.owners[is_held_out], return_inverse=True)
        self.is_cold = domains.is_cold[self.users]
        self._own = torch.from_numpy(own)
        self._items = torch.from_numpy(split.rows[is_held_out].astype(np.int64).clip(max=items))
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
                (wanted[part], table[self._own[part]]) for part in torch.arange(len(wanted)).split(_QUERIES)
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
class Difference:
    """Between the separated arm and another one, over seeds."""

    other: Arm
    group: str
    metric: str
    value: Estimate
    """By how much the separated arm is better: higher in a metric, lower in the spread of the loss."""
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Compared:
    """The result."""

    arms: dict[Arm, dict[str, dict[str, Estimate]]]
    """Arm -> group -> metric -> mean over seeds. The group `loss` is of the last inter-domain steps."""
    differences: list[Difference]
    joint_weights: dict[float, float]
    """Weight of the inter-domain loss -> validation NDCG@10 of the first seed."""
    seeds: int
    cpu_s: float

    def sentence(self) -> str:
        """What came out, in one sentence."""
        found = {(each.other, each.metric): each for each in self.differences if each.group != "cold"}
        said = []
        for arm, claim in DIRECTIONS.items():
            each = found[arm, SPREAD if arm is Arm.NO_STOP else CHOSEN]
            said.append(f"{claim}: {each.verdict} ({each.value.with_interval()})")
        return f"Over {self.seeds} seeds, by {CHOSEN} of warm users and the spread of the loss: {'; '.join(said)}."


def compare(
    logs: TwoLogs, paths: list[Path], options: RetrievalOptions, seeds: int, run: Run, began: OnWork, stepped: OnStep
) -> Compared:
    """Trains the arms that the run's folder does not have. Raises RelayError if it has another run."""
    torch.set_num_threads(options.threads)
    run.begin(options, logs.log, paths)
    arms, weights, results = Run(run.folder / "arms"), {}, []

    def kept(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        file = f"{name.replace(' ', '-')}.json"
        if not (arms.folder / file).exists():
            began(name, options.steps)
            started_s = time.process_time()
            arms.write_json(file, {**make(), "cpu_s": round(time.process_time() - started_s, 1)})
        return arms.read_json(file)

    for seed in range(seeds):
        trial = _Trial(logs, options, seed, run.folder, stepped)
        if not seed:
            for weight in JOINT_WEIGHTS:
                found = kept(f"joint {weight}", partial(trial.judged, Arm.JOINT, weight, Part.VALIDATION))
                weights[weight] = found["warm"][CHOSEN]
        best = max(weights, key=weights.__getitem__)
        results.append({arm: kept(f"{arm} {seed}", partial(trial.judged, arm, best, Part.TEST)) for arm in Arm})
    compared = _compared(results, weights)
    run.write_json(METRICS_FILE, {**asdict(compared), "sentence": compared.sentence()})
    return compared


class _Trial:
    """The arms of one seed."""

    def __init__(self, logs: TwoLogs, options: RetrievalOptions, seed: int, folder: Path, stepped: OnStep) -> None:
        self._logs, self._options, self._seed, self._folder, self._stepped = logs, options, seed, folder, stepped

    @cached_property
    def _domains(self) -> Domains:
        return self._logs.domains(self._options.cold_share, self._seed)

    @cached_property
    def _after_stage_1(self) -> Training:
        training = Training(self._domains, self._options, self._seed)
        advance(training, Arm.SEPARATED, 1.0, self._options.intra_steps, self._stepped)
        return training

    def judged(self, arm: Arm, weight: float, part: Part) -> dict[str, Any]:
        """Metrics by group, and the loss of the last inter-domain steps, if the arm has it.

        The separated arm of the first seed is written as the model.
        """
        training, losses = self._trained(arm, weight)
        queries = Queries(self._domains, part, self._seed)
        last = losses[-math.ceil(_LAST_SHARE * len(losses)) :]
        loss = {"loss": float(np.mean(last)), SPREAD: float(np.std(last))} if losses else {}
        if arm is Arm.SEPARATED and not self._seed:
            save_retrieval(self._folder / MODEL_FILE, training)
        return {**queries.metrics(target_scores(training, queries, arm)), "loss": loss}

    def _trained(self, arm: Arm, weight: float) -> tuple[Training, list[float]]:
        """After all steps. Arms that have stage 1 in common begin with its result."""
        begins_anew = arm in (Arm.JOINT, Arm.ALONE, Arm.POPULARITY)
        training = Training(self._domains, self._options, self._seed) if begins_anew else deepcopy(self._after_stage_1)
        steps = 0 if arm is Arm.POPULARITY else self._options.steps
        return training, advance(training, arm, weight, steps, self._stepped)


def _compared(results: list[dict[Arm, dict[str, Any]]], weights: dict[float, float]) -> Compared:
    seeds = [str(seed) for seed in range(len(results))]

    def values(arm: Arm, group: str, metric: str) -> NDArray[np.float64]:
        return np.array([result[arm][group][metric] for result in results], dtype=np.float64)

    arms: dict[Arm, dict[str, dict[str, Estimate]]] = {arm: {} for arm in Arm}
    differences = []
    for arm, group in product(Arm, ("warm", "cold", "loss")):
        arms[arm][group] = {
            metric: estimate_in_groups(values(arm, group, metric), seeds) for metric in results[0][arm][group]
        }
        # Joint steps are other ones than those of stage 2, so their losses are no pair.
        if arm is Arm.SEPARATED or (group == "loss" and arm is Arm.JOINT):
            continue
        for metric in arms[arm][group]:
            gain = values(Arm.SEPARATED, group, metric) - values(arm, group, metric)
            value = estimate_in_groups(-gain if group == "loss" else gain, seeds)
            differences.append(Difference(arm, group, metric, value, verdict(value)))
    cpu_s = sum(each["cpu_s"] for result in results for each in result.values())
    return Compared(arms, differences, weights, len(seeds), cpu_s)


def verdict(value: Estimate) -> Verdict:
    """Undecided if the interval holds 0, and with one seed."""
    if value.low > 0:
        return Verdict.HELD
    return Verdict.NOT_HELD if value.high < 0 else Verdict.UNDECIDED
