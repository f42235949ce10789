"""`relaygr model check MODEL`: what a model allows, found by experiment.

It tries the rules for its K,V, which are written beside a ranker of your own, and measures what types in fewer bits
change of its scores, and whether a hit is worth it.

The command imports torch only when it runs, so that `--help` answers without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from relaygr.cli.model_options import DeviceOption, RankerModulesOption
from relaygr.cli.options import ActionsOption, ColumnsOption, JsonOption
from relaygr.cli.texts import plain_console, print_json, prints_to_stderr, stdout_console
from relaygr.ingest.known import KnownModel, named_log
from relaygr.ingest.reading import read_interactions
from relaygr.progress import Bars, progress_bars
from relaygr.runtime.errors import RelayError
from relaygr.worker.kv import DramKvDtype, KvDtype
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from relaygr.worker.model.config import PrefixRules
    from relaygr.worker.model.interface import Engine
    from relaygr.worker.model_check import Finding, Rule
    from relaygr.worker.score_error import SampleUser
    from relaygr.worker.type_check import TypeFinding

EXIT_REFUSED = 1
CANDIDATES = 100
_RULES_SHARE = 2 / 3
"""Of the time. What the rules leave of it is for the types as well."""
_ROUNDS = 5
_LEAST_GAIN = 0.8
"""Of the time of full inference: a hit that takes more is worth no memory."""

# A link is resolved once: the command loads the model several times.
Model = Annotated[Path, typer.Argument(help="A checkpoint folder.", resolve_path=True)]
Interactions = Annotated[
    Path | None, typer.Option(help="Interaction log with the histories to rank.", show_default="random histories")
]
Users = Annotated[int | None, typer.Option(min=1, help="Number of users.", show_default="16 random, 100 from a log")]
MaxScoreError = Annotated[
    float | None,
    typer.Option(min=0.0, help="Limit for types in fewer bits.", show_default="0.01, as worker.*_max_score_error"),
]
MinTopkOverlap = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Limit, likewise.", show_default="0.95, as worker.*_min_topk_overlap"),
]
_EACH = "each in turn"


def check_command(
    model: Model,
    interactions: Interactions = None,
    columns: ColumnsOption = None,
    actions: ActionsOption = None,
    users: Users = None,
    minutes: Annotated[float, typer.Option(min=0.05, help="Time for all comparisons.")] = 3.0,
    kv_dtype: Annotated[
        KvDtype | None, typer.Option(help="Type of K,V on the device that is to serve.", show_default=_EACH)
    ] = None,
    dram_kv_dtype: Annotated[
        DramKvDtype | None, typer.Option(help="Type of K,V in the DRAM tier that is to serve.", show_default=_EACH)
    ] = None,
    compute_dtype: Annotated[
        ComputeDtype | None, typer.Option(help="Type of matrix products that is to serve.", show_default=_EACH)
    ] = None,
    max_score_error: MaxScoreError = None,
    min_topk_overlap: MinTopkOverlap = None,
    ranker_module: RankerModulesOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out by experiment what a model allows: chunks, histories that grow, later visits, types in fewer bits.

    With a type for K,V, the DRAM tier or products, only the types that are given are tried. The exit code is 1 if the
    model can not be served, or not in a type that was given or is the device's default.
    """
    from relaygr.runtime.logs import configure_logging
    from relaygr.runtime.settings import LogLevel, LogSettings
    from relaygr.worker.type_check import TypeCheck

    configure_logging(LogSettings(level=LogLevel.WARNING))
    until_s = time.monotonic() + 60 * minutes
    limits = Limits(max_score_error, min_topk_overlap)
    given = [each for each in (kv_dtype, dram_kv_dtype, compute_dtype) if each is not None]
    checking = TypeCheck(model, device, ranker_module or (), kv_dtype, compute_dtype)
    types = given or checking.every_type()
    with prints_to_stderr(), progress_bars() as bars:
        log = interactions, users, columns, actions
        tried = _try_rules(model, device, ranker_module or (), log, minutes, bars)
        measured: list[TypeFinding] = []
        if not tried.refused:
            bars.began("types", len(types))
            # Loading, and the times of hits, are no comparisons.
            types_s = max(60 * minutes * (1 - _RULES_SHARE), until_s - time.monotonic())
            for each in checking.run(types, *tried.sample, types_s, all_of_them=bool(given)):
                measured.append(each)
                bars.share(len(measured), each.text)
    beyond = [
        each
        for each in measured
        if (given and not limits.are_kept(each)) or (each.is_refused and checking.is_used(each))
    ]
    if as_json:
        print_json(_as_json(tried, measured, limits))
    else:
        console = stdout_console()
        _print_rules(console, tried)
        if measured:
            print_types(console, measured, limits)
        else:
            console.print("Types in fewer bits were not tried, since the model is refused.")
        _print_end(console, model, tried, beyond)
    if tried.refused or beyond:
        raise typer.Exit(EXIT_REFUSED)


@dataclass(frozen=True, slots=True)
class _Times:
    """Of the longest history, on this machine."""

    behaviours: int
    candidates: int
    hit_ms: float
    """Candidates on K,V that are there."""
    full_inference_ms: float


@dataclass(frozen=True, slots=True)
class _Tried:
    """What was found in float32, and the users and candidates with which."""

    sample: tuple[list[SampleUser], np.ndarray]
    findings: list[Finding]
    not_tried: list[Rule]
    rules: PrefixRules
    refused: list[Finding]
    """Of rules without which the model can not be served."""
    times: _Times
    window_step: int
    """How many of its oldest behaviours a history beyond the limit loses at a time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of types in fewer bits; None: the default of the type's settings."""

    max_score_error: float | None
    min_topk_overlap: float | None

    def of(self, found: TypeFinding) -> dict[str, float]:
        """By name."""
        setting = found.setting.partition("_")[0]
        return {
            name: float(WorkerSettings.model_fields[f"{setting}_{name}"].default) if given is None else given
            for name, given in asdict(self).items()
        }

    def are_kept(self, found: TypeFinding) -> bool:
        """Whether the error was measured, and is within the limits."""
        return found.error is not None and found.error.is_within(**self.of(found))


def _try_rules(
    model: Path,
    device: str | None,
    ranker_modules: Sequence[str],
    log: tuple[Path | None, int | None, str | None, str | None],
    minutes: float,
    bars: Bars,
) -> _Tried:
    """Writes the rules that were found beside a team's own ranker. Raises RelayError."""
    from relaygr.ranker.interface import files_beside_version
    from relaygr.worker.executor.resolver import longest_anchor
    from relaygr.worker.model.engine import engine_to_check
    from relaygr.worker.model.ranker_engine import RankerEngine
    from relaygr.worker.model.rankers import ranker_class, write_record
    from relaygr.worker.model_check import NEEDED, ModelCheck, Rule, rules_found

    engine = engine_to_check(model, device, ranker_modules)
    sample = sample_of(model, engine, *log)
    findings: list[Finding] = []
    bars.began("rules", len(Rule))
    for finding in ModelCheck(engine, *sample, 60 * minutes * _RULES_SHARE).run():
        findings.append(finding)
        bars.share(len(findings), finding.rule.text)
    rules = rules_found(findings)
    refused = [each for each in findings if each.rule in NEEDED and not each.holds]
    not_tried = [rule for rule in Rule if rule not in {each.rule for each in findings}]
    times = _times(engine)
    if isinstance(engine, RankerEngine) and engine.record is not None:
        _note_files(engine.record.ranker, files_beside_version(ranker_class(engine.record.ranker, ranker_modules)))
        if not refused:
            write_record(model, replace(engine.record, rules=rules))
    step = longest_anchor(WorkerSettings.model_fields["anchor_behaviours"].default, engine.limits)
    return _Tried(sample, findings, not_tried, rules, refused, times, step)


def _note_files(ranker: str, files: Sequence[str]) -> None:
    if files:
        plain_console(stderr=True).print(
            f"Note: the version of {ranker} is a hash of one file, which imports from {', '.join(files)}. When only "
            "these change, K,V of the earlier code are used again: give the class a `version`, and change it whenever "
            "its results change."
        )


def sample_of(
    model: Path,
    engine: Engine,
    interactions: Path | None,
    users: int | None,
    columns: str | None,
    actions: str | None = None,
) -> tuple[list[SampleUser], np.ndarray]:
    """The users to rank, and the candidates: of the log, or random without one."""
    from relaygr.worker.score_error import MADE_USERS, made_sample

    if interactions is None:
        return made_sample(engine, users or MADE_USERS)
    return _read_sample(model, interactions, engine, users or 100, columns, actions)


def _read_sample(
    model: Path, path: Path, engine: Engine, users: int, columns: str | None, actions: str | None
) -> tuple[list[SampleUser], np.ndarray]:
    """Random users of a log with their newest behaviours, and random items of the log as candidates."""
    from relaygr.worker.model.ranker_engine import RankerEngine
    from relaygr.worker.score_error import SampleUser

    ranker = engine if isinstance(engine, RankerEngine) and engine.record is not None else None
    known = KnownModel(model) if ranker is None else KnownModel(model, ranker.record, ranker.vocabulary)
    read, random = read_interactions(path, log_map=named_log(columns, actions, model)), np.random.default_rng(0)
    notes = [read.report.left_out] if read.report.bad_lines else []
    if not read.users:
        raise RelayError(". ".join((f"{path} contains no interactions", *notes)) + ".")
    for note in (*notes, *known.check_log(read)):
        plain_console(stderr=True).print(f"Note: {note}")
    chosen = random.choice(len(read.users), min(users, len(read.users)), replace=False)
    longest = engine.limits.max_prefix_behaviours
    items = np.unique(read.behaviours.items)
    candidates = random.choice(items, min(CANDIDATES, engine.limits.max_candidates, items.size), replace=False)
    features = np.empty(0, np.int64)
    return [SampleUser(features, read.of(int(index))[-longest:]) for index in chosen], candidates


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


def _as_json(tried: _Tried, measured: Sequence[TypeFinding], limits: Limits) -> dict[str, object]:
    return {
        "findings": [{**asdict(each), "rule": each.rule.name.lower(), "holds": each.holds} for each in tried.findings],
        "not_tried": [rule.name.lower() for rule in tried.not_tried],
        "rules": asdict(tried.rules),
        "window": {"behaviours": tried.times.behaviours, "step": tried.window_step},
        "times": asdict(tried.times),
        "types": [
            {
                "setting": each.setting,
                **asdict(each),
                "limits": limits.of(each),
                "within_limits": limits.are_kept(each),
            }
            for each in measured
        ],
    }


def _print_rules(console: Console, tried: _Tried) -> None:
    table = Table("what was tried", "result", "largest difference", "what it costs")
    for each in tried.findings:
        result = "holds" if each.holds else f"broken at {each.smallest}"
        cases = f"{each.error:.0e} in {each.tried}, up to {each.longest} behaviours"
        table.add_row(each.rule.text, result, cases, "" if each.holds else each.rule.cost)
    for rule in tried.not_tried:
        table.add_row(rule.text, "not tried: the model does not claim it", "", rule.cost)
    console.print(table)
    console.print(
        "In float32. Differences are shares of the spread of a user's scores. What was not tried: other histories than "
        "these."
    )
    times = tried.times
    console.print(
        f"{times.behaviours:,} behaviours, {times.candidates} candidates: a hit takes {times.hit_ms:.2f} ms, full "
        f"inference {times.full_inference_ms:.2f} ms."
    )
    if tried.rules.is_reusable and not tried.refused:
        # No experiment: K,V are found by their whole window, from its first behaviour on.
        console.print(
            f"Past {times.behaviours:,} behaviours the window slides: the oldest are left out {tried.window_step:,} at "
            "a time (worker.anchor_behaviours), and each time there is no reuse across visits."
        )


def print_types(console: Console, measured: Sequence[TypeFinding], limits: Limits) -> None:
    """Prints each error beside its limits."""
    from relaygr.worker.score_error import TOP_K

    table = Table(
        "types in fewer bits",
        "result",
        "largest change of a score",
        f"top {TOP_K} that stay",
        "prefixes in the same memory",
    )
    for each in measured:
        if each.error is None:
            table.add_row(each.text, f"not measured: {each.not_measured}")
            continue
        error, limit = each.error, limits.of(each)
        is_kept = "within" if limits.are_kept(each) else "beyond"
        table.add_row(
            each.text,
            f"{is_kept} the limits, {error.users} users, {error.candidates} candidates each",
            f"{error.max_score_error:.4%} ({limit['max_score_error']:.4%} at most)",
            f"{error.topk_overlap:.2%} ({limit['min_topk_overlap']:.2%} at least)",
            f"{each.room:.2f} times as many" if each.room != 1 else "",
        )
    console.print(table)
    console.print("Changes are relative to the spread of the scores of the same user and task.")


def _print_end(console: Console, model: Path, tried: _Tried, beyond: Sequence[TypeFinding]) -> None:
    """The last line: whether the model can be served, and what the relay is worth with it."""
    from relaygr.worker.model_check import Rule

    if tried.refused:
        broken = ", nor that ".join(each.rule.text for each in tried.refused)
        console.print(f"{model} can not be served: it is not so that {broken}.")
        return
    if any(each.rule is Rule.HISTORY and not each.holds for each in tried.findings):
        worth = "the relay does not pay: no score depends on the history"
    elif tried.times.hit_ms > _LEAST_GAIN * tried.times.full_inference_ms:
        worth = "the relay does not pay: a hit takes about as long as full inference"
    elif tried.rules.is_reusable:
        worth = "the relay serves each visit from the K,V of the visits before"
    else:
        worth = "the relay computes a prefix anew for each impression, ahead of the ranking request"
    types = ", nor with ".join(f"worker.{each.setting} {each.dtype}" for each in beyond)
    console.print(f"{model} can be served{f', but not with {types}' if types else ''}; {worth}.")
