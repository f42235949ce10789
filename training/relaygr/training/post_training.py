"""Post-training: three arms from one supervised ranker, with the same steps on the same batches.

    supervised      more of the losses that made it (`trainer.py`)
    weighted        the same, where each request's share of `next` is as exp(mean reward of its slates)
    group-relative  group-relative policy optimisation (`group_relative.py`), without these losses

The last two draw slates from a copy of the ranker that is renewed every few steps. Requests, and so rewards, are of the
training part. Each arm of each seed has a folder, such as `seed-0/supervised`. An interrupted command goes on with
the first arm that was not finished.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.training.card import post_trained_card
from relaygr.training.group_relative import draw_slates, group_relative_loss, has_spread, slate_rewards
from relaygr.training.layers import Tensors
from relaygr.training.logs import Log
from relaygr.training.models import CascadeModel, RankerModel, RetrievalModel
from relaygr.training.options import PostTrainingOptions, TrainingOptions
from relaygr.training.plots import plot_post_training
from relaygr.training.ranker import candidate_logits
from relaygr.training.ranking import NDCG, Estimate, Judged, chosen_users, estimate, judge
from relaygr.training.runs import METRICS_FILE, Run, write_beside
from relaygr.training.sampling import CandidateBatch, candidate_batches, with_found_negatives
from relaygr.training.splits import Part, Split
from relaygr.training.trainer import LOSS_WEIGHTS, supervised_losses, take_step, target_scores
from relaygr.worker.model.checkpoint import Checkpoint, save_checkpoint
from relaygr.worker.model.inputs.known import IDS_TENSOR

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
class Job:
    """The ranker to begin with, what it is trained and judged on, and how that is followed."""

    log: Log
    split: Split
    checkpoint: Checkpoint
    trained_with: TrainingOptions
    options: PostTrainingOptions
    began: Callable[[str, int], None]
    """(name of the work, its steps): a new piece of work begins."""
    stepped: Callable[[], None]

    def judged(self, tensors: Tensors, part: Part, name: str) -> Judged:
        most = self.options.test_users if part is Part.TEST else self.options.validation_users
        users = chosen_users(self.split, part, most, self.trained_with.seed)
        ranker = RankerModel(self.split, self.checkpoint.config, tensors)
        # Every arm orders what the ranker of RUN finds.
        retrieval = RetrievalModel(self.split, self.checkpoint.config, dict(self.checkpoint.tensors))
        model = CascadeModel(retrieval, ranker)
        self.began(f"{name}, {part}", len(users))
        return judge(self.split, model, part, users, keeps_predictions=True, on_user=self.stepped)

    def batches(self, seed: int) -> Iterator[CandidateBatch]:
        """Without end; of epochs that the ranker was not trained on. Negatives are found by the ranker of RUN."""
        known, negatives = self.trained_with, self.options.negatives
        config, tensors = self.checkpoint.config, dict(self.checkpoint.tensors)
        for epoch in itertools.count(known.candidate_epochs):
            for _, batch in candidate_batches(self.split, seed, epoch, known.places, negatives, known.max_history):
                yield with_found_negatives(config, tensors, batch)


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
    less_start: Estimate
    """NDCG@10 of the recommended arm, best checkpoints, less that of the ranker that all began with; users are the
    sample.
    """
    checkpoint: str
    """The recommended arm's with the best validation."""
    note: str = ""
    """Why the plot is missing."""

    def sentence(self) -> str:
        is_better = self.recommended is Arm.GROUP_RELATIVE
        return (
            f"The {self.recommended} arm is recommended ({self.checkpoint}), because NDCG@10 of group-relative less "
            f"that of supervised is {'above zero' if is_better else 'not above zero'} in both 95 % intervals: "
            f"{self.over_seeds.with_interval()} over {self.over_seeds.users} seeds, {self.over_users.with_interval()} "
            f"over {self.over_users.users:,} users. {self._against_start()}"
        )

    def _against_start(self) -> str:
        less = f"NDCG@10 less that of the ranker that all began with is {self.less_start.with_interval()}"
        return f"Its {less}." if self.less_start.low > 0 else f"But its {less}: keep that ranker."


def post_train(job: Job, paths: list[Path], seeds: int, folder: Path) -> Compared:
    """Trains the arms that `folder` lacks, and compares all. Raises RelayError for a folder with another run."""
    torch.set_num_threads(job.trained_with.threads)
    run = Run(folder)
    with run.begun(job.options, job.log, paths):
        return _train_and_compare(job, seeds, run)


def _train_and_compare(job: Job, seeds: int, run: Run) -> Compared:
    folder = run.folder
    found: dict[Arm, list[ArmResult]] = {arm: [] for arm in Arm}
    for seed, arm in itertools.product(range(seeds), Arm):
        own = Run(folder / f"seed-{seed}" / arm)
        if not own.is_finished:
            _train(job, own, seed, arm)
        content = own.read_json(METRICS_FILE)
        validations = [Validation(**each) for each in content.pop("validations")]
        found[arm].append(ArmResult(validations, **content))
    at_start = job.judged(dict(job.checkpoint.tensors), Part.TEST, "start")
    compared = _compared(_test_metrics(at_start), at_start.values[NDCG], found, folder)
    run.write_json(METRICS_FILE, asdict(compared))
    drawn = {str(arm): [one.validations for one in found[arm]] for arm in Arm}
    return replace(compared, note=plot_post_training(folder / "post-training.png", drawn))


def _train(job: Job, run: Run, seed: int, arm: Arm) -> None:
    """One arm with one seed. It ends with the folder's metrics: without them it is trained again."""
    torch.manual_seed(seed)
    name, policy, batches = f"seed {seed}, {arm}", _Policy(job, arm), job.batches(seed)
    rate = job.options.learning_rate
    optimizer = torch.optim.Adam(policy.tensors.values(), lr=rate, betas=(0.9, 0.98))
    validations: list[Validation] = []
    kept: list[Tensors] = []
    cpu_s = 0.0
    for number in range(_VALIDATIONS):
        first, end = (job.options.steps * each // _VALIDATIONS for each in (number, number + 1))
        job.began(f"{name}, steps to {end}", end - first)
        cpu_s -= time.process_time()
        for step in range(first, end):
            # It falls to zero: training ended with a low rate, which a constant one would undo in every arm.
            optimizer.param_groups[0]["lr"] = rate * (1 - step / job.options.steps)
            take_step(optimizer, policy.tensors, policy.loss(next(batches), step), f"step {step} of {arm}", rate)
            job.stepped()
        cpu_s += time.process_time()
        kept.append(_copied(policy.tensors))
        ndcg = job.judged(kept[-1], Part.VALIDATION, name).summary()[NDCG].mean
        validations.append(Validation(end, round(cpu_s, 2), ndcg))
    best = int(np.argmax([each.ndcg for each in validations]))
    at_best = job.judged(kept[best], Part.TEST, name)
    at_end = at_best if best == _VALIDATIONS - 1 else job.judged(kept[-1], Part.TEST, name)
    _write_checkpoint(job, run.checkpoint, kept[best], f"{name}, step {validations[best].step}", at_best)
    test = {BEST: _test_metrics(at_best), FINAL: _test_metrics(at_end)}
    ndcg_of_users = at_best.values[NDCG].tolist()
    result = ArmResult(validations, best, policy.groups, policy.without_spread, test, ndcg_of_users)
    run.write_json(METRICS_FILE, asdict(result))


def _write_checkpoint(job: Job, folder: Path, tensors: Tensors, name: str, judged: Judged) -> None:
    ids = torch.from_numpy(job.split.item_ids.copy())
    save_checkpoint(folder, job.checkpoint.config, {**tensors, IDS_TENSOR: ids})
    write_beside(folder, post_trained_card(name, job.options, judged.summary()), job.log)


class _Policy:
    """The weights of one arm, and their loss."""

    def __init__(self, job: Job, arm: Arm) -> None:
        self._job, self._arm = job, arm
        self._first = {name: each for name, each in job.checkpoint.tensors.items() if name != IDS_TENSOR}
        self._drawing = self._first
        self.tensors = {name: each.requires_grad_(True) for name, each in _copied(self._first).items()}
        self.groups = self.without_spread = 0

    def loss(self, batch: CandidateBatch, step: int) -> torch.Tensor:
        if self._arm is Arm.SUPERVISED:
            return self._supervised_loss(batch, None)
        if step % _RENEWED == 0:
            self._drawing = _copied(self.tensors)
        drawn = self._scores(self._drawing, batch)
        slates = draw_slates(drawn, self._job.options.group)
        rewards = slate_rewards(slates)
        if self._arm is Arm.WEIGHTED:
            return self._supervised_loss(batch, rewards.mean(1).softmax(0))
        self.groups += len(rewards)
        self.without_spread += int((~has_spread(rewards)).sum())
        scores, first = self._scores(self.tensors, batch), self._scores(self._first, batch)
        return group_relative_loss(scores, drawn, first, slates, rewards, self._job.options.kl_weight)

    def _supervised_loss(self, batch: CandidateBatch, request_weights: torch.Tensor | None) -> torch.Tensor:
        config, dropout = self._job.checkpoint.config, self._job.trained_with.dropout
        losses = supervised_losses(config, self.tensors, batch, dropout, request_weights)
        return losses @ LOSS_WEIGHTS

    def _scores(self, tensors: Tensors, batch: CandidateBatch) -> torch.Tensor:
        return target_scores(candidate_logits(self._job.checkpoint.config, tensors, batch.inputs), batch)


def _copied(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _test_metrics(judged: Judged) -> dict[str, float]:
    """Means over users, and the calibration error of `liked` over all held-out behaviours."""
    found = {name: each.mean for name, each in judged.summary().items()}
    probabilities = [each for one in judged.predictions for each in one.liked_probabilities]
    if probabilities:
        # After `ranking`, which says what is wrong if it cannot be imported.
        from torchmetrics.functional.classification import binary_calibration_error

        liked = torch.tensor([each for one in judged.predictions for each in one.liked]).long()
        found[CALIBRATION] = float(binary_calibration_error(torch.tensor(probabilities), liked, n_bins=10))
    return found


def _compared(
    start: dict[str, float], start_ndcg: NDArray[np.float64], found: Mapping[Arm, Sequence[ArmResult]], folder: Path
) -> Compared:
    """`start_ndcg`: of the ranker that all began with, for each user of the test."""
    rows = [_row(arm, kept, found) for arm in Arm for kept in (BEST, FINAL)]
    over_seeds = next(row for row in rows if row.arm is Arm.GROUP_RELATIVE and row.kept == BEST).less_supervised[NDCG]
    of_users = {arm: np.mean([one.user_ndcg for one in found[arm]], axis=0) for arm in Arm}
    over_users = estimate(of_users[Arm.GROUP_RELATIVE] - of_users[Arm.SUPERVISED])
    recommended = Arm.GROUP_RELATIVE if over_seeds.low > 0 and over_users.low > 0 else Arm.SUPERVISED
    seed = int(np.argmax([one.validation(BEST).ndcg for one in found[recommended]]))
    checkpoint = Run(folder / f"seed-{seed}" / recommended).checkpoint
    less_start = estimate(of_users[recommended] - start_ndcg)
    return Compared(start, rows, over_seeds, over_users, recommended, less_start, str(checkpoint))


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
        {name: estimate(values - theirs[name], seeds) for name, values in ours.items()},
        float(np.mean([each.step for each in at])),
        float(np.mean([each.cpu_s for each in at])),
        sum(one.without_spread for one in found[arm]) / max(1, sum(one.groups for one in found[arm])),
    )
