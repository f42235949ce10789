"""The ids of a cluster and its topics. A topic that is deleted and created again has the same name and a new id.

Where the process that asks for the ids cannot start, this process makes up ids: offsets that another process saved then
count as those of another log.

No Kafka client reports a new id: a consumer reads on in the new log from its offset in the old one. So
`TopicIdentityWatch` asks for the ids while a process lives.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import structlog
from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from relaygr.cluster.admin import is_embedded
from relaygr.cluster.admin_process import AdminProcess, CannotStart, ask
from relaygr.kafka.clients import await_metadata
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings

_log = structlog.get_logger()

_MARGIN_S: Final = 1.0
INTERVAL_S: Final = 5.0
TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class TopicIdentity:
    """Topic ids by name; an id is empty on librdkafka's embedded cluster, whose topics have none."""

    cluster_id: str
    topic_ids: dict[str, str]


def identify_topics(kafka: KafkaSettings, names: Collection[str], client_id: str, timeout_s: float) -> TopicIdentity:
    """The ids of the cluster and of these topics, asked by a child process; each request may take `timeout_s`.

    Raises KafkaException without an answer, or if a topic is missing.
    """
    try:
        return ask(kafka, client_id, _limit_s(names, timeout_s), _identify, tuple(names), timeout_s)
    except CannotStart as error:
        _warn_once(error.args[0].str())
        return TopicIdentity(_made_up(), dict.fromkeys(names, _made_up()))


@functools.cache
def _made_up() -> str:
    """The same id for the whole life of this process."""
    return secrets.token_hex(8)


@functools.cache
def _warn_once(cause: str) -> None:
    _log.warning("topic ids are unknown: offsets and histories that were saved are not used", cause=cause)


class TopicIdentityWatch:
    """Asks every `INTERVAL_S`, from `start` to `stop`, through a child process that it keeps.

    It has nothing to do on librdkafka's embedded cluster, nor where the ids could not be asked for at the start.
    """

    def __init__(
        self,
        session: KafkaSession,
        known: TopicIdentity,
        client_id: str,
        on_new: Callable[[frozenset[str]], object],
    ) -> None:
        """`on_new` gets, on the thread of the watch, the topics of `known` that were deleted and created again."""
        self._ids = known.topic_ids
        self._on_new = on_new
        self._admin = AdminProcess(session.kafka, client_id)
        session.on_new_files(self._admin.renew)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="topic-ids", daemon=True)

    def start(self) -> None:
        if all(self._ids.values()) and _made_up() not in self._ids.values():
            self._thread.start()

    def stop(self) -> None:
        """Ends the child process and the thread. May be called without `start`."""
        self._stopping.set()
        self._admin.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        names = tuple(self._ids)
        while not self._stopping.wait(INTERVAL_S):
            try:
                found = self._admin.call(_limit_s(names, TIMEOUT_S), _identify, names, TIMEOUT_S).topic_ids
            except (KafkaException, OSError):
                continue  # `ClusterWatch` reports a broker that is away.
            new = frozenset(name for name in names if found[name] != self._ids[name])
            self._ids = found
            if new:
                _log.warning("topics were deleted and created again: reads them from the beginning", topics=sorted(new))
                self._on_new(new)


def _limit_s(names: Collection[str], timeout_s: float) -> float:
    return (len(names) + 1) * timeout_s + _MARGIN_S


def _identify(admin: AdminClient, names: Collection[str], timeout_s: float) -> TopicIdentity:
    ids = dict.fromkeys(names, "")
    for name in names:
        metadata = await_metadata(admin, timeout_s, name)
        error = metadata.topics[name].error
        if error is not None:
            raise KafkaException(error)
    # On the embedded cluster the request for ids would time out.
    if not is_embedded(metadata):
        answers = admin.describe_topics(TopicCollection(list(names)), request_timeout=timeout_s)
        ids = {name: str(answer.result(timeout_s + _MARGIN_S).topic_id) for name, answer in answers.items()}
    return TopicIdentity(metadata.cluster_id or "", ids)
