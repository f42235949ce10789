"""How many requests a second full inference, a cache alone and the relay carry within one deadline.

    KAFKA_HOME=... python -m benchmarks.headline --broker kafka

plays three loads (no, 60 % and 90 % of the impressions by users who return) on each system through the whole pipeline,
with two seeds, and then asks for the longest histories in virtual time. MLCommons' LoadGen sends the queries and judges
each run. That takes about three hours on two cores. `--quick` has one seed, takes about half an hour, and is
indicative.

The same command goes on after an interruption or after `--minutes`: every run is a row of a file in `--out`. `--report`
measures nothing, and makes the report of that folder again, with `--quick` that of its quick runs; `--page
docs/benchmark.md` also writes the table and the plot between the marks of that page.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from relaygr.runtime.errors import RelayError

OUT = Path("build/headline")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="One seed, short runs: indicative, half an hour.")] = False,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    minutes: Annotated[
        float | None, typer.Option(min=1, help="Begin nothing that would end later.", show_default="no limit")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds.", show_default="2; 1 with --quick")] = None,
    history: Annotated[int, typer.Option(min=64, help="Median history, in behaviours.")] = 2_048,
    deadline: Annotated[float, typer.Option(min=0.1, help="Deadline as a multiple of full inference.")] = 5.0,
    out: Annotated[Path, typer.Option(help="Folder of the rows, the plan and the report.")] = OUT,
    report: Annotated[bool, typer.Option("--report", help="Measure nothing: only make the report again.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Also write the table and the plot into this page.", show_default=False)
    ] = None,
) -> None:
    """Measure how many requests a second each system carries within the deadline, at three loads."""
    from dataclasses import replace
    from importlib.util import find_spec

    from relaygr.bench.headline import question
    from relaygr.bench.headline.report import check_page, write_report
    from relaygr.bench.headline.run import LiveBench, measured_machine
    from relaygr.bench.headline.search import Rows, Search, TimeIsUpError, progress_bar
    from relaygr.cli.texts import plain_console
    from relaygr.devbroker import check_broker, local_broker
    from relaygr.runtime.logs import configure_logging
    from relaygr.runtime.settings import LogLevel, LogSettings

    configure_logging(LogSettings(level=LogLevel.WARNING))
    if page is not None:
        check_page(page)  # Before the runs, not after them.
    effort = question.QUICK if quick else question.FULL
    if seeds is not None:
        effort = replace(effort, seeds=tuple(range(1, seeds + 1)))
    console, rows = plain_console(), Rows(out)
    if report:
        if not rows.runs:
            raise RelayError(f"{out} has no rows: measure first, or name another folder with --out")
        write_report(console, out, rows, effort, page)
        return
    if find_spec("mlperf_loadgen") is None:
        raise RelayError(
            "LoadGen is not installed: pip install 'relaygr[bench]'. Python 3.14 and Linux on arm64 have none."
        )
    ends_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
    check_broker(broker, os.environ.get("RELAYGR_BOOTSTRAP"))  # Before the measurement, not after it.
    console.print(f"measuring the engine alone, unless {out} has its times")
    on = measured_machine(out, history, deadline)
    console.print(
        f"full inference on {history:,} behaviours takes {on.plan.full_ms:.1f} ms, ranking on cached K,V "
        f"{on.plan.hit_ms:.1f} ms; deadline {on.plan.deadline_ms} ms",
        soft_wrap=True,
    )
    with local_broker(broker, os.environ.get("RELAYGR_BOOTSTRAP")) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        with LiveBench(on, started, effort) as bench, progress_bar(console) as progress:
            rows.refuse_others(on.plan.machine, bench.broker_name)
            search = Search(rows, on, effort, progress, ends_s)
            try:
                search.live(bench)
                search.histories()
            except TimeIsUpError:
                progress.console.print("The time is up: the same command goes on.")
    write_report(console, out, rows, effort, page)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
