"""The ids of a cluster and its topics. A topic that is deleted and created again has the same name and a new id."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from relaygr.kafka.admin import is_embedded
from relaygr.kafka.admin_process import ask
from relaygr.kafka.settings import KafkaSettings

_MARGIN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class TopicIdentity:
    """Topic ids by name; an id is empty on librdkafka's embedded cluster, whose topics have none."""

    cluster_id: str
    topic_ids: dict[str, str]


def identify_topics(kafka: KafkaSettings, names: Collection[str], client_id: str, timeout_s: float) -> TopicIdentity:
    """The ids of the cluster and of these topics, asked by a child process; each request may take `timeout_s`.

    Raises KafkaException without an answer, or if a topic is missing.
    """
    limit_s = (len(names) + 1) * timeout_s + _MARGIN_S
    return ask(kafka, client_id, limit_s, _identify, tuple(names), timeout_s)


def _identify(admin: AdminClient, names: Collection[str], timeout_s: float) -> TopicIdentity:
    ids = dict.fromkeys(names, "")
    for name in names:
        metadata = admin.list_topics(name, timeout=timeout_s)
        error = metadata.topics[name].error
        if error is not None:
            raise KafkaException(error)
    # On the embedded cluster the request for ids would time out.
    if not is_embedded(metadata):
        answers = admin.describe_topics(TopicCollection(list(names)), request_timeout=timeout_s)
        ids = {name: str(answer.result(timeout_s + _MARGIN_S).topic_id) for name, answer in answers.items()}
    return TopicIdentity(metadata.cluster_id or "", ids)
