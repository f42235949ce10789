"""`relaygr risk`: replays the trigger's test of the risk on the records of a run, and shows the trade."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from relaygr.cli.options import JsonOption
from relaygr.cli.texts import print_json, stdout_console
from relaygr.replay.risk import RULES, RiskResult, replay_risk, requests_of
from relaygr.runtime.errors import RelayError
from relaygr.traffic.records import read_records


def risk(
    records: Annotated[
        Path, typer.Argument(metavar="RECORDS", help="Records of `relaygr traffic` of a run without the relay.")
    ],
    calibration: Annotated[Path, typer.Option(metavar="FILE", help="File of `relaygr calibrate`.")],
    budget_ms: Annotated[float, typer.Option(min=1, help="Time limit of the ranking stage in that run, ms.")],
    rate_per_s: Annotated[float, typer.Option(min=0.1, help="Impressions a second and worker in that run.")] = 10.0,
    scored_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Suffix tokens and candidates of a request; without it, the number of its scores."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare rules of the risk: how many requests each misjudges, and how many it prepares needlessly."""
    from relaygr.worker.calibration import load_calibration

    requests = requests_of(read_records(records), scored_tokens)
    if not requests:
        raise RelayError(f"{records} has no request that ran in full: record a run with traffic.relay=false.")
    latency = load_calibration(calibration).model
    late = sum(not request.in_time for request in requests)
    results = [replay_risk(requests, rule, latency, int(budget_ms * 1000), rate_per_s) for rule in RULES]
    if as_json:
        print_json({"requests": len(requests), "late": late, "rules": [_row(result) for result in results]})
        return
    console = stdout_console()
    console.print(f"{len(requests)} requests ran in full, {late} of them truncated or late")
    console.print(_table(results))


def _row(result: RiskResult) -> dict[str, object]:
    own = {**asdict(result), "rule": result.rule.name}
    return {**own, "missed_share": result.missed_share, "needless_share": result.needless_share}


def _table(results: list[RiskResult]) -> Table:
    table = Table()
    for name in ("rule", "not at risk", "missed", "prepared", "needless", "device s"):
        table.add_column(name, justify="left" if name == "rule" else "right")
    for result in results:
        table.add_row(
            result.rule.name,
            str(result.left),
            f"{result.missed} ({result.missed_share:.1%})",
            str(result.prepared),
            f"{result.needless} ({result.needless_share:.1%})",
            f"{result.prepare_us / 1e6:.1f}",
        )
    return table
