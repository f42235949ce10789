"""`relaygr cache`: compares eviction policies and sizes on a trace; looks at the cache of a running worker."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from relaygr.admission.latency import LatencyModel
from relaygr.cli.cache_admin import drop, limit, show
from relaygr.cli.cache_trace import trace
from relaygr.cli.options import JsonOption
from relaygr.cli.texts import parse_size, plain_console, print_json, stdout_console
from relaygr.replay.bound import HitBound
from relaygr.replay.demand import Demands, demands_of
from relaygr.replay.link import LinkSpeed
from relaygr.replay.parallel import replay_all
from relaygr.replay.run import Candidate, ReplayEnvironment, ReplayResult
from relaygr.replay.tables import bounds_of, name_of, tables_of
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.cache.policies import PolicyName, TierPolicies
from relaygr.worker.cache.trace import TraceHeader, TraceReader

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Look at a running worker's cache and change it; compare eviction policies on a trace.",
)
for command in (show, drop, limit, trace):
    app.command()(command)

_GIB = 2**30
_ASSUMED = LatencyCoefficients(
    a0=1_000, a1=5.0, a2=5e-4, b0=1_000, b1=5.0, b2=5e-4, c0=1_000, c1=5.0, c2=5e-4, d0=30, d1=5e-5
)  # fmt: skip
"""Latency used if neither the trace nor the command line gives one: roughly that of an accelerator."""


@app.command("replay")
def replay_command(
    trace_file: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Trace of a worker (worker.cache_trace) or of `cache trace`.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(PolicyName)}; or two of them as HBM/DRAM. May be repeated.", show_default="all"),
    ] = None,
    hbm: Annotated[
        list[str] | None, typer.Option(help="HBM size, such as 1GiB. May be repeated.", show_default="as recorded")
    ] = None,
    dram: Annotated[
        list[str] | None,
        typer.Option(help="DRAM size; 0 for no DRAM tier. May be repeated.", show_default="as recorded"),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Picture to write.", show_default=False)] = None,
    ttl_s: Annotated[
        float | None, typer.Option(min=0.001, help="Time to live of policy ttl, seconds.", show_default="as recorded")
    ] = None,
    link_gib_s: Annotated[float, typer.Option(min=0.001, help="Speed of copies between the tiers, GiB/s.")] = 20.0,
    link_delay_us: Annotated[float, typer.Option(min=0, help="Fixed time of each copy, µs.")] = 30.0,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Calibration file with the device's latency.", show_default="as recorded"),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Replay at most this many look-ups, from the first.")] = 1_000_000,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes for the candidates.", show_default="as many as cores")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace against other policies and sizes, and compare.

    A hit is a visit that found everything that it shares with the user's previous visit. The bound is an upper limit
    for any policy: see docs/cache-policies.md.
    """
    # Beside JSON, notes go to standard error.
    console = plain_console(stderr=True) if as_json else stdout_console()
    if plot is not None:
        # Imported here since it takes a second, and only --plot needs it.
        from relaygr.replay.plots import require_plot, save_plot

        require_plot(plot)
    reader = TraceReader(trace_file)
    header = reader.header
    coefficients = _coefficients(console, header, calibration)
    speed = LinkSpeed(link_delay_us, link_gib_s * _GIB / 1e6)
    environment = ReplayEnvironment(header.geometry, header.layout, LatencyModel(coefficients), speed)
    ttl_us = header.ttl_us if ttl_s is None else round(ttl_s * 1e6)
    pairs = (
        [_policies(text, ttl_us) for text in policy]
        if policy
        else [TierPolicies(name, name, ttl_us) for name in PolicyName]
    )
    hbm_sizes = (
        [parse_size("--hbm", text) for text in hbm] if hbm else [header.hbm_pages * header.geometry.kv.page_bytes]
    )
    dram_sizes = (
        [parse_size("--dram", text) for text in dram] if dram else [header.dram_pages * header.geometry.page_bytes]
    )
    if min(hbm_sizes) < header.geometry.kv.page_bytes:
        raise RelayError(f"--hbm has no room for a page of {header.geometry.kv.page_bytes} bytes: give a larger size.")
    candidates = [
        Candidate(policies, hbm_bytes, dram_bytes)
        for hbm_bytes, dram_bytes, policies in itertools.product(hbm_sizes, dram_sizes, pairs)
    ]
    demands = _read(reader, limit)
    if not len(demands):
        raise RelayError(f"The trace {trace_file} contains no look-ups yet: there is nothing to replay.")
    _describe(console, trace_file, header, demands, limit)
    bound = HitBound(demands, header.layout, header.geometry.kv.page_tokens)
    results = _replay_all(demands, environment, candidates, jobs or os.cpu_count() or 1)
    if as_json:
        print_json([_row(result, bound, environment) for result in results])
    else:
        _print(console, results, bound, environment)
    if plot is not None:
        title = f"{trace_file.name}: visits that found all they could reuse"
        save_plot(plot, title, results, bound, environment)
        console.print(f"plot written to {plot}")


def _row(result: ReplayResult, bound: HitBound, environment: ReplayEnvironment) -> dict[str, object]:
    candidate = result.candidate
    in_hbm, in_either = bounds_of(bound, environment, candidate)
    return {
        **asdict(result),
        "candidate": {
            "policy": name_of(candidate.policies),
            "hbm_bytes": candidate.hbm_bytes,
            "dram_bytes": candidate.dram_bytes,
        },
        "hbm_hits_bound": in_hbm,
        "hits_bound": in_either,
    }


def _print(console: Console, results: list[ReplayResult], bound: HitBound, environment: ReplayEnvironment) -> None:
    for table in tables_of(results, bound, environment):
        console.print()
        console.print(table)
    console.print(
        f"\n{bound.visits:,} visits, {_share(bound.with_all_room, bound.visits)} of which could reuse a cached prefix. "
        "A visit that finds all of it is a hit. "
        f"Computed: share of the {results[0].asked_tokens:,} requested tokens, including first visits and growth. "
        "Time: their device time, as a share of that of all requested tokens. "
        "Evicted: from HBM + from DRAM. Bound: no policy can have more hits."
    )


def _coefficients(console: Console, header: TraceHeader, calibration: Path | None) -> LatencyCoefficients:
    if calibration is not None:
        # Imported here since it imports torch.
        from relaygr.worker.calibration import load_calibration

        return load_calibration(calibration).coefficients
    if header.latency is not None:
        return header.latency
    console.print(
        "The trace has no latency of its device. The replay assumes that a pre-infer of 1,000 tokens takes "
        f"{LatencyModel(_ASSUMED).pre_us(1000) / 1000:.1f} ms; --calibration gives measured times."
    )
    return _ASSUMED


def _read(reader: TraceReader, limit: int) -> Demands:
    with _progress(TaskProgressColumn()) as progress:
        task = progress.add_task("reading", total=reader.size_bytes)
        return demands_of(reader.rows(lambda done: progress.update(task, completed=done)), limit)


def _replay_all(
    demands: Demands, environment: ReplayEnvironment, candidates: Sequence[Candidate], jobs: int
) -> list[ReplayResult]:
    with _progress(MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("replaying", total=len(demands) * len(candidates))
        return replay_all(demands, environment, candidates, jobs, lambda done: progress.update(task, completed=done))


def _progress(*columns: ProgressColumn) -> Progress:
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    return Progress(*shown, console=Console(stderr=True), transient=True)


def _describe(console: Console, path: Path, header: TraceHeader, demands: Demands, limit: int) -> None:
    kv = header.geometry.kv
    console.print(
        f"{path}: {len(demands):,} look-ups by {demands.user_count:,} users in {demands.seconds:,.0f} s; "
        f"{kv.bytes_per_token:,} bytes a token, pages of {kv.page_tokens} tokens"
    )
    if len(demands) == limit:
        console.print(f"Only the first {limit:,} look-ups are replayed: --limit sets another number.")


def _policies(text: str, ttl_us: int) -> TierPolicies:
    names = text.split("/")
    try:
        hbm, dram = (PolicyName(name) for name in (names if len(names) == 2 else (text, text)))
    except ValueError:
        known = ", ".join(PolicyName)
        raise RelayError(f"--policy {text}: give one of {known}, or two of them as HBM/DRAM.") from None
    return TierPolicies(hbm, dram, ttl_us)


def _share(count: int, of: int) -> str:
    return f"{100 * count / max(1, of):.1f} %"
