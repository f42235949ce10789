"""Local brokers: `with local_broker("auto") as broker:` gives a broker that answers, whatever is there.

`auto` takes the first of: a cluster that the caller names, a real Apache Kafka (KAFKA_HOME and Java),
librdkafka's own cluster; it never downloads. What was started is gone when the block ends, or when this
process dies in any way. Each broker says which one it is (`what`) and what it can not show (`limits`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from relaygr.devbroker.choose import AvailableBrokers, BrokerChoice, Chosen, choose
from relaygr.devbroker.local import LocalBroker
from relaygr.kafka.admin import create_topics, delete_topics, is_embedded
from relaygr.kafka.clients import require_broker
from relaygr.kafka.settings import KafkaSettings

__all__ = ["AvailableBrokers", "BrokerChoice", "Chosen", "LocalBroker", "available_brokers", "choose", "local_broker"]


def available_brokers(known_bootstrap: str | None = None, environ: Mapping[str, str] | None = None) -> AvailableBrokers:
    """What there is to choose from on this machine. `known_bootstrap` is the caller's, never read here."""
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
    environ: Mapping[str, str] | None = None,
) -> Iterator[LocalBroker]:
    """A broker while the block runs.

    `choice` is auto, embedded, kafka, docker or HOST:PORT[,HOST:PORT...]; `known_bootstrap` a cluster
    that `auto` takes first (`RELAYGR_BOOTSTRAP`); `kafka` holds the security for one that we do not
    start. Raises RelayError for what is not possible here, and if the broker does not answer.
    """
    chosen = choose(choice, available_brokers(known_bootstrap, environ))
    with _open(chosen, kafka or KafkaSettings()) as broker:
        yield broker


def _open(chosen: Chosen, kafka: KafkaSettings) -> AbstractContextManager[LocalBroker]:
    # Imported here, so that each needs only what it uses.
    if chosen.kind is BrokerChoice.KAFKA and chosen.kafka_home is not None:
        from relaygr.devbroker.kafka import kafka_broker

        return kafka_broker(chosen.kafka_home, chosen.why)
    if chosen.kind is BrokerChoice.DOCKER:
        from relaygr.devbroker.docker import docker_broker

        return docker_broker(chosen.why)
    if chosen.kind is BrokerChoice.EXTERNAL and chosen.bootstrap is not None:
        return _external(chosen.bootstrap, chosen.why, kafka)
    from relaygr.devbroker.embedded import embedded_broker

    return embedded_broker(chosen.why)


@contextmanager
def _external(bootstrap: str, why: str, kafka: KafkaSettings) -> Iterator[LocalBroker]:
    """A cluster that is there already; its topics stay unless the caller deletes them."""
    cluster = require_broker(kafka.model_copy(update={"bootstrap": bootstrap}))
    limits = ["the cluster is shared: others' load is in the figures"]
    if is_embedded(cluster):
        limits.append("it is librdkafka's embedded cluster, which has no admin requests")
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
