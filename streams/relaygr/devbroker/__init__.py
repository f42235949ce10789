"""Local brokers for development, tests and the demo: `with local_broker("auto") as broker:`.

`auto` takes the first of: a cluster that the caller names, a real Apache Kafka (KAFKA_HOME and Java), librdkafka's own
cluster. It never downloads anything. A broker that is started here ends with the block, or when this
process ends in any way. `what` describes the broker, and `limits` lists the limits of a run on it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from relaygr.cluster.admin import create_topics, delete_topics, is_embedded
from relaygr.devbroker.choose import AvailableBrokers, BrokerChoice, Chosen, choose
from relaygr.devbroker.local import LocalBroker
from relaygr.kafka.clients import require_broker
from relaygr.kafka.settings import KafkaSettings

__all__ = [
    "AvailableBrokers",
    "BrokerChoice",
    "Chosen",
    "LocalBroker",
    "available_brokers",
    "check_broker",
    "choose",
    "local_broker",
]


def available_brokers(known_bootstrap: str | None = None, environ: Mapping[str, str] | None = None) -> AvailableBrokers:
    """The brokers of this machine that `choose` can take. The caller gives `known_bootstrap`."""
    environ = os.environ if environ is None else environ
    home = environ.get("KAFKA_HOME")
    java_home = environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{java_home}/bin" if java_home else environ.get("PATH"))
    return AvailableBrokers(
        known_bootstrap=known_bootstrap or None,
        kafka_home=Path(home) if home else None,
        java=Path(java) if java else None,
    )


@contextmanager
def local_broker(
    choice: str = BrokerChoice.AUTO,
    known_bootstrap: str | None = None,
    kafka: KafkaSettings | None = None,
    is_brief: bool = False,
) -> Iterator[LocalBroker]:
    """A broker while the block runs.

    `choice` is auto, embedded, kafka, docker or HOST:PORT[,HOST:PORT...]. `known_bootstrap` is a cluster that `auto`
    takes first (`RELAYGR_BOOTSTRAP`). `kafka` has the security settings of a cluster that is not started here.
    `is_brief`: the broker lives for a few minutes, with few messages a second. Raises RelayError if the choice is not
    possible on this machine, or if the broker does not answer.
    """
    chosen = choose(choice, available_brokers(known_bootstrap))
    with _open(chosen, kafka or KafkaSettings(), is_brief) as broker:
        yield broker


def check_broker(
    choice: str = BrokerChoice.AUTO,
    known_bootstrap: str | None = None,
    kafka: KafkaSettings | None = None,
) -> Chosen:
    """What `local_broker` would choose. Raises the RelayError that it would raise, as far as that is known without
    starting a broker.
    """
    chosen = choose(choice, available_brokers(known_bootstrap))
    if chosen.kind is BrokerChoice.DOCKER:
        from relaygr.devbroker.docker import require_docker

        require_docker()
    if chosen.kind is BrokerChoice.EXTERNAL and chosen.bootstrap is not None:
        require_broker((kafka or KafkaSettings()).model_copy(update={"bootstrap": chosen.bootstrap}))
    return chosen


def _open(chosen: Chosen, kafka: KafkaSettings, is_brief: bool) -> AbstractContextManager[LocalBroker]:
    # Imported here, so that each kind of broker needs only its own libraries.
    if chosen.kind is BrokerChoice.KAFKA and chosen.kafka_home is not None:
        from relaygr.devbroker.kafka import kafka_broker

        return kafka_broker(chosen.kafka_home, chosen.why, is_brief=is_brief)
    if chosen.kind is BrokerChoice.DOCKER:
        from relaygr.devbroker.docker import docker_broker

        return docker_broker(chosen.why)
    if chosen.kind is BrokerChoice.EXTERNAL and chosen.bootstrap is not None:
        return _external(chosen.bootstrap, chosen.why, kafka)
    from relaygr.devbroker.embedded import embedded_broker

    return embedded_broker(chosen.why)


@contextmanager
def _external(bootstrap: str, why: str, kafka: KafkaSettings) -> Iterator[LocalBroker]:
    """A cluster that exists already. Its topics stay unless the caller deletes them."""
    cluster = require_broker(kafka.model_copy(update={"bootstrap": bootstrap}))
    limits = ["the cluster may have other users, whose load is in the figures"]
    if is_embedded(cluster):
        limits.append("it is librdkafka's embedded cluster, which supports no admin requests")
    yield LocalBroker(
        BrokerChoice.EXTERNAL,
        bootstrap,
        f"the cluster at {bootstrap} ({why})",
        tuple(limits),
        create_topics,
        delete_topics,
        fetch_wait_max_ms=kafka.fetch_wait_max_ms,
        session_timeout_ms=kafka.session_timeout_ms,
    )
