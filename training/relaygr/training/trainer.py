"""The training loop, in two stages.

    sequence      retrieval + 0.2 liked, at every place of a history: retrieval's loss is that of `sequence_loss.py`,
                  and `liked` is the log loss of a rating of at least 4
    candidates    next + 0.2 liked + retrieval, at some places: `next` is a soft-max over the behaviour that came next
                  and other items, half of which retrieval finds there

The second goes on from the best weights of the first. A place of the first costs two rows, in the second as many as it
has candidates: so a ranker learns most from sequences. State is saved after each epoch. An epoch depends on its number
and the seed alone, so that a run that goes on gives the weights of one that was not interrupted; with a time limit it
depends on the machine, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.training.layers import Tensors, task_logits
from relaygr.training.models import CascadeModel, RankerModel, RetrievalModel
from relaygr.training.options import Stage, TrainingOptions
from relaygr.training.ranker import LIKED, NEXT, Size, candidate_states, initial_tensors, ranker_config
from relaygr.training.ranking import NDCG, Model, chosen_users, judge
from relaygr.training.runs import STATE_FILE, Run
from relaygr.training.sampling import (
    CandidateBatch,
    SequenceBatch,
    candidate_batches,
    sequence_batches,
    with_found_negatives,
)
from relaygr.training.sequence_loss import TEMPERATURE, retrieval_loss
from relaygr.training.splits import Part, Split
from relaygr.worker.model.config import ModelConfig

LIKED_WEIGHT: Final = 0.2
_WARM_UP_STEPS: Final = 100
_LEARNT_RATE: Final = 0.1
"""The share of the learning rate for what the sequences taught, in the stage of candidates, which would undo it."""
_LAST_RATE: Final = 0.05
"""The share of the learning rate at the end of a stage."""
_STAGE_SEEDS: Final = 500_000
"""Between the seeds of the stages' epochs."""
_LARGEST_GRADIENT: Final = 1.0
_EXCLUDED: Final = -1e9
_SEQUENCE_SHARE: Final = 0.7
"""Of the time limit."""


class Watcher(Protocol):
    """What follows a training, such as a progress bar."""

    def step(self, stage: Stage, epoch: int, share: float, loss: float) -> None:
        """After a batch: the share of the epoch that is done, and the mean loss of it so far."""

    def epoch_ended(self, record: EpochRecord) -> None:
        """After the validation."""


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch."""

    stage: Stage
    epoch: int
    """Of its stage, from 0."""
    loss: float
    next_loss: float
    """0 in the stage of sequences."""
    liked_loss: float
    retrieval_loss: float
    ndcg: float
    """Validation NDCG@10: of retrieval, or of the items that it finds as `next` orders them."""
    seconds: float
    """With the validation, of which `cpu_s` has nothing."""
    cpu_s: float


@dataclass(slots=True)
class Trained:
    """The best weights by validation NDCG@10."""

    config: ModelConfig
    tensors: Tensors
    epochs: list[EpochRecord]
    best: dict[Stage, int]
    """The best epoch of each stage."""


@dataclass(slots=True)
class _State:
    tensors: Tensors
    best: Tensors
    """Of the stage."""
    stage: Stage = Stage.SEQUENCE
    epochs: list[EpochRecord] = field(default_factory=list)

    def of_stage(self, stage: Stage) -> list[EpochRecord]:
        return [each for each in self.epochs if each.stage is stage]

    def best_epoch(self, stage: Stage) -> int:
        """-1: none has ended."""
        found = [each.ndcg for each in self.of_stage(stage)]
        return int(np.argmax(found)) if found else -1


def train(split: Split, options: TrainingOptions, run: Run, watcher: Watcher) -> Trained:
    """Trains, or goes on with what the run's folder has. Raises RelayError if the loss is not finite."""
    torch.set_num_threads(options.threads)
    config = ranker_config(split, Size(options.dim, options.heads, options.layers, options.max_history))
    tensors = {name: tensor.requires_grad_(True) for name, tensor in initial_tensors(config, options.seed).items()}
    state = _State(tensors, _copied(tensors))
    optimizer = _optimizer(state, options)
    _restore(run, state, optimizer)
    users = chosen_users(split, Part.VALIDATION, options.validation_users, options.seed)
    while True:
        while not _is_over(state, options):
            record = _epoch(split, options, config, state, optimizer, users, watcher)
            if record.ndcg > max((each.ndcg for each in state.of_stage(state.stage)), default=-1.0):
                state.best = _copied(state.tensors)
            state.epochs.append(record)
            _save(run, state, optimizer)
            watcher.epoch_ended(record)
        if state.stage is Stage.CANDIDATES:
            return Trained(config, state.best, state.epochs, {stage: state.best_epoch(stage) for stage in Stage})
        _begin_candidates(state)
        optimizer = _optimizer(state, options)


def _begin_candidates(state: _State) -> None:
    """Goes on from the best weights of the sequences."""
    with torch.no_grad():
        for name, tensor in state.tensors.items():
            tensor.copy_(state.best[name])
    state.stage = Stage.CANDIDATES


def _optimizer(state: _State, options: TrainingOptions) -> torch.optim.Optimizer:
    # The weights of the read-out are of the size of `next`'s at the start: else `liked` would not be learnt.
    learnt = _LEARNT_RATE if state.stage is Stage.CANDIDATES else 1.0
    groups = [
        {
            "params": [tensor for name, tensor in state.tensors.items() if name.startswith("readout.") == is_new],
            "of": of,
        }
        for is_new, of in ((True, 1 / TEMPERATURE), (False, learnt))
    ]
    return torch.optim.Adam(groups, lr=options.learning_rate, betas=(0.9, 0.98))


LOSS_WEIGHTS: Final = torch.tensor([1.0, LIKED_WEIGHT, 1.0])
"""Of the losses of next, liked and retrieval."""


class _Limit:
    """The time that a stage may take. The time of its epochs before a restart counts."""

    def __init__(self, state: _State, options: TrainingOptions) -> None:
        self._started_s = time.monotonic() - sum(each.seconds for each in state.of_stage(state.stage))
        share = _SEQUENCE_SHARE if state.stage is Stage.SEQUENCE else 1 - _SEQUENCE_SHARE
        self._limit_s = 60 * options.max_minutes * share

    @property
    def used_share(self) -> float:
        """0 without a limit."""
        return (time.monotonic() - self._started_s) / self._limit_s if self._limit_s else 0.0


def _is_over(state: _State, options: TrainingOptions) -> bool:
    done = len(state.of_stage(state.stage))
    is_late = done > 0 and _Limit(state, options).used_share >= 1
    without_gain = done - 1 - state.best_epoch(state.stage)
    return done >= options.epochs_of(state.stage) or (done > 0 and without_gain >= options.patience) or is_late


def _epoch(
    split: Split,
    options: TrainingOptions,
    config: ModelConfig,
    state: _State,
    optimizer: torch.optim.Optimizer,
    users: NDArray[np.int64],
    watcher: Watcher,
) -> EpochRecord:
    """Trains one more epoch of the stage, which ends early when the time is over, and validates."""
    stage, epoch, limit = state.stage, len(state.of_stage(state.stage)), _Limit(state, options)
    torch.manual_seed(options.seed * 1_000_003 + epoch + (_STAGE_SEEDS if stage is Stage.CANDIDATES else 0))
    total = torch.zeros(3)
    started_s, cpu_s = time.monotonic(), -time.process_time()
    for number, (share, losses) in enumerate(_losses(split, options, config, state, epoch)):
        for group in optimizer.param_groups:
            group["lr"] = group["of"] * learning_rate(options, stage, epoch, number, limit.used_share)
        where = f"batch {number} of epoch {epoch}"
        take_step(optimizer, state.tensors, losses @ LOSS_WEIGHTS, where, options.learning_rate)
        total += losses.detach()
        watcher.step(stage, epoch, share, float(LOSS_WEIGHTS @ total) / (number + 1))
        if limit.used_share >= 1:
            break
    cpu_s += time.process_time()
    ndcg = judge(split, _validated(split, config, state), Part.VALIDATION, users).summary()[NDCG].mean
    means = total / (number + 1)
    seconds = time.monotonic() - started_s
    of_next, of_liked, of_retrieval = means.tolist()
    return EpochRecord(
        stage, epoch, float(LOSS_WEIGHTS @ means), of_next, of_liked, of_retrieval, ndcg,
        round(seconds, 3), round(cpu_s, 3),
    )  # fmt: skip


def _losses(
    split: Split, options: TrainingOptions, config: ModelConfig, state: _State, epoch: int
) -> Iterator[tuple[float, torch.Tensor]]:
    """The losses of each batch, computed as they are asked for, with the share of the epoch that is done after it."""
    if state.stage is Stage.SEQUENCE:
        for share, sequences in sequence_batches(split, options.seed, epoch, options.max_history):
            yield share, sequence_losses(config, state.tensors, sequences, options.dropout)
        return
    batches = candidate_batches(split, options.seed, epoch, options.places, options.negatives, options.max_history)
    for share, batch in batches:
        asked = with_found_negatives(config, state.tensors, batch)
        yield share, supervised_losses(config, state.tensors, asked, options.dropout)


def _validated(split: Split, config: ModelConfig, state: _State) -> Model:
    retrieval = RetrievalModel(split, config, state.tensors)
    if state.stage is Stage.SEQUENCE:
        return retrieval
    return CascadeModel(retrieval, RankerModel(split, config, state.tensors))


def learning_rate(options: TrainingOptions, stage: Stage, epoch: int, step: int, used_share: float) -> float:
    """Rises in the first steps of a stage, and falls with its epochs, or with the share of its time that is used,
    whichever is more.
    """
    warm = min(1.0, (step + 1) / _WARM_UP_STEPS) if epoch == 0 else 1.0
    done = min(1.0, max(epoch / max(1, options.epochs_of(stage) - 1), used_share))
    return options.learning_rate * warm * (1 - (1 - _LAST_RATE) * done)


def take_step(
    optimizer: torch.optim.Optimizer, tensors: Tensors, loss: torch.Tensor, where: str, learning_rate: float
) -> None:
    """One step, with gradients of a bounded length. Raises RelayError if the loss is not finite."""
    if not bool(torch.isfinite(loss)):
        raise RelayError(
            f"The loss is {loss.item()} in {where}: the learning rate {learning_rate:g} is too high for this log. "
            f"Train in a new folder with --learning-rate {learning_rate / 4:g}."
        )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(list(tensors.values()), _LARGEST_GRADIENT)
    optimizer.step()


def sequence_losses(config: ModelConfig, tensors: Tensors, batch: SequenceBatch, dropout: float) -> torch.Tensor:
    """[3], as `supervised_losses`, without `next`, which needs negatives."""
    rows = candidate_states(config, tensors, batch.inputs, dropout)
    liked, known = torch.zeros(()), batch.wanted < config.vocabulary_size
    if len(config.tasks) > LIKED and bool(known.any()):
        logits = task_logits(tensors, rows[:, :, 1], batch.wanted)[known]
        liked = F.binary_cross_entropy_with_logits(logits[:, LIKED], batch.liked[known])
    return torch.stack((torch.zeros(()), liked, _searched(config, tensors, rows[:, :, 0], batch.wanted)))


def supervised_losses(
    config: ModelConfig,
    tensors: Tensors,
    batch: CandidateBatch,
    dropout: float,
    request_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """[3]: of next, liked and retrieval. `request_weights` [requests]: of each target in `next`, with sum 1; None: the
    same for all.
    """
    # An unknown candidate beside the others searches, so that retrieval is not unlearnt.
    asked = F.pad(batch.inputs.candidates, (0, 1), value=config.vocabulary_size)
    rows = candidate_states(config, tensors, replace(batch.inputs, candidates=asked), dropout)
    logits = task_logits(tensors, rows[:, :, :-1], batch.inputs.candidates)
    scores = target_scores(logits, batch)
    each = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64), reduction="none")
    found = each.mean() if request_weights is None else request_weights @ each
    liked = torch.zeros(())
    if len(config.tasks) > LIKED:
        of_next = logits[:, :, 0, LIKED][batch.is_target]
        liked = F.binary_cross_entropy_with_logits(of_next, batch.liked[batch.is_target])
    wanted = batch.inputs.candidates[:, :, 0].masked_fill(~batch.is_target, config.vocabulary_size)
    return torch.stack((found, liked, _searched(config, tensors, rows[:, :, -1], wanted)))


def target_scores(logits: torch.Tensor, batch: CandidateBatch) -> torch.Tensor:
    """Scores of `next` [requests, candidates] of the places that are trained; the first candidate came next."""
    return logits[..., NEXT].masked_fill(batch.is_excluded, _EXCLUDED)[batch.is_target]


def _searched(config: ModelConfig, tensors: Tensors, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    known = wanted < config.vocabulary_size
    return retrieval_loss(rows[known], tensors["items.weight"][: config.vocabulary_size], wanted[known])


def _copied(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _save(run: Run, state: _State, optimizer: torch.optim.Optimizer) -> None:
    run.save_state(
        {
            "tensors": {name: tensor.detach() for name, tensor in state.tensors.items()},
            "best": state.best,
            "stage": state.stage.value,
            "epochs": [asdict(record) | {"stage": record.stage.value} for record in state.epochs],
            "optimizer": optimizer.state_dict(),
        }
    )


def _restore(run: Run, state: _State, optimizer: torch.optim.Optimizer) -> None:
    """Raises RelayError for the state of another release."""
    found = run.load_state()
    if found is None:
        return
    try:
        with torch.no_grad():
            for name, tensor in state.tensors.items():
                tensor.copy_(found["tensors"][name])
        state.best, state.stage = found["best"], Stage(found["stage"])
        state.epochs = [EpochRecord(**{**record, "stage": Stage(record["stage"])}) for record in found["epochs"]]
        optimizer.load_state_dict(found["optimizer"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RelayError(
            f"{run.folder / STATE_FILE} is of another release: remove it, and training begins again ({error})."
        ) from error
