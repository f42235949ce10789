"""From a log to a finished run: split, training, checkpoint with its card, baselines, test metrics and plot."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.training.baselines import IALS, NEIGHBOURS, fitted_baselines, folds_count, popularity
from relaygr.training.card import checkpoint_card
from relaygr.training.logs import Log, usable
from relaygr.training.models import CASCADE, RANKER, RETRIEVAL, CascadeModel, RankerModel, RetrievalModel, found_share
from relaygr.training.options import Stage, TrainingOptions
from relaygr.training.plots import plot_training
from relaygr.training.ranking import NDCG, Estimate, Judged, Model, chosen_users, estimate, judge, write_predictions
from relaygr.training.retrieval import NEWEST
from relaygr.training.runs import FOUND_SHARES, METRICS_FILE, Run, describe_split, write_beside, writing
from relaygr.training.splits import Part, Split, split_log
from relaygr.training.trainer import Trained, Watcher, train
from relaygr.worker.model.checkpoint import load_checkpoint, save_checkpoint

OnWork = Callable[[str, int], None]
"""(name of the work, its steps): a new piece of work begins."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How a run is followed. Each may do nothing."""

    watcher: Watcher
    began: OnWork
    stepped: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a run."""

    split: dict[str, Any]
    test: dict[str, dict[str, Estimate]]
    """Model -> metric -> mean over users."""
    gains: dict[str, Estimate]
    """Model -> NDCG@10 of the cascade less the model's, in pairs of the same user."""
    best: dict[Stage, int]
    """The best epoch of each stage by validation, from 0."""
    notes: list[str]
    """Sentences about the log's times and ratings that say less than they seem to, and about a plot that is missing."""


def train_ranker(
    log: Log, paths: list[Path], options: TrainingOptions, run: Run, progress: Progress, *, with_baselines: bool = True
) -> Finished:
    """Trains and judges, or goes on with the run. Raises RelayError for a log or folder that cannot be used.

    Without baselines it is compared with popularity alone.
    """
    log = usable(log)
    with run.begun(options, log, paths):
        # Another process may have finished it while this one read the log.
        run.require_unfinished()
        return _train_and_judge(log, options, run, progress, with_baselines)


def _train_and_judge(
    log: Log, options: TrainingOptions, run: Run, progress: Progress, with_baselines: bool
) -> Finished:
    split = split_log(log, options.protocol)
    trained = _trained(split, options, run, progress)
    ranker = RankerModel(split, trained.config, trained.tensors)
    retrieval = RetrievalModel(split, trained.config, trained.tensors)
    models: dict[str, Model] = {CASCADE: CascadeModel(retrieval, ranker), RETRIEVAL: retrieval, RANKER: ranker}
    users = chosen_users(split, Part.TEST, options.test_users, options.seed)
    validating = chosen_users(split, Part.VALIDATION, options.validation_users, options.seed)
    folds = _add_baselines(split, options, models, validating, progress, with_baselines)
    # As the demo retrieves.
    searches: dict[str, Model] = {RETRIEVAL: RetrievalModel(split, trained.config, trained.tensors, NEWEST)}
    searches |= {name: models[name] for name in (IALS, NEIGHBOURS) if name in models}
    progress.began("retrieving", len(searches) * len(validating))
    shares = {name: found_share(split, model, validating, progress.stepped) for name, model in searches.items()}
    judged, seconds = _judge_all(split, models, users, run, progress)
    finished = Finished(
        describe_split(split, log),
        {name: each.summary() for name, each in judged.items()},
        {
            name: estimate(judged[CASCADE].values[NDCG] - each.values[NDCG])
            for name, each in judged.items()
            if name != CASCADE
        },
        trained.best,
        [note for note in (log.ties_note(), split.liked_note()) if note],
    )
    if (gain := finished.gains[RETRIEVAL]).low <= 0:
        finished.notes.insert(
            0,
            "Keep the order of retrieval: `next` is not shown to order what it finds better. NDCG@10 of the cascade "
            f"less that of retrieval is {gain.with_interval()}.",
        )
    metrics: dict[str, Any] = {
        **asdict(finished),
        "epochs": [asdict(record) for record in trained.epochs],
        "baselines": folds,
        FOUND_SHARES: shares,
        "seconds": seconds,
    }
    card = checkpoint_card(run.described(), finished, load_checkpoint(run.checkpoint).revision)
    write_beside(run.checkpoint, card, log)
    if undrawn := plot_training(run.folder / "training.png", trained.epochs):
        finished.notes.append(undrawn)
    # The last file: a run without it goes on.
    run.write_json(METRICS_FILE, metrics)
    run.remove_state()
    return finished


def _trained(split: Split, options: TrainingOptions, run: Run, progress: Progress) -> Trained:
    trained = train(split, options, run, progress.watcher)
    save_checkpoint(
        run.checkpoint, trained.config, {**trained.tensors, "items.ids": torch.from_numpy(split.item_ids.copy())}
    )
    return trained


def _add_baselines(
    split: Split,
    options: TrainingOptions,
    models: dict[str, Model],
    users: NDArray[np.int64],
    progress: Progress,
    with_all: bool,
) -> dict[str, Any]:
    """Adds the fitted baselines to the models. Returns their parameters and the folds of their grids."""
    progress.began("fitting baselines", folds_count() if with_all else 0)
    found = (
        fitted_baselines(split, users, options.seed, options.threads, progress.stepped)
        if with_all
        else [popularity(split)]
    )
    folds = {}
    for baseline in found:
        models[baseline.name] = baseline.model
        folds[baseline.name] = {"parameters": baseline.parameters, "folds": baseline.folds}
    return folds


def _judge_all(
    split: Split, models: dict[str, Model], users: NDArray[np.int64], run: Run, progress: Progress
) -> tuple[dict[str, Judged], dict[str, float]]:
    """Judges the models on the test part, and writes their predictions. Returns the seconds that each took, too."""
    judged, seconds = {}, {}
    for name, model in models.items():
        progress.began(f"ranking by {name}", len(users))
        started_s = time.monotonic()
        judged[name] = judge(split, model, Part.TEST, users, keeps_predictions=True, on_user=progress.stepped)
        seconds[name] = round(time.monotonic() - started_s, 1)
        with writing(run.folder / "predictions" / f"{name.replace(' ', '-')}.jsonl") as partial:
            write_predictions(partial, judged[name].predictions)
        judged[name].predictions.clear()
    return judged, seconds
