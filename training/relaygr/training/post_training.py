"""Post-training: three arms from one supervised ranker, with the same steps on the same batches.

    supervised      more of the losses that made it (`trainer.py`)
    weighted        the same, where each request's share of `next` is as exp(mean reward of its slates)
    group-relative  group-relative policy optimisation (`group_relative.py`), without these losses

The last two draw slates from a copy of the ranker that is renewed every few steps. Requests, and so rewards, are of the
training part. Each arm of each seed has the folder of a run: `seed-0/supervised`, ... Its state is saved at each
validation, and batches and draws depend on the seed and the step alone, so that an interrupted command goes on.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torchmetrics.functional.classification import binary_calibration_error

from relaygr.runtime.errors import RelayError
from relaygr.training.card import post_trained_card
from relaygr.training.dense.layers import Tensors
from relaygr.training.group_relative import draw_slates, group_relative_loss, has_spread, slate_rewards
from relaygr.training.logs import Log
from relaygr.training.plots import plot_post_training
from relaygr.training.ranker import candidate_logits
from relaygr.training.ranking import NDCG, Estimate, Judged, chosen_users, estimate, estimate_in_groups, judge
from relaygr.training.runs import CARD_FILE, METRICS_FILE, PostTrainingOptions, Run, TrainingOptions
from relaygr.training.sampling import TrainingBatch, training_batches
from relaygr.training.splits import Part, Split
from relaygr.training.trainer import LOSS_WEIGHTS, RankerModel, supervised_losses, take_step, target_scores
from relaygr.worker.model.checkpoint import Checkpoint, save_checkpoint
from relaygr.worker.model.inputs.known import IDS_TENSOR, write_action_names

CALIBRATION: Final = "calibration_error"
"""Mean distance between the probability of `liked` and the share that was liked, over ten bins of the probability."""
BEST: Final = "best"
FINAL: Final = "final"
_VALIDATIONS: Final = 3
_RENEWED: Final = 8
"""Steps after which slates are drawn from the newest policy."""


class Arm(enum.StrEnum):
    """How the ranker is trained on."""

    SUPERVISED = "supervised"
    WEIGHTED = "weighted"
    GROUP_RELATIVE = "group-relative"


@dataclass(frozen=True, slots=True)
class Validation:
    """The validation part after some steps."""

    step: int
    cpu_s: float
    """CPU time of training, without validations: other processes do not count."""
    ndcg: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How post-training is followed. Each may do nothing."""

    began: Callable[[str, int], None]
    stepped: Callable[[], None]
    validated: Callable[[str, Validation], None]


@dataclass(frozen=True, slots=True)
class Start:
    """The ranker to begin with, and what it is trained and judged on."""

    log: Log
    split: Split
    checkpoint: Checkpoint
    options: TrainingOptions

    def judged(self, tensors: Tensors, part: Part) -> Judged:
        most = self.options.test_users if part is Part.TEST else self.options.validation_users
        users = chosen_users(self.split, most, self.options.seed)
        return judge(
            self.split, RankerModel(self.split, self.checkpoint.config, tensors), part, users, keeps_predictions=True
        )

    def batches(self, seed: int, negatives: int) -> Iterator[TrainingBatch]:
        """Without end; of epochs that the ranker was not trained on."""
        known = self.options
        for epoch in itertools.count(known.epochs):
            for _, batch in training_batches(self.split, seed, epoch, known.places, negatives, known.max_history):
                yield batch


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm with one seed."""

    validations: list[Validation]
    best: int
    """Place of the best of them by NDCG@10."""
    groups: int
    without_spread: int
    """Groups without a signal, of those of group-relative."""
    test: dict[str, dict[str, float]]
    """Best or final checkpoint -> metric -> mean over users."""
    user_ndcg: list[float]
    """Of the best checkpoint, for each user of the test."""

    def validation(self, kept: str) -> Validation:
        return self.validations[self.best if kept == BEST else -1]


@dataclass(frozen=True, slots=True)
class Row:
    """An arm's best or final checkpoints, with means over seeds."""

    arm: Arm
    kept: str
    metrics: dict[str, float]
    less_supervised: dict[str, Estimate]
    """In pairs of the same seed; seeds are the sample (Student's t)."""
    steps: float
    cpu_s: float
    without_spread: float
    """Share of the groups without a signal."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of `relaygr train post-train`."""

    start: dict[str, float]
    rows: list[Row]
    over_seeds: Estimate
    """NDCG@10 of group-relative less that of supervised, best checkpoints; seeds are the sample."""
    over_users: Estimate
    """The same of the means over seeds; users are the sample."""
    recommended: Arm
    checkpoint: str
    """The recommended arm's with the best validation."""

    def sentence(self) -> str:
        is_better = self.recommended is Arm.GROUP_RELATIVE
        return (
            f"The {self.recommended} arm is recommended ({self.checkpoint}), because NDCG@10 of group-relative less "
            f"that of supervised is {'above zero' if is_better else 'not above zero'} in both 95 % intervals: "
            f"{self.over_seeds.with_interval()} over {self.over_seeds.users} seeds, {self.over_users.with_interval()} "
            f"over {self.over_users.users:,} users."
        )


def post_train(
    start: Start, paths: list[Path], options: PostTrainingOptions, seeds: int, folder: Path, progress: Progress
) -> Compared:
    """Trains the arms that `folder` lacks, and compares all. Raises RelayError for a folder with another run."""
    torch.set_num_threads(start.options.threads)
    run = Run(folder)
    run.begin(options, start.log, paths)
    found: dict[Arm, list[ArmResult]] = {arm: [] for arm in Arm}
    for seed, arm in itertools.product(range(seeds), Arm):
        own = Run(folder / f"seed-{seed}" / arm)
        if not own.is_finished:
            _Training(start, options, own, seed, arm).finish(progress)
        content = own.read_json(METRICS_FILE)
        found[arm].append(
            ArmResult(**{**content, "validations": [Validation(**each) for each in content["validations"]]})
        )
    progress.began("judging the start", 0)
    compared = _compared(judged_metrics(start.judged(dict(start.checkpoint.tensors), Part.TEST)), found, folder)
    plot_post_training(folder / "post-training.png", {arm: [one.validations for one in found[arm]] for arm in Arm})
    run.write_json(METRICS_FILE, asdict(compared))
    return compared


class _Training:
    """One arm with one seed, which goes on with the state in its folder."""

    def __init__(self, start: Start, options: PostTrainingOptions, run: Run, seed: int, arm: Arm) -> None:
        self._start, self._options, self._run, self._seed, self._arm = start, options, run, seed, arm
        self._config = start.checkpoint.config
        self._first = {name: each for name, each in start.checkpoint.tensors.items() if name != IDS_TENSOR}
        self._tensors = {name: each.clone().requires_grad_(True) for name, each in self._first.items()}
        self._drawing = self._best = self._first
        self._optimizer = torch.optim.Adam(self._tensors.values(), lr=options.learning_rate, betas=(0.9, 0.98))
        self._validations: list[Validation] = []
        self._groups = self._without_spread = 0
        self._restore()

    def finish(self, progress: Progress) -> None:
        """Trains to the last step, judges, and writes the files of the folder."""
        name, steps = f"seed {self._seed}, {self._arm}", self._options.steps
        ends = [steps * (number + 1) // _VALIDATIONS for number in range(_VALIDATIONS)]
        for end in ends[len(self._validations) :]:
            first = self._validations[-1].step if self._validations else 0
            progress.began(f"{name}, steps to {end}", end - first)
            cpu_s = self._train(range(first, end), progress.stepped)
            progress.began(f"{name}, validation", 0)
            self._validate(end, cpu_s)
            progress.validated(name, self._validations[-1])
        progress.began(f"{name}, test", 0)
        self._write()

    def _train(self, steps: range, stepped: Callable[[], None]) -> float:
        torch.manual_seed(self._seed * 1_000_003 + steps.start)
        batches = itertools.islice(self._start.batches(self._seed, self._options.negatives), *(steps.start, steps.stop))
        started_s = time.process_time()
        for step, batch in zip(steps, batches, strict=True):
            if (step - steps.start) % _RENEWED == 0:
                self._drawing = _copied(self._tensors)
            loss = self._loss(batch)
            if not bool(torch.isfinite(loss)):
                raise RelayError(
                    f"The loss of {self._arm} is {loss.item()} in step {step}: begin in a new folder with "
                    f"--learning-rate {self._options.learning_rate / 4:g}."
                )
            take_step(self._optimizer, self._tensors, loss)
            stepped()
        return time.process_time() - started_s

    def _loss(self, batch: TrainingBatch) -> torch.Tensor:
        if self._arm is Arm.SUPERVISED:
            return self._supervised_loss(batch, None)
        drawn = self._scores(self._drawing, batch)
        slates = draw_slates(drawn, self._options.group)
        rewards = slate_rewards(slates)
        if self._arm is Arm.WEIGHTED:
            return self._supervised_loss(batch, rewards.mean(1).softmax(0))
        self._groups += len(rewards)
        self._without_spread += int((~has_spread(rewards)).sum())
        scores = target_scores(candidate_logits(self._config, self._tensors, batch.inputs), batch)
        return group_relative_loss(
            scores, drawn, self._scores(self._first, batch), slates, rewards, self._options.kl_weight
        )

    def _supervised_loss(self, batch: TrainingBatch, request_weights: torch.Tensor | None) -> torch.Tensor:
        losses = supervised_losses(self._config, self._tensors, batch, self._start.options.dropout, request_weights)
        return losses @ torch.from_numpy(LOSS_WEIGHTS).float()

    @torch.no_grad()
    def _scores(self, tensors: Tensors, batch: TrainingBatch) -> torch.Tensor:
        return target_scores(candidate_logits(self._config, tensors, batch.inputs), batch)

    def _validate(self, step: int, cpu_s: float) -> None:
        before_s = self._validations[-1].cpu_s if self._validations else 0.0
        ndcg = self._start.judged(self._tensors, Part.VALIDATION).summary()[NDCG].mean
        if ndcg > max((each.ndcg for each in self._validations), default=-1.0):
            self._best = _copied(self._tensors)
        self._validations.append(Validation(step, round(before_s + cpu_s, 2), ndcg))
        self._run.folder.mkdir(parents=True, exist_ok=True)
        self._run.save_state(
            {
                "tensors": _copied(self._tensors),
                "best": self._best,
                "optimizer": self._optimizer.state_dict(),
                "validations": [asdict(each) for each in self._validations],
                "groups": (self._groups, self._without_spread),
            }
        )

    def _restore(self) -> None:
        found = self._run.load_state()
        if found is None:
            return
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(found["tensors"][name])
        self._optimizer.load_state_dict(found["optimizer"])
        self._best, self._validations = found["best"], [Validation(**each) for each in found["validations"]]
        self._groups, self._without_spread = found["groups"]

    def _write(self) -> None:
        best = max(range(_VALIDATIONS), key=lambda place: self._validations[place].ndcg)
        judged = {BEST: self._start.judged(self._best, Part.TEST)}
        is_last = best == _VALIDATIONS - 1
        judged[FINAL] = judged[BEST] if is_last else self._start.judged(self._tensors, Part.TEST)
        ids = torch.from_numpy(self._start.split.item_ids.copy())
        save_checkpoint(self._run.checkpoint, self._config, {**self._best, IDS_TENSOR: ids})
        about = f"arm {self._arm}, seed {self._seed}, step {self._validations[best].step}"
        card = post_trained_card(about, asdict(self._options), judged[BEST].summary())
        (self._run.checkpoint / CARD_FILE).write_text(card, encoding="utf-8")
        if names := self._start.log.action_names:
            write_action_names(self._run.checkpoint, names)
        result = ArmResult(
            self._validations,
            best,
            self._groups,
            self._without_spread,
            {kept: judged_metrics(each) for kept, each in judged.items()},
            judged[BEST].values[NDCG].tolist(),
        )
        self._run.write_json(METRICS_FILE, asdict(result))
        self._run.remove_state()


def _copied(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def judged_metrics(judged: Judged) -> dict[str, float]:
    """Means over users, and the calibration error of `liked` over all held-out behaviours."""
    found = {name: each.mean for name, each in judged.summary().items()}
    probabilities = [each for one in judged.predictions for each in one.liked_probabilities]
    if probabilities:
        liked = torch.tensor([each for one in judged.predictions for each in one.liked]).long()
        found[CALIBRATION] = float(binary_calibration_error(torch.tensor(probabilities), liked, n_bins=10))
    return found


def _compared(start: dict[str, float], found: Mapping[Arm, Sequence[ArmResult]], folder: Path) -> Compared:
    rows = [_row(arm, kept, found) for arm in Arm for kept in (BEST, FINAL)]
    over_seeds = next(row for row in rows if row.arm is Arm.GROUP_RELATIVE and row.kept == BEST).less_supervised[NDCG]
    ours, theirs = (
        np.mean([one.user_ndcg for one in found[arm]], axis=0) for arm in (Arm.GROUP_RELATIVE, Arm.SUPERVISED)
    )
    over_users = estimate(ours - theirs)
    recommended = Arm.GROUP_RELATIVE if over_seeds.low > 0 and over_users.low > 0 else Arm.SUPERVISED
    seed = int(np.argmax([one.validation(BEST).ndcg for one in found[recommended]]))
    checkpoint = Run(folder / f"seed-{seed}" / recommended).checkpoint
    return Compared(start, rows, over_seeds, over_users, recommended, str(checkpoint))


def _row(arm: Arm, kept: str, found: Mapping[Arm, Sequence[ArmResult]]) -> Row:
    ours, theirs = (
        {name: np.array([one.test[kept][name] for one in found[each]]) for name in found[each][0].test[kept]}
        for each in (arm, Arm.SUPERVISED)
    )
    at = [one.validation(kept) for one in found[arm]]
    seeds = [str(number) for number in range(len(at))]
    return Row(
        arm,
        kept,
        {name: float(values.mean()) for name, values in ours.items()},
        {name: estimate_in_groups(values - theirs[name], seeds) for name, values in ours.items()},
        float(np.mean([each.step for each in at])),
        float(np.mean([each.cpu_s for each in at])),
        sum(one.without_spread for one in found[arm]) / max(1, sum(one.groups for one in found[arm])),
    )
