"""The clients of a gateway that serves several scenarios: one for each prefix of topics.

    clients = ScenarioClients(kafka, scenarios, lambda of: RelayClient(of, "gw-0", registry=CollectorRegistry()))
    for client in clients.all:
        client.start()
    clients.of("ads", user).rank(user, candidates, budget_ms=30, scenario="ads")

A user of a variant gets the client of the variant's topics, for the retrieval event and the ranking request alike.
Histories and behaviours are shared: any client publishes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from relaygr.admission.scenarios import Deployment, Scenarios, deployment_of, variant_of
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.messages import DEFAULT_SCENARIO

C = TypeVar("C")


def kafka_of(kafka: KafkaSettings, deployment: Deployment) -> KafkaSettings:
    """The settings of the processes of a deployment; `kafka` has those of the scenarios without a prefix."""
    if deployment.topic_prefix is None:
        return kafka
    shared = kafka.history_prefix or kafka.topic_prefix
    own = {"topic_prefix": deployment.topic_prefix, "group_prefix": deployment.topic_prefix, "history_prefix": shared}
    return kafka.model_copy(update=own)


class ScenarioClients(Generic[C]):
    """Clients by scenario and user. It starts and closes none."""

    def __init__(self, kafka: KafkaSettings, scenarios: Scenarios, client_of: Callable[[KafkaSettings], C]) -> None:
        """`client_of` makes the client of one prefix; it is called once for each."""
        self._scenarios = scenarios
        self._deployments: dict[tuple[str, str | None], str | None] = {}
        self._clients: dict[str | None, C] = {None: client_of(kafka)}
        for name, scenario in scenarios.items():
            for variant in (None, *scenario.variants):
                deployment = deployment_of(scenarios, name if variant is None else f"{name}/{variant}")
                self._deployments[name, variant] = deployment.topic_prefix
                if deployment.topic_prefix not in self._clients:
                    self._clients[deployment.topic_prefix] = client_of(kafka_of(kafka, deployment))

    @property
    def all(self) -> Collection[C]:
        """Every client."""
        return self._clients.values()

    def of(self, scenario: str | None, user_id: str) -> C:
        """The client for a user's impressions of a scenario; None: the default one. Raises KeyError if unknown."""
        name = scenario or DEFAULT_SCENARIO
        if name == DEFAULT_SCENARIO and name not in self._scenarios:
            return self._clients[None]
        variant = variant_of(name, self._scenarios[name].variants, user_id)
        return self._clients[self._deployments[name, variant]]
