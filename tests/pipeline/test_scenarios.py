"""Scenarios: on shared topics, and on topics of their own with a model of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from relaygr.admission.scenarios import ScenarioSettings, VariantSettings, deployment_of, variant_of
from relaygr.client import Ended, RelayClient, ScenarioClients
from relaygr.client.scenarios import kafka_of
from relaygr.deployment import CURRENT, deploy, rollback
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess, Processes, write_config
from relaygr.schemas.ended import Reason
from relaygr.schemas.messages import RankingResult
from relaygr.worker.model.checkpoint import load_checkpoint
from tests.leftovers import owned_by_a_fixture
from tests.waiting import until
from tests.worlds.relay import (
    START_TIMEOUT_S,
    Relay,
    candidates_of,
    history_of,
    make_model,
    new_user,
    reading,
)

pytestmark = pytest.mark.slow

BUDGET_MS = 10_000
VARIANTS = {"b": VariantSettings(users=0.5, model=Path("unused"))}


@pytest.fixture(scope="module")
def broker(embedded_broker: LocalBroker) -> LocalBroker:
    """Scenarios do not depend on the broker."""
    return embedded_broker


class Shop:
    """Home feed and search on one worker; ads, and a variant of them, each on a worker of their own."""

    def __init__(self, broker: LocalBroker, kafka: KafkaSettings, relay: Relay, folder: Path, cleanup: ExitStack):
        self.kafka = kafka
        self.deployed = folder / "deployed"
        deploy(make_model(folder / "first", seed=21), self.deployed, needs_calibration=False)
        prefix = f"{kafka.topic_prefix}-ads"
        variants = {"b": VariantSettings(users=0.5, model=make_model(folder / "variant", seed=23))}
        self.scenarios = {
            "home": ScenarioSettings(share=3),
            "search": ScenarioSettings(budget_ms=BUDGET_MS // 2),
            "ads": ScenarioSettings(topic_prefix=prefix, model=self.deployed / CURRENT, variants=variants),
        }
        settings = relay.settings.model_copy(update={"scenarios": self.scenarios})
        config = folder / "scenarios.yaml"
        write_config(settings, config)
        self.processes = cleanup.enter_context(Processes(folder, config))
        started: dict[str, CommandProcess] = {}
        for name in ("home", "ads", "ads/b"):
            deployment = deployment_of(self.scenarios, name)
            if deployment.topic_prefix is not None:
                of_deployment = kafka_of(kafka, deployment)
                broker.create_topics(of_deployment)
                cleanup.callback(broker.delete_topics, of_deployment)
            own = name.replace("/", "-")
            started[name] = self.processes.start(
                f"worker-{own}",
                ["worker"],
                "worker",
                [
                    f"scenario={name}",
                    "worker.worker_id=worker-00",
                    f"worker.history_path={folder / own}",
                    f"worker.shared_path={folder / f'{own}-shared'}",
                    "worker.model_poll_s=0.2",
                ],
            )
        self.workers = started
        self.trigger = self.processes.start("trigger", ["trigger"], "trigger", ["scenario=home"])
        self.processes.await_ready([*started.values(), self.trigger], START_TIMEOUT_S)
        self.clients = ScenarioClients(
            kafka, self.scenarios, lambda of: RelayClient(of, "gw-shop", registry=CollectorRegistry())
        )
        for client in self.clients.all:
            cleanup.enter_context(client)

    def ranked(self, scenario: str | None, user_id: str) -> RankingResult:
        outcome = self.clients.of(scenario, user_id).rank(
            user_id, candidates_of(), budget_ms=BUDGET_MS, scenario=scenario
        )
        assert outcome.status is Ended.RANKED, outcome
        assert outcome.result is not None
        return outcome.result


@pytest.fixture(scope="module")
def shop(
    broker: LocalBroker, module_kafka: KafkaSettings, relay: Relay, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    with ExitStack() as cleanup:
        made = Shop(broker, module_kafka, relay, tmp_path_factory.mktemp("shop"), cleanup)
        with owned_by_a_fixture(lambda: {child.process.pid for child in made.processes.running}):
            yield made


def of_variant(name: str | None, scenario: str = "ads") -> str:
    """A new user that the hash gives this variant."""
    while True:
        user = new_user()
        if variant_of(scenario, VARIANTS, user) == name:
            return user


def test_scenarios_on_the_same_topics_are_served_by_one_worker_and_one_model(shop: Shop) -> None:
    user = new_user()
    revisions = {shop.ranked(scenario, user).model_revision for scenario in (None, "home", "search")}
    assert len(revisions) == 1
    seconds = reading(shop.workers["home"]).by_label("relaygr_worker_scenario_ranking_seconds_count", "scenario")
    assert seconds.keys() == {"default", "home", "search"}
    assert all(seconds.values())


def test_an_unknown_scenario_fails_with_its_reason(shop: Shop) -> None:
    client = shop.clients.of(None, "u")
    for scenario in ("news", "ads"):
        outcome = client.rank(new_user(), candidates_of(), budget_ms=BUDGET_MS, scenario=scenario)
        assert (outcome.status, outcome.reason) == (Ended.FAILED, Reason.UNKNOWN_SCENARIO), scenario


def test_a_scenario_and_its_variant_have_models_of_their_own_and_the_same_histories(shop: Shop) -> None:
    found = {}
    for variant in (None, "b"):
        user = of_variant(variant)
        # The history comes on the topics that all scenarios share.
        shop.clients.of(None, user).publish_history(history_of(user, 100))
        until(lambda user=user: shop.ranked("ads", user).prefix_tokens > 100, "the history is known")
        found[variant] = shop.ranked("ads", user).model_revision
    assert found["b"] == load_checkpoint(shop.scenarios["ads"].variants["b"].model).revision
    assert found[None] == load_checkpoint(shop.deployed / CURRENT).revision
    assert found[None] != found["b"]


def test_the_trigger_counts_the_events_of_each_scenario_and_sends_jobs_that_name_it(shop: Shop) -> None:
    for scenario in ("home", "search"):
        user = new_user()
        history = history_of(user, 200)
        client = shop.clients.of(scenario, user)
        client.publish_history(history)
        event = client.publish_retrieval(
            user,
            ranking_budget_ms=BUDGET_MS,
            expected_ranking_in_ms=10_000,
            expected_candidates=20,
            expected_suffix=0,
            history_version=history.version(),
            scenario=scenario,
        )
        assert event.scenario == scenario
        until(
            lambda scenario=scenario: reading(shop.trigger).total(
                "relaygr_trigger_scenario_events_total", scenario=scenario, admitted="yes"
            ) == 1,
            f"a job of {scenario}",
        )  # fmt: skip
    assert reading(shop.workers["home"]).total("relaygr_worker_preinfer_jobs_total", outcome="unknown_scenario") == 0


def test_a_deployed_revision_serves_soon_and_one_command_takes_it_back(shop: Shop, tmp_path: Path) -> None:
    user = of_variant(None)
    first = shop.ranked("ads", user).model_revision
    second = deploy(make_model(tmp_path / "second", seed=22), shop.deployed, needs_calibration=False)
    until(lambda: shop.ranked("ads", user).model_revision == second, "the new revision serves")
    assert rollback(shop.deployed) == first
    until(lambda: shop.ranked("ads", user).model_revision == first, "the old revision serves again")
    assert shop.ranked("ads", of_variant("b")).model_revision != first, "the variant is not touched"
    shutil.rmtree(tmp_path / "second")
