"""What a longer history is worth: the same users, served their newest 16, 32, ... behaviours.

Users, held-out behaviours and candidates, which retrieval finds by the whole history, are the same at every length;
only the history that is ranked on differs. So each length is compared with the whole history in pairs. T_full and T_hit
are of the worker's engine on this machine: the whole history and the candidates, and the candidates alone against
cached K,V.

A worker that would miss its deadline serves the longest history whose T_full fits. The loss by a deadline is the
difference between that length and the whole history, which the relay serves if T_hit fits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from relaygr.runtime.errors import RelayError
from relaygr.runtime.json_values import finite
from relaygr.training.models import CascadeModel, RankerModel, RetrievalModel
from relaygr.training.ranking import NDCG, Estimate, Judged, Model, estimate, judge
from relaygr.training.runs import Run
from relaygr.training.splits import Part, Split
from relaygr.worker.device import open_device, set_threads
from relaygr.worker.kv import KvDtype
from relaygr.worker.measuring import EngineMeter, bind_own_arena
from relaygr.worker.model.checkpoint import Checkpoint, load_checkpoint
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.options import DEFAULT_PAGE_TOKENS

SHORTEST: Final = 16
_ROUNDS: Final = 15
_CHUNK_TOKENS: Final = 2048


@dataclass(frozen=True, slots=True)
class LengthPoint:
    """The users, served at most their newest `length` behaviours."""

    length: int
    whole: int
    """Users whose history has at least this length; the others are served all they have."""
    metrics: dict[str, Estimate]
    """Of the ranking of what retrieval finds by the whole history."""
    against_whole: Estimate
    """NDCG@10 less that of the longest length, in pairs."""
    retrieval: Estimate
    """NDCG@10 of the retrieval of the same checkpoint, served this length too."""
    full_ms: float
    """Median T_full at this length."""
    hit_ms: float
    """Median T_hit at this length."""


@dataclass(frozen=True, slots=True)
class DeadlineLoss:
    """What truncation loses at a deadline."""

    deadline_ms: float
    truncated: int
    """The longest measured length whose T_full fits; 0: none does."""
    relayed: int
    """The longest measured length whose T_hit fits; 0: none does."""
    loss: Estimate | None
    """NDCG@10 of the relay's length less that of the truncated one, in pairs; None: one of them does not fit."""


@dataclass(frozen=True, slots=True)
class Worth:
    """The result of `relaygr train evaluate`."""

    revision: str
    users: int
    shortest_log: int
    """Each user has at least so many behaviours in the log."""
    candidates: int
    """Candidates of a request whose time was measured."""
    threads: int
    points: list[LengthPoint]
    deadlines: list[DeadlineLoss]

    def as_json(self) -> dict[str, object]:
        """Plain content; what is not a number is null."""
        found: dict[str, object] = finite(asdict(self))
        return found


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of an evaluation."""

    min_behaviours: int = 512
    candidates: int = 512
    deadlines_ms: tuple[float, ...] = ()
    threads: int = 1


def evaluate_lengths(
    split: Split, run: Run, asked: Asked, began: Callable[[str, int], None], stepped: Callable[[], None]
) -> Worth:
    """Judges a run's checkpoint at each length. Raises RelayError if no user is long enough."""
    checkpoint = load_checkpoint(run.checkpoint)
    judged_users = split.judged_users(Part.TEST)
    behaviours = np.diff(split.starts)[judged_users]
    users = judged_users[behaviours >= asked.min_behaviours]
    if not users.size:
        raise RelayError(
            f"No user of the test has {asked.min_behaviours} behaviours in the log, the longest has "
            f"{int(behaviours.max())}: give a smaller --min-behaviours."
        )
    histories = (split.validation_ends - split.starts[:-1])[users]
    lengths = lengths_up_to(min(int(histories.max()), checkpoint.config.max_prefix_behaviours))
    set_threads(asked.threads)
    tensors = dict(checkpoint.tensors)
    began("ranking and retrieving", 2 * len(lengths) * users.size)
    config, candidates_by = checkpoint.config, RetrievalModel(split, checkpoint.config, tensors)

    def judged_by(model: Model) -> Judged:
        return judge(split, model, Part.TEST, users, on_user=stepped)

    judged = {
        length: judged_by(CascadeModel(candidates_by, RankerModel(split, config, tensors, length)))
        for length in lengths
    }
    retrieved = {
        length: judged_by(RetrievalModel(split, config, tensors, length)).summary()[NDCG] for length in lengths
    }
    began("measuring T_full and T_hit", len(lengths) * _ROUNDS)
    candidates = min(asked.candidates, checkpoint.config.max_candidates)
    times = measured_times(checkpoint, lengths, candidates, stepped)
    whole = judged[lengths[-1]]
    points = [
        LengthPoint(
            length,
            int((histories >= length).sum()),
            judged[length].summary(),
            _difference(judged[length], whole),
            retrieved[length],
            *times[length],
        )
        for length in lengths
    ]
    losses = [deadline_loss(deadline_ms, points, judged) for deadline_ms in asked.deadlines_ms]
    return Worth(checkpoint.revision, users.size, asked.min_behaviours, candidates, asked.threads, points, losses)


def lengths_up_to(longest: int) -> list[int]:
    """16, 32, ... while they are shorter than the longest history, and that one."""
    steps = max(0, math.ceil(math.log2(longest / SHORTEST)))
    return [*(SHORTEST * 2**step for step in range(steps)), longest]


def deadline_loss(deadline_ms: float, points: Sequence[LengthPoint], judged: dict[int, Judged]) -> DeadlineLoss:
    """What truncation to the longest length whose T_full fits loses against the longest whose T_hit fits."""
    truncated = max((point.length for point in points if point.full_ms <= deadline_ms), default=0)
    relayed = max((point.length for point in points if point.hit_ms <= deadline_ms), default=0)
    loss = _difference(judged[relayed], judged[truncated]) if truncated and relayed else None
    return DeadlineLoss(deadline_ms, truncated, relayed, loss)


def _difference(first: Judged, second: Judged) -> Estimate:
    return estimate(first.values[NDCG] - second.values[NDCG])


def measured_times(
    checkpoint: Checkpoint, lengths: Sequence[int], candidates: int, stepped: Callable[[], None] = lambda: None
) -> dict[int, tuple[float, float]]:
    """Length -> medians of T_full and T_hit, ms, by the worker's engine. Lengths take turns under one load."""
    engine = build_engine(checkpoint, open_device("cpu"), KvDtype.FLOAT32, DEFAULT_PAGE_TOKENS)
    bind_own_arena(engine)
    meter = EngineMeter(engine)
    found: dict[int, tuple[list[float], list[float]]] = {length: ([], []) for length in lengths}
    for turn in range(_ROUNDS + 1):
        for length in lengths:
            pre_us = sum(point.duration_us for point in meter.prefix(length, _CHUNK_TOKENS))
            hit_us = meter.rank(length, candidates).duration_us
            if turn:  # The first turn warms up.
                found[length][0].append((pre_us + hit_us) / 1e3)
                found[length][1].append(hit_us / 1e3)
                stepped()
    return {length: (statistics.median(full), statistics.median(hit)) for length, (full, hit) in found.items()}
