"""`relaygr calibrate`: measures a model on this machine, and writes the calibration file for workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from relaygr.cli.model_options import (
    ComputeDtypeOption,
    DeviceOption,
    KvDtypeOption,
    RankerModulesOption,
    ThreadsOption,
)
from relaygr.cli.options import require_writable
from relaygr.cli.texts import parse_size, plain_console, prints_to_stderr, stdout_console, warn_if_busy
from relaygr.progress import progress_bars
from relaygr.runtime.errors import RelayError
from relaygr.worker.model.options import DEFAULT_PAGE_TOKENS

if TYPE_CHECKING:
    from relaygr.worker.calibration import Calibration


_LONGER = 4.0
"""The second measurement's time, as a multiple of the first one's."""


def calibrate(
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")],
    out: Annotated[Path | None, typer.Option(help="File to write (JSON).", show_default="print only")] = None,
    device: DeviceOption = None,
    kv_dtype: KvDtypeOption = None,
    compute_dtype: ComputeDtypeOption = None,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Run forwards from captured graphs, as worker.cuda_graphs does.")
    ] = False,
    page_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of one K,V page.")] = DEFAULT_PAGE_TOKENS,
    threads: ThreadsOption = 1,
    ranker_module: RankerModulesOption = None,
    device_table_bytes: Annotated[
        str, typer.Option(help="The largest embedding table on the device, as worker.device_table_bytes.")
    ] = "4GiB",
    budget_s: Annotated[float, typer.Option(min=0.1, help="Duration of the measurement, seconds.")] = 30.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure for a few seconds, as a worker does at its start.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the content of the file instead of a table.")] = False,
) -> None:
    """Measure a device and fit its latency model.

    If the fit is far off the measured times, as on a busy machine, it measures once more, four times as long. A fit
    that is still far off is printed and not written, and the exit code is 1. With --quick it is written, unless it is
    nonsense.
    """
    # Imported here, so that --help answers without torch.
    from relaygr.machine import CoreWatch
    from relaygr.runtime.logs import configure_logging
    from relaygr.runtime.settings import LogLevel, LogSettings
    from relaygr.worker.calibration import (
        QUICK_BUDGET_S,
        QUICK_FIT_ERROR_BOUND,
        calibration_text,
        save_calibration,
    )
    from relaygr.worker.calibration import calibrate as measure
    from relaygr.worker.measuring import bind_own_arena
    from relaygr.worker.model.engine import load_engine
    from relaygr.worker.process.trial import require_finite_scores

    if out is not None:
        require_writable("--out", out)
    configure_logging(LogSettings(level=LogLevel.WARNING))
    console = stdout_console()
    table_bytes = parse_size("--device-table-bytes", device_table_bytes)
    with prints_to_stderr():
        engine = load_engine(
            model, device, kv_dtype, page_tokens, threads, compute_dtype, cuda_graphs, table_bytes, ranker_module or ()
        )
        require_finite_scores(engine, model)
    bind_own_arena(engine)
    with prints_to_stderr(), progress_bars() as bars, CoreWatch() as watch:
        bars.began("calibrating", 1)
        budget_s = QUICK_BUDGET_S if quick else budget_s
        calibration = measure(engine, budget_s, bars.share)
        if (problem := calibration.fit_problem) is not None:
            # More rounds: the fit uses the median of each point, which some slow passes do not change.
            typer.echo(f"{problem}: measuring again, for {_LONGER * budget_s:g} s", err=True)
            calibration = measure(engine, _LONGER * budget_s, bars.share)
    if as_json:
        typer.echo(calibration_text(calibration), nl=False)
    else:
        _print(console, calibration)
    warn_if_busy(watch.cores)
    if (problem := calibration.fit_problem) is not None:
        problem = problem[0].upper() + problem[1:]
        # A worker serves with such a fit, too, if it measures at its start.
        if not quick or max(calibration.fit_errors.values()) > QUICK_FIT_ERROR_BOUND:
            kept = "" if out is None else f"; nothing is written to {out}"
            raise RelayError(f"{problem}{kept}. Calibrate again on a quiet machine, or for longer (--budget-s).")
        typer.echo(f"{problem}. This was a quick measurement: calibrate without --quick for production.", err=True)
    if out is not None:
        save_calibration(calibration, out)
        plain_console(stderr=as_json).print(f"\nwritten to {out}; set worker.calibration of the workers to this file")


def _print(console: Console, calibration: Calibration) -> None:
    machine, model = calibration.machine, calibration.model
    console.print(
        f"{machine.device} ({machine.device_description}), {machine.threads} threads, torch {machine.torch_version}, "
        f"attention by {machine.backend}, products in {machine.compute_dtype}, K,V {machine.kv_dtype} in pages of "
        f"{machine.page_tokens} tokens. Lengths in tokens, times in ms:"
    )
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("prefix", "scored", "T_pre", "T_full", "T_hit", "full/hit", "T_full fit", "T_hit fit"):
        table.add_column(name, justify="right", no_wrap=True)
    hits = {(point.prefix_tokens, point.scored_tokens): point.duration_us for point in calibration.hit}
    for point in calibration.full:
        n, m = point.prefix_tokens, point.scored_tokens
        hit_us = hits[n, m]
        table.add_row(
            f"{n:,}",
            f"{m:,}",
            _ms(point.duration_us - hit_us),
            _ms(point.duration_us),
            _ms(hit_us),
            f"{point.duration_us / hit_us:.1f}",
            _fitted(model.full_us(n, m), point.duration_us),
            _fitted(model.hit_us(n, m), hit_us),
        )
    console.print(table)
    c = calibration.coefficients
    console.print(
        "Fitted, in µs, for n tokens of a prefix, of them k cached, and m scored tokens:\n"
        f"  T_full   = {c.a0:.0f} + {c.a1:.3g} (n + m) + {c.a2:.3g} (n + m)²\n"
        f"  T_pre    = {c.b0:.0f} + {c.b1:.3g} (n - k) + {c.b2:.3g} (n² - k²) + {c.b3:.3g} k\n"
        f"  T_hit    = {c.c0:.0f} + {c.c1:.3g} m + {c.c2:.3g} m (n + m) + {c.c3:.3g} n\n"
        f"  T_reload = {c.d0:.0f} + {c.d1:.3g} bytes\n" + _batches(calibration)
    )
    longest = max(calibration.full, key=lambda point: (point.prefix_tokens, point.scored_tokens))
    hit_us = hits[longest.prefix_tokens, longest.scored_tokens]
    console.print(
        f"With a cached prefix of {longest.prefix_tokens:,} tokens a request takes {_ms(hit_us)} ms on this device, "
        f"without it {_ms(longest.duration_us)} ms: {longest.duration_us / hit_us:.1f} times as long."
    )


def _fitted(fitted_us: float, measured_us: float) -> str:
    """The fitted time, and how far it is off."""
    return f"{_ms(fitted_us)} ({fitted_us / measured_us - 1:+.0%})"


def _batches(calibration: Calibration) -> str:
    shared_us = calibration.model.shared_us
    if shared_us is None:
        return "Batches were not measured."
    return f"Each request of a batch but the first takes {shared_us:.0f} µs less than alone."


def _ms(duration_us: float) -> str:
    return f"{duration_us / 1e3:,.2f}"
