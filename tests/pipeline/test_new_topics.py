"""Topics that are deleted and created again under running processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaygr.client import Ended, RankOutcome
from relaygr.devbroker import LocalBroker
from relaygr.schemas.topics import Topic
from tests.waiting import until
from tests.worlds.relay import Relay, candidates_of, history_of, new_user, own_topics, reading

pytestmark = pytest.mark.kafka


def test_new_topics_are_served_like_the_old_ones_and_hold_no_history_of_them(
    real_broker: LocalBroker, model: Path, tmp_path: Path
) -> None:
    """No request was answered any more, the group committed beyond the end, and every probe said that all is well."""
    with own_topics(real_broker) as kafka, Relay(kafka, tmp_path / "relay", model) as relay:
        worker, trigger = relay.start_worker(), relay.start_trigger()
        relay.await_ready(worker, trigger)
        with relay.client() as client:

            def rank(user: str, budget_ms: float = 5_000) -> RankOutcome:
                return client.rank(user, candidates_of(), budget_ms=budget_ms, history=history_of(user, 50))

            for number in range(3):
                client.publish_history(history_of(f"user-{number}", 50))
            assert {rank(new_user()).status for _ in range(100)} == {Ended.RANKED}
            until(lambda: reading(worker).total("relaygr_history_users") == 3, "stored")
            relay.await_all_committed(Topic.RANKING)

            real_broker.delete_topics(kafka)
            until(lambda: reading(worker).total("relaygr_consumer_owned_partitions") == 0, "taken")
            real_broker.create_topics(kafka)
            # Most partitions of the new topics stay empty, and their commits must go back, too.
            few = [new_user() for _ in range(3)]
            until(lambda: rank(few[0], 2_000).status is Ended.RANKED, "requests are ranked again")
            assert {rank(few[number % 3]).status for number in range(50)} == {Ended.RANKED}
            until(lambda: reading(worker).total("relaygr_history_users") == 0, "no history of before")
            user = new_user()
            history = history_of(user, 40)
            client.publish_history(history)
            until(lambda: reading(worker).total("relaygr_history_users") == 1, "stored")
            found = client.rank(user, candidates_of(), budget_ms=5_000, history_version=history.version())
            assert found.status is Ended.RANKED and found.result is not None and not found.result.history_stale
            until(lambda: committed_of(relay) == relay.ends(Topic.RANKING), "committed up to the end")
            relay.await_ready(worker, trigger)


def committed_of(relay: Relay) -> dict[int, int]:
    """The commits, but for those at 0, which a partition without a message may have or not."""
    return {partition: offset for partition, offset in relay.committed(Topic.RANKING).items() if offset}
