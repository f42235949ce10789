"""The phases of the demo.

    calibrate -> plan -> broker -> relay on -> relay off, same schedule -> reference scores -> summary

Each run has its own topics, groups and processes: trigger, workers and gateway, which communicate only through the
broker. This process shows their `/metrics`, and serves a page that shows both runs (`relaygr.ui`).
"""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.prompt import Confirm

from relaygr.demo.board import print_plan, print_summary
from relaygr.demo.data import data_settings, deployed, locked, trained_run
from relaygr.demo.plan import DemoPlan, PlanOverrides
from relaygr.demo.pool import PoolDemo, require_pool, run_pool
from relaygr.demo.prepare import (
    CALIBRATION_FILE,
    expected_count,
    make_model,
    plan_for_this_machine,
    planned_settings,
    settle_s,
)
from relaygr.demo.stack import DemoStack, show_phase
from relaygr.demo.summary import Gate, RunSummary, ScoreComparison, compare_scores, gate_views, gates
from relaygr.devbroker import BrokerChoice, Chosen, LocalBroker, check_broker, local_broker
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings
from relaygr.traffic.population import population_of
from relaygr.traffic.records import read_records
from relaygr.ui.page import Page
from relaygr.ui.server import UiServer
from relaygr.ui.settings import UiSettings

if TYPE_CHECKING:
    from relaygr.demo.quality import QualityComparison


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command."""

    broker: str
    overrides: PlanOverrides
    model: Path | None
    keep: Path | None
    assume_yes: bool
    serve_page: bool
    stay: bool
    """Serve the page after the runs until Ctrl-C."""
    pool: bool = False
    """Play the schedule twice, with new workers and the pool of the first ones the second time."""
    data: Path | None = None
    """Play the log in this folder (`relaygr.demo.data`) with a trained ranker, instead of a random one."""
    retrieval: Path | None = None
    """With `data`: the file of `relaygr train retrieval` that retrieves, instead of the ranker."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both runs, the comparison of their scores, and the gates."""

    plan: DemoPlan
    relay: RunSummary
    full: RunSummary
    comparison: ScoreComparison
    gates: tuple[Gate, ...]
    quality: QualityComparison | None = None
    """NDCG@10 of both runs; None without a log that says what users chose."""

    @property
    def passed(self) -> bool:
        return not any(gate.failed for gate in self.gates)


def run_demo(console: Console, settings: Settings, options: DemoOptions) -> DemoResult | PoolDemo:
    """Runs all phases and prints their progress. Raises RelayError for errors that the user can fix."""
    if settings.traffic.held_out is not None:
        raise RelayError("traffic.held_out is for `relaygr traffic`: the demo has --data DIR.")
    # Before the calibration, which takes a while and which a broker of ours would disturb.
    chosen = check_broker(options.broker, _known_bootstrap(settings), settings)
    prefix = _own_prefix(console, chosen, options.assume_yes)
    if options.pool:
        require_pool()
    run = _run_pool if options.pool else _run
    if not options.serve_page:
        return run(console, settings, options, prefix, None)
    page = Page("RelayGR demo", "Workers that fill the pool, and new workers") if options.pool else Page("RelayGR demo")
    page.set_phase("measuring this machine")
    with _server(page, settings.ui) as server:
        _print_address(console, server)
        result = run(console, settings, options, prefix, page)
        page.judge(gate_views(result.gates))
        page.set_phase("both runs have ended")
        if options.stay:
            with suppress(KeyboardInterrupt):
                _print_address(console, server, " shows the comparison until Ctrl-C")
                threading.Event().wait()
        return result


def _run_pool(console: Console, settings: Settings, options: DemoOptions, prefix: str, page: Page | None) -> PoolDemo:
    with _folder(options.keep) as folder:
        population, calibration = population_of(settings.traffic), folder / CALIBRATION_FILE
        model = options.model or make_model(folder / "model", settings, population)
        plan = plan_for_this_machine(console, calibration, model, settings, population, options.overrides)
        print_plan(console, plan, population.size)
        with _broker(console, settings, options) as broker:
            planned = planned_settings(settings, plan, model, calibration, broker, population.size)
            return run_pool(console, planned, broker, prefix, folder, plan, page)


def _run(console: Console, settings: Settings, options: DemoOptions, prefix: str, page: Page | None) -> DemoResult:
    with _folder(options.keep) as folder, nullcontext() if options.data is None else locked(options.data):
        checkpoint = options.model
        if options.data is not None:
            show_phase(page, "training a ranker, if the folder has none")
            run = trained_run(console, options.data)
            from relaygr.traffic.held_out import retrieval_text  # It imports torch.

            console.print(f"retrieval  {retrieval_text(run.folder, options.retrieval)}", soft_wrap=True)
            settings, checkpoint = data_settings(settings, run.folder, options.retrieval), run.checkpoint
            show_phase(page, "measuring this machine")
        population = population_of(settings.traffic)
        checkpoint = checkpoint or make_model(folder / "model", settings, population)
        calibration = folder / CALIBRATION_FILE
        plan = plan_for_this_machine(console, calibration, checkpoint, settings, population, options.overrides)
        model, measured = checkpoint, calibration
        if options.data is not None:
            model = deployed(checkpoint, calibration, options.data)
            measured = model / CALIBRATION_FILE
            console.print(f"to deploy  relaygr model deploy CHECKPOINT {model.parent}")
        expected = expected_count(plan, settings, population)
        print_plan(console, plan, population.size, expected)
        with _broker(console, settings, options) as broker:
            planned = planned_settings(settings, plan, model, measured, broker, population.size)
            relay_file, full_file, reference_file = (
                folder / f"{name}.jsonl" for name in ("relay", "full", "reference")
            )

            def stack(name: str, *, relay: bool) -> DemoStack:
                show_phase(page, "starting the workers")
                named = _named(planned, f"{prefix}-{name}")
                return DemoStack(console, folder, broker, named, relay=relay, workers=plan.workers, page=page)

            with stack("relay", relay=True) as running:
                pause = f"traffic.settle_s={settle_s(planned, plan, population.size)}"
                relay = running.play("relay on", relay_file, overrides=[pause], expected=expected)
            if options.data is not None:
                # Both runs begin with the same checkpoint, whatever was deployed meanwhile.
                deployed(checkpoint, calibration, options.data)
            with stack("full", relay=False) as running:
                full = running.play("relay off", full_file, expected=expected)
                running.play_reference(reference_file, relay_file)
        comparison = compare_scores(read_records(relay_file), read_records(reference_file))
        quality = None
        if options.data is not None:
            from relaygr.demo.quality import compare_quality  # It imports torch.

            quality = compare_quality(read_records(relay_file), read_records(full_file))
        judged = gates(relay, full, comparison, plan.cores.is_busy)
        print_summary(console, relay, full, plan.budget_ms, comparison, judged, quality)
        return DemoResult(plan, relay, full, comparison, judged, quality)


@contextmanager
def _server(page: Page, ui: UiSettings) -> Iterator[UiServer]:
    """The server of the page. If the port is taken and nobody asked for it, any free one."""
    token = ui.token.get_secret_value() if ui.token is not None else None
    server = UiServer(page, ui.http_host, ui.http_port, token)
    try:
        server.start()
    except RelayError:
        if "http_port" in ui.model_fields_set:
            raise
        server = UiServer(page, ui.http_host, 0, token)
        server.start()
    try:
        yield server
    finally:
        server.stop()


def _print_address(console: Console, server: UiServer, more: str = "") -> None:
    token = "" if server.token is None else f" (token {server.token})"
    console.print(f"page       {server.address}{more}{token}", soft_wrap=True)


def _known_bootstrap(settings: Settings) -> str | None:
    """The cluster that the user named."""
    return settings.bootstrap if "bootstrap" in settings.model_fields_set else None


@contextmanager
def _broker(console: Console, settings: Settings, options: DemoOptions) -> Iterator[LocalBroker]:
    """The broker that the options ask for, and what it cannot show."""
    known = _known_bootstrap(settings)
    with local_broker(options.broker, known_bootstrap=known, kafka=settings, is_brief=True) as broker:
        console.print(f"broker     {broker.what}")
        for limit in broker.limits:
            console.print(f"           limit: {limit}", style="dim")
        yield broker


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="relaygr-demo-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    if keep.exists() and any(keep.iterdir()):
        raise RelayError(f"{keep} is not empty: give --keep a folder of its own.")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep


def _named(settings: Settings, prefix: str) -> Settings:
    return settings.model_copy(update={"topic_prefix": prefix, "group_prefix": prefix})


def _own_prefix(console: Console, broker: Chosen, assume_yes: bool) -> str:
    """The prefix of topics and groups. On a cluster that is not started here it is unique and must be confirmed."""
    if broker.kind is not BrokerChoice.EXTERNAL:
        return "relaygr"
    prefix = f"relaygr-demo-{secrets.token_hex(3)}"
    question = f"Create topics {prefix}-* on {broker.bootstrap}, and delete them at the end?"
    if not assume_yes and not (console.is_terminal and Confirm.ask(question, console=console)):
        raise RelayError(f"Nothing was created on {broker.bootstrap}. Run with --yes to use topics {prefix}-* there.")
    return prefix
