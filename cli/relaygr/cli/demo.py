"""`relaygr demo` runs the whole relay on this machine, first on and then off, and compares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings
from relaygr.cli.texts import stdout_console
from relaygr.runtime.errors import RelayError

DEFAULTS = (
    "log.level=warning",
    "traffic.duration_s=24",
    "traffic.users=60",
    "traffic.history_median=1024",
    "traffic.history_max=2048",
    "traffic.items=5000",
)
"""Settings of the demo that differ from the defaults. `--set` overrides them."""


def demo(
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
    broker: Annotated[
        str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT", help="Which broker to use.")
    ] = "auto",
    interactions: Annotated[
        Path | None, typer.Option(help="An interaction log: real histories.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with log.inter: play what the 60 users with the most behaviours did next.",
            show_default=False,
        ),
    ] = None,
    retrieval: Annotated[
        Path | None,
        typer.Option(
            help="With --data: retrieve with this file of `relaygr train retrieval`.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A checkpoint to use.", show_default="a random one")] = None,
    deadline_ms: Annotated[
        int | None, typer.Option(min=1, help="Deadline of ranking.", show_default="from the calibration")
    ] = None,
    lead_ms: Annotated[
        int | None, typer.Option(min=0, help="Median lead time.", show_default="from the calibration")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.1, help="Impressions/s.", show_default="from the calibration")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Length of each run.", show_default="24, longer at a low rate")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep logs and records in this folder.", show_default=False)] = None,
    pool: Annotated[
        bool,
        typer.Option(
            "--pool",
            help="Play twice, the second time with new workers and the pool of the first ones.",
        ),
    ] = False,
    ui: Annotated[bool, typer.Option("--ui/--no-ui", help="Serve a live page of both runs.")] = True,
    stay: Annotated[
        bool | None,
        typer.Option("--stay/--no-stay", help="Serve it until Ctrl-C at the end.", show_default="on a terminal"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Use an existing cluster without asking.")] = False,
) -> None:
    """Run the whole relay on this machine, with the relay on, then off: broker, trigger, two workers and a gateway.

    With --data it trains a ranker for three minutes if DIR/ranker has none, and measures NDCG@10 of what was served.

    With --pool it starts the store of a pool, and fails unless new workers load prefixes that earlier workers computed.

    The exit code is 1 if a request is lost, if scores on cached prefixes differ from those of full inference, or if
    another gate fails.
    """
    from relaygr.demo.plan import PlanOverrides
    from relaygr.demo.run import DemoOptions, run_demo
    from relaygr.runtime.stop_signals import exit_on_sigterm

    exit_on_sigterm()
    if data is not None and (interactions is not None or model is not None):
        raise RelayError("--data has its own log and model: leave out --interactions and --model.")
    if retrieval is not None and data is None:
        raise RelayError("--retrieval finds candidates for what users did next in a log: give --data DIR, too.")
    if pool and data is not None:
        raise RelayError("--pool plays synthetic or --interactions histories: leave out --data.")
    wanted = list(DEFAULTS)
    if interactions is not None:
        wanted.append(f"traffic.interactions={interactions}")
    settings = command_settings(config, bootstrap, [*wanted, *(overrides or [])])
    console = stdout_console()
    stays = console.is_terminal if stay is None else stay
    overridden = PlanOverrides(deadline_ms, lead_ms, rate, seconds)
    folder, file = (None if path is None else path.resolve() for path in (data, retrieval))
    options = DemoOptions(broker, overridden, model, keep, yes, ui, stays, pool, folder, file)
    result = run_demo(console, settings, options)
    if not result.passed:
        raise typer.Exit(1)
