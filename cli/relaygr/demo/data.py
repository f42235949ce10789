"""The folder of `relaygr demo --data DIR`: a log, and a ranker that is trained on it if there is none.

DIR/log.*       the log, such as `relaygr data movielens DIR` writes
DIR/ranker/     the run of `relaygr train ranker` whose test part is played
DIR/deployed/   the revisions that the workers serve: `relaygr model deploy` changes it while the demo runs
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from relaygr.deployment import CURRENT, deploy
from relaygr.ingest.log_map import NO_MAP, recorded_map
from relaygr.machine import CoreWatch
from relaygr.progress import progress_bars
from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import locked_folder
from relaygr.settings import Settings
from relaygr.training_progress import EpochLines, read_training_log

if TYPE_CHECKING:
    from relaygr.training.runs import Run

RANKER: Final = "ranker"
DEPLOYED: Final = "deployed"
TRAINING_MINUTES: Final = 3.0
_JUDGED_USERS: Final = 200
_BAD_LINES: Final = 100
_MODEL_POLL_S: Final = 1.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other demos away from the folder. Raises RelayError if there is one, or no such folder."""
    in_use = f"Another demo uses {folder}, where it trains and deploys: wait for its end, or give a copy."
    with ExitStack() as held:
        try:
            held.enter_context(locked_folder(folder, in_use))
        except OSError as error:
            raise RelayError(f"--data {folder} cannot be used ({error.strerror}): give a folder with a log.") from error
        yield


def trained_run(console: Console, folder: Path) -> Run:
    """The run in `folder`, which is trained now if it is not finished.

    Raises RelayError without a log, or if training is not installed.
    """
    try:
        from relaygr.training.options import TrainingOptions
        from relaygr.training.pipeline import Progress, train_ranker
        from relaygr.training.runs import Run
    except ImportError as error:
        raise RelayError(
            f"--data trains a ranker, which needs {error.name}: pip install 'relaygr[training]'."
        ) from error

    run = Run(folder / RANKER)
    if run.is_finished:
        return run
    log_file = _log_in(folder)
    with CoreWatch() as watch:
        # As the run began, if it did.
        names = recorded_map(run.described()) if run.has_begun else NO_MAP
        log = read_training_log([log_file], _BAD_LINES, console, names)
    # Threads beside busy cores wait for each other in each product. An interrupted run goes on as it began.
    options = run.options() if run.has_begun else TrainingOptions(
        max_minutes=TRAINING_MINUTES, validation_users=_JUDGED_USERS, test_users=_JUDGED_USERS,
        threads=max(1, round(watch.cores.free)),
    )  # fmt: skip
    limit = f"at most {options.max_minutes:g} minutes" if options.max_minutes else "until validation no longer improves"
    console.print(f"training   a ranker, {limit}; it is kept in {run.folder}")
    with progress_bars() as bars:
        progress = Progress(EpochLines(bars, console, options), bars.began, bars.stepped)
        finished = train_ranker(log, [log_file], options, run, progress)
    for name, metrics in finished.test.items():
        console.print(f"           {name}: NDCG@10 {metrics['ndcg@10'].with_half_width()} over all items")
    for note in finished.notes:
        console.print(f"           {note}")
    return run


def _log_in(folder: Path) -> Path:
    found = sorted(folder.glob("log.*"))
    if not found:
        raise RelayError(
            f"{folder} has no log: `relaygr data movielens {folder}` writes MovieLens as log.inter; else put your own "
            "log there, as log.csv or log.inter."
        )
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise RelayError(f"{folder} has {names}, and the demo plays one log: move the others away.")
    return found[0]


def data_settings(settings: Settings, run: Path, retrieval: Path | None) -> Settings:
    """The settings of a run on held-out behaviours: all of them, each published after its impression."""
    traffic = settings.traffic.model_copy(update={"held_out": run, "retrieval": retrieval, "suffix": 0})
    worker = settings.worker.model_copy(update={"model_poll_s": settings.worker.model_poll_s or _MODEL_POLL_S})
    return settings.model_copy(update={"traffic": traffic, "worker": worker})


def deployed(checkpoint: Path, calibration: Path, folder: Path) -> Path:
    """Deploys the checkpoint with this calibration. Returns what the workers' `worker.model` names."""
    deploy(checkpoint, folder / DEPLOYED, needs_calibration=True, calibration=calibration)
    return folder / DEPLOYED / CURRENT
