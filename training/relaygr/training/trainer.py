"""The training loop.

    loss = next + 0.2 liked + retrieval
    next       soft-max over the behaviour that came next and random items, scored as candidates of a worker
    liked      log loss of a rating of at least 4
    retrieval  soft-max over all items (or a sample) of the product of a history's last row and the item's embedding

The retrieval loss trains all rows at once, which the item embeddings need. State is saved after each epoch. An epoch
depends on its number and the seed alone, so that a run that goes on gives the weights of one that was not interrupted;
with a time limit it depends on the machine, too.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Final, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.training.layers import Tensors, normalised
from relaygr.training.options import TrainingOptions
from relaygr.training.ranker import LIKED, NEXT, Size, forward, initial_tensors, ranker_config, score_items
from relaygr.training.ranking import NDCG, Judged, chosen_users, judge
from relaygr.training.runs import Run
from relaygr.training.sampling import TrainingBatch, training_batches
from relaygr.training.splits import Part, Split
from relaygr.worker.model.config import ModelConfig

LIKED_WEIGHT: Final = 0.2
_RETRIEVED: Final = 8192
"""Items of the retrieval soft-max; of a larger vocabulary a random sample of each batch."""
_WARM_UP_STEPS: Final = 100
_LAST_RATE: Final = 0.05
"""The share of the learning rate at the end."""
_LARGEST_GRADIENT: Final = 1.0
_EXCLUDED: Final = -1e9


class Watcher(Protocol):
    """What follows a training, such as a progress bar."""

    def step(self, epoch: int, share: float, loss: float) -> None:
        """After a batch: the share of the epoch that is done, and the mean loss of it so far."""

    def epoch_ended(self, record: EpochRecord) -> None:
        """After the validation."""


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch."""

    epoch: int
    loss: float
    next_loss: float
    liked_loss: float
    retrieval_loss: float
    ndcg: float
    """Validation NDCG@10."""
    seconds: float


@dataclass(slots=True)
class Trained:
    """The best weights by validation NDCG@10."""

    config: ModelConfig
    tensors: Tensors
    epochs: list[EpochRecord]
    best_epoch: int


@dataclass(slots=True)
class _State:
    tensors: Tensors
    best: Tensors
    best_epoch: int = -1
    epochs: list[EpochRecord] = field(default_factory=list)

    @property
    def best_ndcg(self) -> float:
        return self.epochs[self.best_epoch].ndcg if self.best_epoch >= 0 else -1.0


@dataclass(frozen=True, slots=True)
class RankerModel:
    """A ranker as a model that is judged, served at most the newest `most` behaviours; 0: all that it may have."""

    split: Split
    config: ModelConfig
    tensors: Tensors
    most: int = 0

    def next_scores(self, user: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
        return self._logits(user, part, rows)[:, NEXT]

    def liked_probabilities(self, user: int, part: Part) -> torch.Tensor | None:
        if not self.split.has_liked:
            return None
        asked = torch.from_numpy(self.split.rows[self.split.targets(user, part)].astype(np.int64))
        return torch.sigmoid(self._logits(user, part, asked)[:, LIKED])

    def _logits(self, user: int, part: Part, asked: torch.Tensor) -> torch.Tensor:
        start, end = int(self.split.starts[user]), self.split.history_end(user, part)
        if self.most:
            start = max(start, end - self.most)
        return score_items(self.config, self.tensors, self.split.rows[start:end], self.split.actions[start:end], asked)


def train(split: Split, options: TrainingOptions, run: Run, watcher: Watcher) -> Trained:
    """Trains, or goes on with what the run's folder has. Raises RelayError if the loss is not finite."""
    torch.set_num_threads(options.threads)
    config = ranker_config(split, Size(options.dim, options.heads, options.layers, options.max_history))
    tensors = initial_tensors(config, options.seed)
    state = _State(tensors, {name: tensor.clone() for name, tensor in tensors.items()})
    parameters = [tensor.requires_grad_(True) for tensor in state.tensors.values()]
    optimizer = torch.optim.Adam(parameters, lr=options.learning_rate, betas=(0.9, 0.98))
    _restore(run, state, optimizer)
    users = chosen_users(split, Part.VALIDATION, options.validation_users, options.seed)
    while not _is_over(state, options):
        epoch = len(state.epochs)
        started_s = time.monotonic()
        losses = _train_epoch(split, options, config, state.tensors, optimizer, epoch, _Limit(state, options), watcher)
        ndcg = _validated(split, config, state.tensors, users).summary()[NDCG].mean
        of_next, of_liked, of_retrieval = losses.tolist()
        record = EpochRecord(
            epoch,
            float(LOSS_WEIGHTS @ losses),
            of_next,
            of_liked,
            of_retrieval,
            ndcg,
            round(time.monotonic() - started_s, 3),
        )
        if ndcg > state.best_ndcg:
            state.best = {name: tensor.detach().clone() for name, tensor in state.tensors.items()}
            state.best_epoch = epoch
        state.epochs.append(record)
        _save(run, state, optimizer)
        watcher.epoch_ended(record)
    return Trained(config, state.best, state.epochs, state.best_epoch)


LOSS_WEIGHTS = np.array([1.0, LIKED_WEIGHT, 1.0])
"""Of the losses of next, liked and retrieval."""


class _Limit:
    """The time that training may take. The time of the epochs before a restart counts."""

    def __init__(self, state: _State, options: TrainingOptions) -> None:
        self._started_s = time.monotonic() - sum(each.seconds for each in state.epochs)
        self._limit_s = 60 * options.max_minutes

    @property
    def used_share(self) -> float:
        """0 without a limit."""
        return (time.monotonic() - self._started_s) / self._limit_s if self._limit_s else 0.0


def _is_over(state: _State, options: TrainingOptions) -> bool:
    done = len(state.epochs)
    is_late = done > 0 and _Limit(state, options).used_share >= 1
    return done >= options.epochs or done - 1 - state.best_epoch >= options.patience or is_late


def _train_epoch(
    split: Split,
    options: TrainingOptions,
    config: ModelConfig,
    tensors: Tensors,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    limit: _Limit,
    watcher: Watcher,
) -> NDArray[np.float64]:
    """Returns the mean losses of next, liked and retrieval. Ends early when the time is over."""
    torch.manual_seed(options.seed * 1_000_003 + epoch)
    total = np.zeros(3)
    for number, (share, batch) in enumerate(
        training_batches(split, options.seed, epoch, options.places, options.negatives, options.max_history)
    ):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, epoch, number, limit.used_share)
        losses = supervised_losses(config, tensors, batch, options.dropout)
        loss = losses @ torch.from_numpy(LOSS_WEIGHTS).float()
        take_step(optimizer, tensors, loss, f"batch {number} of epoch {epoch}", options.learning_rate)
        total += losses.detach().numpy()
        watcher.step(epoch, share, float(LOSS_WEIGHTS @ total) / (number + 1))
        if limit.used_share >= 1:
            break
    return total / (number + 1)


def learning_rate(options: TrainingOptions, epoch: int, step: int, used_share: float) -> float:
    """Rises in the first steps of the first epoch, and falls with the epochs, or with the share of the time limit that
    is used, whichever is more.
    """
    warm = min(1.0, (step + 1) / _WARM_UP_STEPS) if epoch == 0 else 1.0
    done = min(1.0, max(epoch / max(1, options.epochs - 1), used_share))
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


def supervised_losses(
    config: ModelConfig,
    tensors: Tensors,
    batch: TrainingBatch,
    dropout: float,
    request_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """[3]: of next, liked and retrieval. `request_weights` [requests]: of each target in `next`, with sum 1; None: the
    same for all.
    """
    logits, history = forward(config, tensors, batch.inputs, dropout, reads_history=True)
    scores = target_scores(logits, batch)
    each = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64), reduction="none")
    found = each.mean() if request_weights is None else request_weights @ each
    liked = torch.zeros(())
    if len(config.tasks) > LIKED:
        of_next = logits[:, :, 0, LIKED][batch.is_target]
        liked = F.binary_cross_entropy_with_logits(of_next, batch.liked[batch.is_target])
    return torch.stack((found, liked, _retrieval_loss(config, tensors, history, batch.inputs.items)))


def target_scores(logits: torch.Tensor, batch: TrainingBatch) -> torch.Tensor:
    """Scores of `next` [requests, candidates] of the places that are trained; the first candidate came next."""
    return logits[..., NEXT].masked_fill(batch.is_excluded, _EXCLUDED)[batch.is_target]


def _retrieval_loss(config: ModelConfig, tensors: Tensors, history: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    known = items[:, 1:] < config.vocabulary_size
    wanted = items[:, 1:][known]
    if not wanted.numel():
        return torch.zeros(())
    rows = normalised(config, tensors, "readout.norm", history[:, :-1][known])
    table = tensors["items.weight"]
    if config.vocabulary_size <= _RETRIEVED:
        return F.cross_entropy(rows @ table[: config.vocabulary_size].T, wanted)
    sampled = torch.randint(config.vocabulary_size, (_RETRIEVED,))
    others = (rows @ F.embedding(sampled, table).T).masked_fill(sampled == wanted[:, None], _EXCLUDED)
    own = (rows * F.embedding(wanted, table)).sum(-1, keepdim=True)
    return F.cross_entropy(torch.cat((own, others), dim=1), torch.zeros(len(wanted), dtype=torch.int64))


def _validated(split: Split, config: ModelConfig, tensors: Tensors, users: NDArray[np.int64]) -> Judged:
    return judge(split, RankerModel(split, config, tensors), Part.VALIDATION, users)


def _save(run: Run, state: _State, optimizer: torch.optim.Optimizer) -> None:
    run.save_state(
        {
            "tensors": {name: tensor.detach() for name, tensor in state.tensors.items()},
            "best": state.best,
            "best_epoch": state.best_epoch,
            "epochs": [asdict(record) for record in state.epochs],
            "optimizer": optimizer.state_dict(),
        }
    )


def _restore(run: Run, state: _State, optimizer: torch.optim.Optimizer) -> None:
    found = run.load_state()
    if found is None:
        return
    with torch.no_grad():
        for name, tensor in state.tensors.items():
            tensor.copy_(found["tensors"][name])
    state.best, state.best_epoch = found["best"], found["best_epoch"]
    state.epochs = [EpochRecord(**record) for record in found["epochs"]]
    optimizer.load_state_dict(found["optimizer"])
