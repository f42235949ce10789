"""`relaygr cache trace`: makes a trace for `relaygr cache replay` without running a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from relaygr.cli.options import ConfigOption, SetOption, command_settings
from relaygr.cli.texts import parse_size, plain_console
from relaygr.interactions import Interactions, read_interactions
from relaygr.replay.synthetic import records_of_interactions, records_of_schedule, write_trace
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import MAX_BEHAVIOURS
from relaygr.settings import Settings
from relaygr.traffic.population import LogPopulation, Population, SyntheticPopulation
from relaygr.worker.cache.trace import TraceHeader, TraceRecord
from relaygr.worker.kv import DramGeometry, KvDtype, KvGeometry, PrefixLayout


def trace(
    out: Annotated[Path, typer.Option(metavar="TRACE", help="File to write.")],
    interactions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A log of interactions: each becomes an impression.", show_default=False),
    ] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="The impressions of `relaygr traffic` with these settings.")
    ] = False,
    token_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Size of the K,V of one token.")] = "32KiB",
    lead_ms: Annotated[
        float, typer.Option(min=0, help="With --interactions: time from retrieval to ranking, ms.")
    ] = 150.0,
    max_behaviours: Annotated[
        int,
        typer.Option(min=1, max=MAX_BEHAVIOURS, help="With --interactions: longest prefix of the model, behaviours."),
    ] = 4096,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Make a trace from a log of interactions, or from the synthetic schedule (settings `traffic.*`).

    The trace takes page size, tier sizes and policies from the settings `worker.*`. A replay uses them by default.
    """
    if schedule == (interactions is not None):
        raise RelayError("Give one of --interactions FILE and --schedule.")
    settings = command_settings(config, overrides=overrides)
    header = _header(settings, _token_bytes(token_bytes))
    console = plain_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} {task.fields[unit]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        if interactions is not None:
            read = _read(interactions, progress)
            anchor = min(settings.worker.anchor_behaviours, max(1, max_behaviours // 4))
            records = records_of_interactions(read, round(lead_ms * 1000), max_behaviours, anchor)
        else:
            records = _scheduled(settings)
        task = progress.add_task("writing", total=None, unit="look-ups")
        written = write_trace(out, header, records, lambda done: progress.update(task, completed=done))
    size_mb = out.stat().st_size / 1e6
    console.print(f"{written:,} look-ups written to {out} ({size_mb:.1f} MB)", soft_wrap=True)


def _read(path: Path, progress: Progress) -> Interactions:
    task = progress.add_task("reading", total=path.stat().st_size if path.exists() else None, unit="bytes")
    return read_interactions(path, on_progress=lambda done: progress.update(task, completed=done))


def _scheduled(settings: Settings) -> Iterator[TraceRecord]:
    traffic = settings.traffic
    if not traffic.duration_s:
        raise RelayError("The schedule has no end: give --set traffic.duration_s=SECONDS.")
    population: Population = SyntheticPopulation(traffic)
    if traffic.interactions is not None:
        try:
            population = LogPopulation(read_interactions(traffic.interactions), traffic)
        except ValueError as error:
            raise RelayError(f"traffic.interactions {traffic.interactions}: {error}.") from error
    return records_of_schedule(traffic, population)


def _header(settings: Settings, token_bytes: int) -> TraceHeader:
    worker = settings.worker
    # One head of one layer: a replay counts bytes, so the shape does not matter.
    kv = KvGeometry(1, 1, token_bytes // 4, token_bytes // 4, worker.page_tokens, KvDtype.BFLOAT16)
    geometry = DramGeometry(kv)
    return TraceHeader(
        geometry=geometry,
        layout=PrefixLayout(contextual_tokens=1, tokens_per_behaviour=1),
        hbm_pages=int(worker.hbm_bytes) // kv.page_bytes,
        dram_pages=int(worker.dram_bytes) // geometry.page_bytes,
        hbm_policy=worker.hbm_policy,
        dram_policy=worker.dram_policy,
        ttl_us=round(worker.prefix_ttl_s * 1e6),
        latency=None,
    )


def _token_bytes(text: str) -> int:
    size_bytes = parse_size("--token-bytes", text)
    if size_bytes < 4 or size_bytes % 4:
        raise RelayError(f"--token-bytes {text} must be a multiple of 4: K and V, of two bytes each.")
    return size_bytes
