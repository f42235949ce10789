"""The output of the demo: the plan, a live table during a run, and the summary of both runs.

The live table says first what is wrong, in the words of `relaygr.conditions`. Then it shows the answers of the gateway,
the cache of each worker, the pool, the decisions of the trigger, and the lag.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relaygr.admission.corrector import PredictionQuality
from relaygr.admission.latency import Stage, is_long_wait
from relaygr.conditions import Finding, Seen, Severity, judge
from relaygr.demo.plan import DemoPlan
from relaygr.demo.summary import (
    COLD_SHARE,
    Gate,
    LatencySummary,
    RunSummary,
    ScoreComparison,
    latency_summary,
    slow_machine,
    verdict,
)
from relaygr.kafka.session import KafkaSession
from relaygr.lag.monitor import LagMonitor
from relaygr.lag.report import GroupReport
from relaygr.lag.settings import LagSettings
from relaygr.processes import CommandProcess, read_metrics
from relaygr.schemas.ended import Ended
from relaygr.schemas.messages import Path
from relaygr.traffic.records import ImpressionRecord, in_time, parse_record
from relaygr.ui.model import STALE_MS, pool_of, ranges
from relaygr.ui.scrape import THROTTLE, Reading

if TYPE_CHECKING:
    from relaygr.demo.quality import QualityComparison

REFRESH_S = 0.5
PLAIN_INTERVAL_S = 5.0
_WINDOW = 500
_WRONG = "wrong      "
MOST_PROBLEMS = 3
"""Shown at once: the table must fit 24 lines, and the first ones are the gravest."""

Owners = Callable[[], Mapping[str, Sequence[int]]]
"""Partitions by worker id."""


class RecordTail:
    """The records of a growing file, read while they are written."""

    def __init__(self, path: FilePath) -> None:
        self._path = path
        self._offset = 0
        self.records: list[ImpressionRecord] = []

    def read(self) -> None:
        """Reads the new lines up to the last complete one."""
        if not self._path.exists():
            return
        with self._path.open("rb") as lines:
            lines.seek(self._offset)
            new = lines.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.records.extend(parse_record(line) for line in whole.splitlines())


class LagWatch:
    """Measures lag in the background, as a context manager."""

    def __init__(self, session: KafkaSession) -> None:
        self.monitor = LagMonitor(session, LagSettings(interval_s=2.0, record_timeout_s=0))

    def __enter__(self) -> LagWatch:
        self.monitor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.monitor.stop()

    @property
    def groups(self) -> Sequence[GroupReport]:
        """None before the first measurement."""
        report = self.monitor.state.report
        return () if report is None else report.groups


def _line(group: GroupReport) -> str:
    name = group.group.rpartition(".")[2]
    split = f", OWNER SPLIT of {len(group.owner_split)}" if group.owner_split else ""
    lag = "lag" if group.lag is None else f"{group.lag} messages,"
    return f"{name}: {lag} {group.status.value}{split}"


class Board:
    """Shows one run until it ends: a live table on a terminal, a line every few seconds elsewhere."""

    def __init__(
        self,
        console: Console,
        title: str,
        budget_ms: int,
        records: RecordTail,
        workers: Sequence[CommandProcess],
        trigger: CommandProcess | None,
        owners: Owners,
        lag: LagWatch | None,
        expected: int = 0,
    ) -> None:
        """`expected`: the requests of the run; 0: not known."""
        self._of_expected = f" of {expected:,}" if expected else ""
        self._console = console
        self._title = title
        self._budget_ms = budget_ms
        self._records = records
        self._workers = workers
        self._trigger = trigger
        self._owners = owners
        self._lag = lag
        self._told: set[str] = set()
        """The names of what was wrong when the last line was printed."""
        self._started_s = time.monotonic()

    def run(self, until: Callable[[], bool]) -> None:
        """Shows the run until `until()` is true. The last table stays on the screen."""
        if not self._console.is_terminal:
            self._run_plain(until)
            return
        with Live(console=self._console, refresh_per_second=4, transient=False) as live:
            while True:
                done = until()
                self._records.read()
                live.update(self._draw(), refresh=True)
                if done:
                    return
                time.sleep(REFRESH_S)

    def _run_plain(self, until: Callable[[], bool]) -> None:
        next_line_s = time.monotonic() + PLAIN_INTERVAL_S
        while not until():
            if time.monotonic() >= next_line_s:
                next_line_s += PLAIN_INTERVAL_S
                self._records.read()
                self._console.print(self._line())
                self._print_problems()
            time.sleep(0.2)
        self._records.read()

    def _line(self) -> str:
        records = self._records.records
        elapsed = f"{self._title}: {time.monotonic() - self._started_s:4.0f} s"
        if not records:
            return f"{elapsed}, no request has ended yet"
        recent = latency_summary(records[-_WINDOW:])
        late = sum(not in_time(record) for record in records)
        mix = ", ".join(f"{path} {count}" for path, count in _path_mix(records).most_common())
        return (
            f"{elapsed}, {len(records)}{self._of_expected} answered, {late} not whole in time, "
            f"P50 {_latency(recent.p50_ms)}, P99 {_latency(recent.p99_ms)} of {self._budget_ms} ms; {mix}"
        )

    def _print_problems(self) -> None:
        """Prints what is wrong and was not when the last line was printed."""
        found = self._problems(self._readings())
        for problem in found:
            if problem.name not in self._told:
                self._console.print(Text.assemble((_WRONG, "dim"), _problem(problem)), soft_wrap=True)
        self._told = {problem.name for problem in found}

    def _readings(self) -> dict[str, Reading]:
        """The metrics of workers and trigger, by name."""
        processes = [*self._workers, *([] if self._trigger is None else [self._trigger])]
        return {process.name: read_metrics(process.port) for process in processes}

    def _problems(self, readings: Mapping[str, Reading]) -> list[Finding]:
        recent = self._records.records[-_WINDOW:]
        failed = sum(record.status == Ended.FAILED for record in recent)
        truncated = sum(record.path == Path.TRUNCATED for record in recent)
        ranked = [record for record in recent if record.status == Ended.RANKED]
        # The statuses that were there before the run are read by then.
        is_heard = time.monotonic() - self._started_s > STALE_MS / 1000
        pools = {name: pool_of(reading) for name, reading in readings.items()}
        return judge(
            Seen(
                ready=len(self._owners()) if is_heard else None,
                ended=len(recent),
                late=sum(not in_time(record) for record in recent) - failed - truncated,
                failed=failed,
                truncated=truncated,
                ranked=len(ranked),
                waited=sum(map(self._waited_long, ranked)),
                groups=() if self._lag is None else self._lag.groups,
                held_back_s={name: reading.largest(THROTTLE) for name, reading in readings.items()},
                away=[name for name, pool in pools.items() if pool is not None and pool.away],
            )
        )

    def _waited_long(self, record: ImpressionRecord) -> bool:
        time_us = self._budget_ms * 1000 - (record.to_worker_us or 0)
        return record.timings is not None and is_long_wait(record.timings.queue_us, time_us)

    def _draw(self) -> RenderableType:
        readings = self._readings()
        problems = self._problems(readings)
        wrong = Table.grid()
        for problem in problems[:MOST_PROBLEMS]:
            wrong.add_row(Text(_WRONG, style="dim"), _problem(problem))
        if len(problems) > MOST_PROBLEMS:
            wrong.add_row("", Text(f"and {len(problems) - MOST_PROBLEMS} more", style="yellow"))
        parts: list[RenderableType] = [wrong] if problems else []
        parts += [self._gateway_lines(), self._worker_table([readings[worker.name] for worker in self._workers])]
        pools = [pool for reading in readings.values() if (pool := pool_of(reading)) is not None]
        if pools:
            written, loaded = (
                sum(counts) for counts in zip(*((each.written, each.loaded) for each in pools), strict=True)
            )
            parts.append(Text(f"pool       {written} written, {loaded} loaded"))
        if self._trigger is not None:
            parts.append(_decisions(readings[self._trigger.name]))
        if self._lag is not None and self._lag.groups:
            parts.append(Text("lag        " + "   ".join(map(_line, self._lag.groups)), style="dim"))
        return Group(*parts)

    def _gateway_lines(self) -> Text:
        records = self._records.records
        elapsed_s = time.monotonic() - self._started_s
        text = Text(f"{self._title}  ·  {elapsed_s:.0f} s", style="bold")
        if not records:
            return text.append("  ·  no request has ended yet", style="not bold")
        recent = latency_summary(records[-_WINDOW:])
        late = sum(not in_time(record) for record in records)
        text.append(
            f"  ·  {len(records)}{self._of_expected} answered, {len(records) / elapsed_s:.1f}/s\n"
            f"not whole in time {late / len(records):.1%}   P50 {_latency(recent.p50_ms)}   P99 ",
            style="not bold",
        )
        text.append(_latency(recent.p99_ms), style="red" if recent.p99_ms > self._budget_ms else "green")
        text.append(f"   deadline {self._budget_ms} ms\n", style="not bold")
        mix = _path_mix(records)
        paths = [f"{path} {mix[path]} ({mix[path] / len(records):.0%})" for path in Path if mix[path]]
        other = sum(record.status != Ended.RANKED for record in records)
        return text.append("   ".join([*paths, *([f"not ranked {other}"] if other else [])]), style="not bold")

    def _worker_table(self, readings: Sequence[Reading]) -> Table:
        table = Table(expand=False)
        for name in ("worker", "partitions", "HBM used", "DRAM used", "hits", "device s"):
            table.add_column(name, justify="left" if name in ("worker", "partitions") else "right", no_wrap=True)
        owners = self._owners()
        for worker, reading in zip(self._workers, readings, strict=True):
            partitions = owners.get(worker.name, ())
            table.add_row(
                worker.name,
                f"{len(partitions)}: {ranges(partitions)}" if partitions else "none",
                _used(reading, "hbm"),
                _used(reading, "dram"),
                "-" if reading.hit_share is None else f"{reading.hit_share:.0%}",
                f"{reading.total('relaygr_worker_device_seconds_total'):.1f}",
            )
        return table


def _problem(problem: Finding) -> Text:
    """What is wrong, and which section of the documentation helps."""
    style = "red" if problem.severity is Severity.CRITICAL else "yellow"
    return Text.assemble((f"{problem.text}.", style), f" See {problem.page}.")


def _path_mix(records: Sequence[ImpressionRecord]) -> Counter[str]:
    return Counter(record.path for record in records if record.path is not None)


def _decisions(reading: Reading) -> Text:
    counts = reading.by_label("relaygr_trigger_decisions_total", "reason")
    shown = "   ".join(f"{reason} {count:.0f}" for reason, count in sorted(counts.items()) if count)
    return Text(f"trigger    {shown or 'no events yet'}")


def _latency(latency_ms: float) -> str:
    """The latency; a dash for NaN, the percentile of no answers."""
    return "-" if math.isnan(latency_ms) else f"{latency_ms:.1f} ms"


def _used(reading: Reading, tier: str) -> str:
    held = reading.by_label("relaygr_cache_bytes", "held")
    samples = {state: reading.total("relaygr_cache_bytes", tier=tier, held=state) for state in held}
    total = sum(samples.values())
    if not total:
        return "-"
    unused = samples.get("free", 0.0)
    return f"{1 - unused / total:.0%} of {total / 2**20:.0f} MiB"


def print_plan(console: Console, plan: DemoPlan, users: int, expected: int = 0) -> None:
    """Prints the calibration, and the plan made from it. `expected`: the requests of each run; 0: not known."""
    workers = "one worker" if plan.workers == 1 else f"{plan.workers} workers"
    console.print(
        f"measured   full inference {plan.full_median_ms:.1f} ms at {plan.history_median} behaviours, "
        f"{plan.full_p90_ms:.1f} ms at {plan.history_p90}; pre-infer {plan.pre_infer_p90_ms:.1f} ms, "
        f"ranking on a cached prefix {plan.hit_ms:.1f} ms at {plan.history_p90}",
    )
    console.print(
        f"plan       {users} users, {plan.rate_per_s} impressions/s on {workers}; deadline "
        f"{plan.budget_ms} ms, lead time {plan.lead_ms} ms; a worker holds {plan.hbm_bytes / 2**20:.0f} MiB of K,V "
        f"in HBM, {plan.dram_bytes / 2**20:.0f} MiB in DRAM",
    )
    if expected:
        console.print(
            f"           {expected:,} test behaviours, twice {expected / plan.rate_per_s / 60:.1f} minutes or more "
            "(--seconds N plays fewer)"
        )
    if plan.cores.is_busy:
        console.print(
            f"busy       {plan.cores.said}: the rate is planned for the rest, and late shares say little. Run the demo "
            "on a quiet machine for a fair comparison.",
            style="yellow",
        )


def print_summary(
    console: Console,
    relay: RunSummary,
    full: RunSummary,
    budget_ms: int,
    comparison: ScoreComparison,
    shown: Sequence[Gate],
    quality: QualityComparison | None = None,
) -> None:
    """Prints both runs side by side, NDCG@10 where it is known, the gates, and the result in one sentence."""
    table = Table(title=f"The same schedule, deadline {budget_ms} ms", title_justify="left")
    table.add_column("")
    table.add_column("relay on", justify="right")
    table.add_column("relay off", justify="right")
    runs = (relay, full)
    table.add_row("requests offered", *(str(run.offered) for run in runs))
    table.add_row("ranked", *(f"{run.ranked} ({run.share(run.ranked):.1%})" for run in runs))
    table.add_row("lost", *(str(run.lost) for run in runs))
    _add_punctuality(table, [run.whole for run in runs])
    table.add_section()
    table.add_row(f"Without the first {COLD_SHARE:.0%} (cold start):")
    _add_punctuality(table, [run.warm for run in runs])
    table.add_section()
    for ending in sorted(set(relay.endings) | set(full.endings)):
        table.add_row(ending, *(_count(run, ending) for run in runs))
    table.add_row("prefix from DRAM", *(str(run.from_dram) for run in runs))
    table.add_section()
    table.add_row("device seconds", *(f"{run.device_seconds:.1f}" for run in runs))
    table.add_row("of these, warm-up", *(f"{run.warm_up_seconds:.1f}" for run in runs))
    table.add_row("generator delay, P99", *(f"{run.send_lag_p99_ms:.2f} ms" for run in runs))
    table.add_section()
    stages = ((Stage.PRE, "pre-infer"), (Stage.HIT, "ranking on cached K,V"), (Stage.FULL, "full inference"))
    found = [run.predictions for run in runs]
    table.add_row("Device time, measured / calibrated:")
    for stage, name in stages:
        table.add_row(name, *(_slowdown(each.device.get(stage)) for each in found))
    table.add_row("Predicted / measured, P10 P50 P90:")
    for stage, name in stages:
        table.add_row(name, *(_ratios(each.device.get(stage)) for each in found))
    table.add_section()
    table.add_row("not at risk, then late or cut", *(_part(each.misjudged, each.not_at_risk) for each in found))
    table.add_row("pre-inferred needlessly", *(_part(each.needless, each.computed) for each in found))
    console.print()
    console.print(table)
    console.print(
        f"scores     {comparison.compared} requests compared with full inference, worst error "
        f"{comparison.worst_error:.1e} of the largest score"
    )
    if quality is not None:
        _print_quality(console, quality)
    print_gates(console, shown, [relay])
    console.print(f"\n{verdict(relay, full)}")


def _print_quality(console: Console, quality: QualityComparison) -> None:
    console.print(
        f"choices    {quality.served.behaviours:,} test behaviours of {quality.served.users} users; of "
        f"{quality.retrieved_share:.1%} the item was among the candidates, the others count 0"
    )
    if quality.other_model:
        console.print(f"           {quality.other_model:,} more were answered by different models, and are left out")
    table = Table(title="NDCG@10 of the item that the user chose, relay on and off", title_justify="left")
    for name in ("requests", "n", "retrieval", "on", "off", "on - off", "95 % interval"):
        table.add_column(name, justify="left" if name == "requests" else "right", no_wrap=True)
    for name, row in (("all", quality.served), ("both in time", quality.both), ("truncated", quality.on_part)):
        found, means = row.difference, (f"{each.mean:.3f}" for each in (row.retrieval, row.relay, row.full))
        interval = f"{found.low:+.3f} to {found.high:+.3f}" if row.users > 1 else "one user"
        values = (*means, f"{found.mean:+.3f}", interval)
        table.add_row(name, f"{row.behaviours:,}", *(values if row.behaviours else "-" * 5))
    console.print(table)
    console.print(
        "           Retrieval is its own order of the candidates, without a ranker. In the row all, a request without "
        "an answer in time counts 0. Truncated are requests that were in time in both runs, and without the relay were "
        "ranked on a part of the history."
    )


def print_gates(console: Console, shown: Sequence[Gate], runs: Sequence[RunSummary]) -> None:
    """Prints whether each gate of these runs was passed, and what to do if one was not because the machine was slow."""
    for gate in shown:
        mark, note = (("yes", "green") if gate.passed else ("NO ", "red")), ""
        if not gate.passed and not gate.judged:
            mark, note = ("?  ", "yellow"), " (not judged: the machine is busy or slow)"
        console.print(Text.assemble(mark, f"        {gate.name}: {gate.found}{note}"))
    why = slow_machine(runs, shown)
    if why:
        console.print(f"slow       {why}", style="yellow")


def _add_punctuality(table: Table, runs: Sequence[LatencySummary]) -> None:
    table.add_row("late, truncated, failed or expired", *(f"{run.late} ({run.late_share:.1%})" for run in runs))
    table.add_row("P50", *(_latency(run.p50_ms) for run in runs))
    table.add_row("P99", *(_latency(run.p99_ms) for run in runs))
    table.add_row("P99 of all offered", *(_or_none(run.offered_p99_ms) for run in runs))


def _slowdown(quality: PredictionQuality | None) -> str:
    return "-" if quality is None else f"{quality.slowdown:.2f}"


def _ratios(quality: PredictionQuality | None) -> str:
    return "-" if quality is None else f"{quality.ratio_p10:.2f} {quality.ratio_p50:.2f} {quality.ratio_p90:.2f}"


def _part(count: int, whole: int) -> str:
    return f"{count} of {whole}" if whole else "-"


def _or_none(latency_ms: float) -> str:
    return f"{latency_ms:.1f} ms" if math.isfinite(latency_ms) else "no whole answer"


def _count(run: RunSummary, ending: str) -> str:
    count = run.endings.get(ending, 0)
    return f"{count} ({run.share(count):.1%})" if count else "-"
