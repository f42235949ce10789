"""Scenarios: their deployments, their shares, and the variants of users."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relaygr.admission.scenarios import (
    ScenarioSettings,
    VariantSettings,
    deployment_of,
    served_by,
    shares_of,
    variant_of,
)
from relaygr.client import ScenarioClients
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic

SCENARIOS = {
    "home": ScenarioSettings(share=3),
    "search": ScenarioSettings(share=2),
    "ads": ScenarioSettings.model_validate(
        {
            "topic_prefix": "relaygr-ads",
            "model": "models/ads",
            "variants": {"b": {"users": 0.1, "model": "models/b"}, "c": {"users": 0.2, "model": "models/c"}},
        }
    ),
}
VARIANTS = SCENARIOS["ads"].variants
USERS = [f"user-{number}" for number in range(20_000)]


def test_scenarios_without_topics_of_their_own_are_served_together_with_the_default_one() -> None:
    served = served_by(SCENARIOS, None)
    assert shares_of(served) == {"default": 1 / 6, "home": 3 / 6, "search": 2 / 6}
    assert served_by(SCENARIOS, deployment_of(SCENARIOS, "home")) == served


def test_a_scenario_with_a_prefix_is_served_alone() -> None:
    deployment = deployment_of(SCENARIOS, "ads")
    assert (deployment.topic_prefix, str(deployment.model)) == ("relaygr-ads", "models/ads")
    assert shares_of(served_by(SCENARIOS, deployment)) == {"ads": 1.0}


def test_a_variant_has_topics_and_a_model_of_its_own_and_serves_its_scenario() -> None:
    deployment = deployment_of(SCENARIOS, "ads/b")
    assert (deployment.topic_prefix, str(deployment.model)) == ("relaygr-ads-b", "models/b")
    assert list(served_by(SCENARIOS, deployment)) == ["ads"]


@pytest.mark.parametrize("name", ["news", "ads/d", "home/b"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"the settings have|it has"):
        deployment_of(SCENARIOS, name)


def test_each_variant_gets_its_share_of_the_users() -> None:
    found = [variant_of("ads", VARIANTS, user) for user in USERS]
    shares = {name: found.count(name) / len(USERS) for name in ("b", "c", None)}
    assert shares == pytest.approx({"b": 0.1, "c": 0.2, None: 0.7}, abs=0.01)


def test_the_variant_of_a_user_depends_neither_on_the_partition_nor_on_another_scenario() -> None:
    half = {"b": VariantSettings.model_validate({"users": 0.5, "model": "m"})}
    of_ads = {user: variant_of("ads", half, user) for user in USERS}
    both = sum(of_ads[user] == variant_of("home", half, user) for user in USERS)
    assert both / len(USERS) == pytest.approx(0.5, abs=0.02)
    in_first = [of_ads[user] for user in USERS if partition_for(user.encode(), 12) == 0]
    assert in_first.count("b") / len(in_first) == pytest.approx(0.5, abs=0.05)


@given(st.text(min_size=1, max_size=40), st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_user_stays_with_a_variant_whose_share_grows(user: str, small: float, more: float) -> None:
    def one(share: float) -> str | None:
        return variant_of("ads", {"b": VariantSettings.model_validate({"users": share, "model": "m"})}, user)

    assert one(small) is None or one(small + more) == "b"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"model": "models/home"}, "set topic_prefix"),
        ({"topic_prefix": "a", "variants": {"b": {"users": 0.6, "model": "b"}, "c": {"users": 0.5, "model": "c"}}},
         "more than all users"),
        ({"topic_prefix": "a", "variants": {"B/": {"users": 0.6, "model": "b"}}}, "match"),
        ({"share": 0}, "greater than 0"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_served_are_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        ScenarioSettings.model_validate(settings)


def test_a_gateway_has_one_client_for_each_set_of_topics() -> None:
    made: list[KafkaSettings] = []

    def client_of(kafka: KafkaSettings) -> str:
        made.append(kafka)
        return kafka.topic(Topic.RANKING)

    clients = ScenarioClients(KafkaSettings(), SCENARIOS, client_of)
    assert sorted(clients.all) == [f"relaygr{part}.ranking" for part in ("-ads-b", "-ads-c", "-ads", "")]
    assert {kafka.topic(Topic.HISTORY) for kafka in made} == {"relaygr.history"}, "users have one history"
    assert clients.of(None, "u") == clients.of("home", "u") == clients.of("default", "u") == "relaygr.ranking"
    for user in USERS[:200]:
        variant = variant_of("ads", VARIANTS, user)
        assert clients.of("ads", user) == f"relaygr-ads{f'-{variant}' if variant else ''}.ranking"
    with pytest.raises(KeyError):
        clients.of("news", "u")
