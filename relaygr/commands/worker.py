"""`relaygr worker` runs one worker until it is told to stop."""

from __future__ import annotations

import typer

from relaygr.options import BootstrapOption, ConfigOption, SetOption, load_settings
from workers.process import WorkerConfig, run_worker


def worker(config: ConfigOption = None, bootstrap: BootstrapOption = None, overrides: SetOption = None) -> None:
    """Run a worker: pre-infer, cache and rank.

    Ends with 0 on SIGTERM, 3 when another process took over its worker id (start no new one), 4 when its
    device hangs, 1 on any other failure.
    """
    settings = load_settings(config, bootstrap, overrides)
    raise typer.Exit(run_worker(WorkerConfig(settings, settings.worker, settings.admission, settings.consumer)))
