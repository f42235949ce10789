"""`relaygr model check MODEL`: what a model allows, found by experiment, and written beside a ranker of your own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from relaygr.cli.model_check import CANDIDATES, Interactions, Model, Users, sample_of
from relaygr.cli.model_options import DeviceOption, RankerModulesOption
from relaygr.cli.options import ColumnsOption, JsonOption
from relaygr.cli.texts import print_json, stdout_console
from relaygr.progress import progress_bars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relaygr.worker.model.config import PrefixRules
    from relaygr.worker.model.interface import Engine
    from relaygr.worker.model_check import Finding

EXIT_REFUSED = 1
_ROUNDS = 5
_LEAST_GAIN = 0.8
"""Of the time of full inference: a hit that takes more is worth no memory."""


def check_command(
    model: Model,
    interactions: Interactions = None,
    columns: ColumnsOption = None,
    users: Users = None,
    minutes: Annotated[float, typer.Option(min=0.05, help="Time for all comparisons.")] = 3.0,
    ranker_module: RankerModulesOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out by experiment what a model allows: chunks, histories that grow, later visits. The exit code is 1 if it
    can not be served.
    """
    from relaygr.worker.model.engine import engine_to_check
    from relaygr.worker.model.ranker_engine import RankerEngine
    from relaygr.worker.model.rankers import write_record
    from relaygr.worker.model_check import NEEDED, ModelCheck, Rule, rules_found

    engine = engine_to_check(model, device, ranker_module or ())
    sample, candidates = sample_of(model, engine, interactions, users, columns)
    findings: list[Finding] = []
    check = ModelCheck(engine, sample, candidates, 60 * minutes)
    with progress_bars() as bars:
        bars.began("checking", len(Rule))
        for finding in check.run():
            findings.append(finding)
            bars.share(len(findings), finding.rule.text)
    rules = rules_found(findings)
    refused = [each for each in findings if each.rule in NEEDED and not each.holds]
    times = _times(engine)
    if isinstance(engine, RankerEngine) and not refused:
        write_record(model, replace(engine.record, rules=rules))
    if as_json:
        rows = [{**asdict(each), "rule": each.rule.name.lower(), "holds": each.holds} for each in findings]
        print_json({"findings": rows, "rules": asdict(rules), "times": asdict(times)})
    else:
        _print(stdout_console(), findings, times)
        _print_end(stdout_console(), model, rules, times, refused)
    if refused:
        raise typer.Exit(EXIT_REFUSED)


@dataclass(frozen=True, slots=True)
class _Times:
    """Of the longest history, on this machine."""

    behaviours: int
    candidates: int
    hit_ms: float
    """Candidates on K,V that are there."""
    full_inference_ms: float


def _times(engine: Engine) -> _Times:
    """The fastest of some rounds: others can only slow them down."""
    from relaygr.worker.measuring import EngineMeter, bind_own_arena

    bind_own_arena(engine)
    meter = EngineMeter(engine)
    tokens, candidates = meter.longest_tokens, min(CANDIDATES, engine.limits.max_candidates)
    hits, prefixes = [], []
    for _ in range(_ROUNDS):
        prefixes.append(sum(point.duration_us for point in meter.prefix(tokens, tokens)))
        hits.append(meter.rank(tokens, candidates).duration_us)
    hit_ms = min(hits) / 1e3
    return _Times(engine.limits.max_prefix_behaviours, candidates, hit_ms, hit_ms + min(prefixes) / 1e3)


def _print(console: Console, findings: Sequence[Finding], times: _Times) -> None:
    table = Table("what was tried", "result", "largest difference", "what it costs")
    for each in findings:
        result = "holds" if each.holds else f"broken at {each.smallest}"
        table.add_row(each.rule.text, result, f"{each.error:.0e} in {each.tried}", "" if each.holds else each.rule.cost)
    console.print(table)
    console.print(
        "Differences are shares of the spread of a user's scores. What was not tried: other histories than these, and "
        "element types in fewer bits (`relaygr model check-kv`, `check-dram`)."
    )
    console.print(
        f"{times.behaviours:,} behaviours, {times.candidates} candidates: a hit takes {times.hit_ms:.2f} ms, full "
        f"inference {times.full_inference_ms:.2f} ms."
    )


def _print_end(console: Console, model: Path, rules: PrefixRules, times: _Times, refused: Sequence[Finding]) -> None:
    """The last line: whether the model can be served, and what the relay is worth with it."""
    if refused:
        broken = ", nor that ".join(each.rule.text for each in refused)
        console.print(f"{model} can not be served: it is not so that {broken}.")
        return
    if times.hit_ms > _LEAST_GAIN * times.full_inference_ms:
        worth = "the relay does not pay: a hit takes about as long as full inference"
    elif rules.is_reusable:
        worth = "the relay serves each visit from the K,V of the visits before"
    else:
        worth = "the relay computes a prefix anew for each impression, ahead of the ranking request"
    console.print(f"{model} can be served; {worth}.")
