"""Model reload under traffic: no request is lost, and no result mixes two models."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath

import numpy as np
import pytest

from relaygr.client import Ended, RankOutcome, RelayClient
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess, read_children, read_metrics
from relaygr.runtime.clock import SystemClock
from relaygr.schemas import codec
from relaygr.schemas.ended import Reason
from relaygr.schemas.messages import History, Path, PreInferJob, RankingResult
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.ui.scrape import Reading
from relaygr.worker.latest_answers import DIVERGED_ANSWERS
from relaygr.worker.model.checkpoint import Checkpoint, load_checkpoint, random_checkpoint
from tests.leftovers import owned_by_a_fixture
from tests.waiting import until
from tests.worlds.dense import full_inference
from tests.worlds.relay import (
    PARTITIONS,
    RawGateway,
    Relay,
    candidates_of,
    history_of,
    make_model,
    model_config,
    new_user,
    own_topics,
    reading,
    save_model,
)
from tests.worlds.steady_traffic import Steady

pytestmark = pytest.mark.slow

BUDGET_MS = 20_000
TOLERANCE = 2e-5


class Traffic(Steady):
    """Pre-infer jobs and ranking requests of a few users."""

    def __init__(self, client: RelayClient, raw: RawGateway, histories: list[History]) -> None:
        super().__init__(0.01)
        self.client = client
        self.raw = raw
        self.histories = histories
        self.sent: list[tuple[History, Future[RankOutcome]]] = []

    def send(self, number: int) -> None:
        history = self.histories[number % len(self.histories)]
        if number % 3 == 0:
            self._job(history)
        suffix = None if number % 2 else history_of(history.user_id, 4, seed=77).behaviours
        fields = {} if suffix is None else {"suffix": suffix}
        future = self.client.submit_rank(
            history.user_id, candidates_of(), budget_ms=BUDGET_MS, history_version=history.version(), **fields
        )
        self.sent.append((history, future))

    def _job(self, history: History) -> None:
        now_us = SystemClock().wall_us()
        user = history.user_id
        job = PreInferJob(
            f"{self.raw.gateway_id}.{now_us}", user, now_us, now_us + 200_000, 1_000, 20, 4, now_us, history.version()
        )
        where = partition_for(user.encode(), PARTITIONS)
        self.raw.send(Topic.PREINFER, codec.encode(job), user.encode(), partition=where)

    def revisions(self) -> set[str]:
        """The results so far."""
        done = [future.result() for _, future in list(self.sent) if future.done()]
        return {outcome.result.model_revision for outcome in done if outcome.result is not None}


@dataclass
class ReloadWorld:
    relay: Relay
    worker: CommandProcess
    client: RelayClient
    raw: RawGateway
    model: FilePath
    checkpoints: dict[str, Checkpoint]

    def swap_files(self, seed: int) -> str:
        """Puts another checkpoint into the worker's folder. Returns its revision."""
        make_model(self.model, seed)
        checkpoint = load_checkpoint(self.model)
        self.checkpoints[checkpoint.revision] = checkpoint
        return checkpoint.revision

    def swap_back(self, revision: str) -> None:
        """Puts an earlier checkpoint into the worker's folder."""
        checkpoint = self.checkpoints[revision]
        save_model(self.model, checkpoint.config, checkpoint.tensors)
        assert load_checkpoint(self.model).revision == revision

    def hang_up(self) -> None:
        self.worker.process.send_signal(signal.SIGHUP)

    def reloads(self, outcome: str) -> float:
        return reading(self.worker).total("relaygr_model_reloads_total", outcome=outcome)

    def rank(self, history: History) -> RankingResult:
        outcome = self.client.rank(
            history.user_id, candidates_of(), budget_ms=BUDGET_MS, history_version=history.version()
        )
        assert outcome.status is Ended.RANKED
        return outcome.result

    def users(self, count: int, length: int) -> list[History]:
        histories = [history_of(new_user("reload"), length + 16 * number, seed=number) for number in range(count)]
        for history in histories:
            self.client.publish_history(history)
        return histories

    def assert_of_its_revision(self, history: History, result: RankingResult, with_suffix: bool) -> None:
        behaviours = history.behaviours
        if with_suffix:
            behaviours = behaviours + history_of(history.user_id, 4, seed=77).behaviours
        checkpoint = self.checkpoints[result.model_revision or ""]
        key = (result.model_revision, history.user_id, with_suffix)
        if key not in self._expected:
            outputs = full_inference(checkpoint, history.features, behaviours, candidates_of())
            self._expected[key] = outputs.scores.numpy().reshape(-1)
        expected = self._expected[key]
        assert result.scores is not None
        assert np.abs(result.scores - expected).max() <= TOLERANCE * np.abs(expected).max()

    def __post_init__(self) -> None:
        self._expected: dict[tuple[str | None, str, bool], np.ndarray] = {}


@pytest.fixture(scope="module")
def broker(embedded_broker: LocalBroker) -> LocalBroker:
    """A reload does not depend on the broker."""
    return embedded_broker


@pytest.fixture(scope="module")
def world(module_kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReloadWorld]:
    model = make_model(tmp_path_factory.mktemp("model"), seed=7)
    first = load_checkpoint(model)
    with Relay(module_kafka, tmp_path_factory.mktemp("relay"), model) as relay:
        worker = relay.start_worker()
        relay.await_ready(worker)
        raw = RawGateway(relay.kafka)
        with relay.client() as client, owned_by_a_fixture(relay.process_ids):
            yield ReloadWorld(relay, worker, client, raw, model, {first.revision: first})
        raw.close()


def test_a_reload_under_traffic_loses_nothing_and_each_answer_is_of_the_model_that_it_names(world: ReloadWorld):
    histories = world.users(6, 200)
    before = next(iter(world.checkpoints))
    with Traffic(world.client, world.raw, histories) as traffic:
        until(lambda: traffic.revisions() == {before}, "the first model answers")
        after = world.swap_files(seed=8)
        world.hang_up()
        until(lambda: after in traffic.revisions(), "the second model answers")
        answered = len(traffic.sent)
        until(lambda: len(traffic.sent) > answered + 100, "a little more traffic")
    outcomes = [(number, history, future.result(timeout=60)) for number, (history, future) in enumerate(traffic.sent)]
    assert {outcome.status for _, _, outcome in outcomes} == {Ended.RANKED}
    results = [outcome.result for _, _, outcome in outcomes]
    for number, history, outcome in outcomes:
        world.assert_of_its_revision(history, outcome.result, with_suffix=number % 2 == 0)
    assert {result.model_revision for result in results} == {before, after}
    late = results[-20:]
    assert {result.model_revision for result in late} == {after}
    assert {result.path for result in late} == {Path.HBM}, "its prefixes are cached again"
    assert world.reloads("swapped") == 1
    world.relay.await_all_committed(Topic.RANKING, Topic.PREINFER)


def test_a_checkpoint_that_cannot_serve_changes_nothing_and_is_counted(world: ReloadWorld):
    (history,) = world.users(1, 300)
    present = list(world.checkpoints)[-1]
    config = world.model / "config.json"
    whole = config.read_text()
    for content, outcome in (("{}", "broken"), (whole.replace('"num_layers": 2', '"num_layers": 3'), "unfit")):
        config.write_text(content)
        world.hang_up()
        until(lambda outcome=outcome: world.reloads(outcome) == 1, outcome)
        result = world.rank(history)
        assert result.model_revision == present
        world.assert_of_its_revision(history, result, with_suffix=False)
    config.write_text(whole)
    world.hang_up()
    until(lambda: world.reloads("unchanged") == 1, "unchanged")
    assert world.worker.process.poll() is None
    log = world.worker.log.read_text()
    assert "is not a model configuration" in log and "restart the worker to use it" in log


def test_a_model_that_diverges_in_use_gives_way_to_the_previous_one(world: ReloadWorld):
    """Embeddings of some items overflow, as after a training that diverged.

    The items that the gateway asks for are few of a large vocabulary, so that the trial does not find them.
    """
    histories, present = world.users(3, 50), list(world.checkpoints)[-1]
    swapped = world.reloads("swapped")
    assert {world.rank(history).model_revision for history in histories} == {present}
    rare = slice(90_000, 90_020)
    config = model_config().model_copy(update={"vocabulary_size": 100_000})
    tensors = dict(random_checkpoint(config, 9).tensors)
    tensors["items.weight"][rare] *= 1e30
    save_model(world.model, config, tensors)
    world.hang_up()
    until(lambda: world.reloads("swapped") == swapped + 1, "swapped")
    asked = np.arange(rare.start, rare.stop)
    reasons = []
    while world.reloads("restored") == 0:
        outcome = world.client.rank(histories[0].user_id, asked, budget_ms=BUDGET_MS)
        reasons.append(outcome.reason)
        assert len(reasons) < 1_000
    assert reasons[:DIVERGED_ANSWERS] == [Reason.DEVICE_ERROR] * DIVERGED_ANSWERS
    assert {world.rank(history).model_revision for history in histories} == {present}
    world.relay.await_ready(world.worker)
    world.swap_back(present)


def test_after_a_reload_a_new_start_serves_the_same_model(world: ReloadWorld):
    present = list(world.checkpoints)[-1]
    assert world.relay.stop(world.worker) == 0
    world.worker = world.relay.start_worker()
    world.relay.await_ready(world.worker)
    user = new_user("anew")
    answer = world.client.rank(user, candidates_of(), budget_ms=BUDGET_MS, history=history_of(user, 50))
    assert answer.result.model_revision == present


def test_a_standby_takes_over_with_the_model_that_was_loaded_and_its_prefixes_in_dram(
    embedded_broker: LocalBroker, tmp_path: FilePath
):
    """The standby loaded another model at its start than the one that served when the active worker was killed."""
    model = make_model(tmp_path / "model", seed=7)
    first = load_checkpoint(model)
    with own_topics(embedded_broker) as kafka, Relay(kafka, tmp_path / "relay", model) as relay:
        own = ["worker.worker_id=worker-09", f"worker.history_path={tmp_path / 'store'}"]
        supervisor = relay.processes.start("worker-09", ["worker", "--standby"], "worker", own)
        relay.await_ready(supervisor)
        until(lambda: "standby" in read_children(supervisor.port), "a standby", 60)
        with relay.client() as client, closing(RawGateway(kafka)) as raw:
            world = ReloadWorld(relay, supervisor, client, raw, model, {first.revision: first})
            after = world.swap_files(seed=8)
            world.hang_up()
            ports = [child["port"] for child in read_children(supervisor.port).values()]
            swapped = partial(Reading.total, name="relaygr_model_reloads_total", outcome="swapped")
            until(lambda: [swapped(read_metrics(port)) for port in ports] == [1, 1], "both swapped")
            histories = world.users(4, 300)
            spilled = partial(Reading.total, name="relaygr_cache_spills_ended_total", outcome="published")

            def all_spilled() -> bool:
                # Each ranking requests a spill, which a busy machine may drop.
                assert {world.rank(history).model_revision for history in histories} == {after}
                return spilled(reading(supervisor)) >= len(histories)

            until(all_spilled, "spilled")
            os.kill(read_children(supervisor.port)["active"]["pid"], signal.SIGKILL)
            results = [world.rank(history) for history in histories]
        assert {result.model_revision for result in results} == {after}
        assert {result.path for result in results} == {Path.DRAM}
        for history, result in zip(histories, results, strict=True):
            world.assert_of_its_revision(history, result, with_suffix=False)
