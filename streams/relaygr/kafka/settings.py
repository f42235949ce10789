"""Settings of all Kafka clients."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator

from relaygr.runtime.masking import masked
from relaygr.runtime.settings import Section
from relaygr.schemas.topics import CATALOGUE, DEFAULT_PARTITIONS, DEFAULT_PREFIX, Topic, TopicSpec, check_prefix

MOST_PARTITIONS: Final = 4096
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s,:/@\[\]]+)(:[0-9]{1,5})?")


class SecurityProtocol(enum.StrEnum):
    """Kafka's `security.protocol`."""

    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"


class SaslMechanism(enum.StrEnum):
    """The supported values of Kafka's `sasl.mechanism`."""

    PLAIN = "PLAIN"
    SCRAM_SHA_256 = "SCRAM-SHA-256"
    SCRAM_SHA_512 = "SCRAM-SHA-512"
    OAUTHBEARER = "OAUTHBEARER"


class Security(Section):
    """TLS and SASL of every Kafka client."""

    protocol: SecurityProtocol = Field(SecurityProtocol.PLAINTEXT, description="Kafka's security.protocol")
    ca_file: Path | None = Field(
        None, description="PEM file with the certificate authorities to trust; none: the system's"
    )
    certificate_file: Path | None = Field(None, description="PEM file with the client's certificate")
    key_file: Path | None = Field(None, description="PEM file with the client's private key")
    key_password: SecretStr | None = Field(None, description="password of the client's private key")
    verify_hostname: bool = Field(True, description="check that the broker's certificate matches its host name")
    sasl_mechanism: SaslMechanism | None = Field(None, description="Kafka's sasl.mechanism; required with SASL")
    sasl_username: str | None = Field(None, description="user name for PLAIN and SCRAM")
    sasl_password: SecretStr | None = Field(None, description="password for PLAIN and SCRAM")
    sasl_password_file: Path | None = Field(
        None, description="file with the password, instead of sasl_password; read when a client is made"
    )
    sasl_token_file: Path | None = Field(
        None,
        description="OAUTHBEARER: file with a JSON Web Token, which another program renews; read again before it "
        "expires",
    )

    @model_validator(mode="after")
    def _sasl_is_whole(self) -> Security:
        wants_sasl = self.protocol in (SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL)
        passwords = (self.sasl_password, self.sasl_password_file)
        given = (self.sasl_mechanism, self.sasl_username, *passwords, self.sasl_token_file)
        if not wants_sasl:
            if any(value is not None for value in given):
                raise ValueError(f"sasl_* is set, but protocol is {self.protocol}: use SASL_PLAINTEXT or SASL_SSL")
            return self
        if None not in passwords:
            raise ValueError("sasl_password and sasl_password_file are both set: set one of them")
        if self.sasl_mechanism is SaslMechanism.OAUTHBEARER:
            if self.sasl_token_file is None or any((self.sasl_username, *passwords)):
                raise ValueError("OAUTHBEARER needs sasl_token_file, and no user name and password")
        elif self.sasl_token_file is not None:
            raise ValueError("sasl_token_file is set, but sasl_mechanism is not OAUTHBEARER")
        elif self.sasl_mechanism is None or self.sasl_username is None or passwords == (None, None):
            raise ValueError(
                f"{self.protocol} needs sasl_mechanism, sasl_username and sasl_password (or sasl_password_file)"
            )
        return self

    @model_validator(mode="after")
    def _files_are_used(self) -> Security:
        files = ("ca_file", "certificate_file", "key_file", "key_password")
        given = [name for name in files if getattr(self, name) is not None]
        if given and not self.uses_tls:
            raise ValueError(f"{given[0]} is set, but protocol is {self.protocol}: use SSL or SASL_SSL")
        if self.key_file is not None and self.certificate_file is None:
            raise ValueError("key_file is set, but its certificate is not: set certificate_file")
        return self

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.protocol in (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL)


class GroupProtocol(enum.StrEnum):
    """Kafka's `group.protocol`."""

    CLASSIC = "classic"
    CONSUMER = "consumer"


class Affinity(enum.StrEnum):
    """How the workers' group gives the jobs and the requests of a user to the same worker."""

    RANGE = "range"
    """Two topics, the classic protocol and the assignor `range`. A standby takes over in milliseconds."""
    CONSUMER_PROTOCOL = "consumer_protocol"
    """Two topics, `group.protocol=consumer` and the broker's assignor `range`. It needs settings on the brokers."""
    ONE_TOPIC = "one_topic"
    """Jobs and requests on the ranking topic, the classic protocol and the assignor `cooperative-sticky`, which moves
    the fewest partitions.
    """

    @property
    def assignor(self) -> str:
        """The assignor of the workers' group, by Kafka's name."""
        return "cooperative-sticky" if self is Affinity.ONE_TOPIC else "range"

    @property
    def is_incremental(self) -> bool:
        """Whether a rebalance revokes only the partitions that move, instead of all."""
        return self is not Affinity.RANGE


class Acks(enum.StrEnum):
    """Which replicas have a message before the broker acknowledges it."""

    LEADER = "leader"
    ALL = "all"
    """All replicas in sync."""


def _as_kafka_writes_it(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    # Helm writes large whole numbers with an exponent.
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return str(value) if isinstance(value, float) else value


TopicSetting = Annotated[str | None, BeforeValidator(_as_kafka_writes_it)]
_FIXED: Final = "cleanup.policy"


class KafkaSettings(Section):
    """The Kafka cluster and its clients. The root settings inherit these fields."""

    bootstrap: str = Field("127.0.0.1:9092", description="HOST:PORT[,HOST:PORT...] of the cluster")
    topic_prefix: str = Field(DEFAULT_PREFIX, description="topics are PREFIX.retrieval, PREFIX.ranking, ...")
    history_prefix: str | None = Field(
        None,
        description="history and behaviours are PREFIX.history and PREFIX.behaviours, which the processes of several "
        "topic prefixes may share; none: topic_prefix",
    )
    group_prefix: str = Field(DEFAULT_PREFIX, description="groups are PREFIX.workers, PREFIX.trigger, ...")
    partitions: Annotated[
        int,
        Field(
            ge=1,
            le=MOST_PARTITIONS,
            description="partition count of retrieval, preinfer, ranking, history and behaviours",
        ),
    ] = DEFAULT_PARTITIONS
    replication_factor: Annotated[
        int, Field(ge=1, le=32, description="replication factor of the topics that we create; 3 survives a broker")
    ] = 1
    min_insync_replicas: Annotated[
        int | None,
        Field(
            ge=1,
            le=32,
            description="fewest replicas in sync with which history, behaviours and dead letters accept messages; the "
            "other topics need one; none: one less than replication_factor, at least 1",
        ),
    ] = None
    request_acks: Acks = Field(
        Acks.ALL,
        description="replicas that must have a job, request, result or status before it is acknowledged; with leader, "
        "messages are lost if the leader dies just after. Events, histories and dead letters always wait for all",
    )
    affinity: Affinity = Field(
        Affinity.RANGE,
        description="how jobs and requests of a user reach the same worker: range, consumer_protocol "
        "(group.protocol=consumer, needs settings on the brokers) or one_topic (cooperative-sticky, for fleets that "
        "scale often); the same in all processes",
    )
    session_timeout_ms: Annotated[
        int,
        Field(
            ge=1000,
            le=300_000,
            description="classic protocol: session time-out; by default brokers require at least 6000",
        ),
    ] = 6000
    heartbeat_interval_ms: Annotated[
        int, Field(ge=50, description="classic protocol: heartbeat interval; shorter than the session time-out")
    ] = 500
    fetch_wait_max_ms: Annotated[
        int,
        Field(
            ge=1,
            le=10_000,
            description="longest wait of a fetch without data; some clients wait at most 50. New data comes at once. "
            "Short waits cost the broker CPU (9 idle consumers: 0.4 cores at 20 ms); the embedded cluster needs 1 to 5",
        ),
    ] = 500
    connect_timeout_s: Annotated[
        float, Field(gt=0, le=600, description="how long a process waits for the cluster at its start")
    ] = 4.0
    statistics_interval_ms: Annotated[
        int,
        Field(
            ge=0,
            le=3_600_000,
            description="how often Kafka clients report round trips, queues and retries as metrics; 0: never",
        ),
    ] = 15_000
    topic_settings: dict[Topic, dict[str, TopicSetting]] = Field(
        {},
        description="settings of topics by Kafka's names, for a cluster that refuses ours, such as "
        "`{workers: {segment.bytes: 52428800}}`; null: neither set nor checked",
    )
    dead_letter_bodies: bool = Field(
        False,
        description="dead letters hold key, value and headers of the original message; "
        "false: its coordinates and a digest, since Kafka cannot erase single records of a deleted user",
    )
    security: Security = Security()

    @field_validator("topic_prefix", "group_prefix", "history_prefix")
    @classmethod
    def _prefix_is_legal(cls, value: str | None) -> str | None:
        return None if value is None else check_prefix(value)

    @field_validator("bootstrap")
    @classmethod
    def _bootstrap_is_addresses(cls, value: str) -> str:
        """Refuses the forms that some Kafka clients accept and others do not."""
        addresses = [address.strip() for address in value.split(",")]
        for address in addresses:
            if not _ADDRESS.fullmatch(address):
                raise ValueError(
                    f"{masked(address)!r} is not an address: use HOST:PORT[,HOST:PORT...] without protocol and password"
                )
        return ",".join(addresses)

    @field_validator("topic_settings")
    @classmethod
    def _cleanup_stays(cls, value: dict[Topic, dict[str, TopicSetting]]) -> dict[Topic, dict[str, TopicSetting]]:
        if any(_FIXED in own for own in value.values()):
            raise ValueError(f"{_FIXED} cannot be changed: with another one histories or statuses would be lost")
        return value

    @model_validator(mode="after")
    def _heartbeats_fit_the_session(self) -> Self:
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            raise ValueError(
                f"heartbeat_interval_ms is {self.heartbeat_interval_ms}, session_timeout_ms {self.session_timeout_ms}: "
                "set the heartbeat interval well below the session time-out"
            )
        return self

    @model_validator(mode="after")
    def _replicas_can_be_in_sync(self) -> Self:
        if self.min_insync_replicas is not None and self.min_insync_replicas > self.replication_factor:
            raise ValueError(
                f"min_insync_replicas is {self.min_insync_replicas}, but replication_factor {self.replication_factor}: "
                "no message could be acknowledged. Set min_insync_replicas below the replication factor"
            )
        return self

    def topic_config(self, topic: Topic, replicas: int | None = None) -> dict[str, str]:
        """The settings that a topic should have, by Kafka's names. `replicas`: its real number of replicas."""
        wanted = self.min_insync_replicas or max(1, self.replication_factor - 1)
        config = CATALOGUE[topic].config(wanted if replicas is None else min(wanted, max(1, replicas)))
        merged = {**config, **self.topic_settings.get(topic, {})}
        return {key: value for key, value in merged.items() if value is not None}

    def topic(self, topic: Topic) -> str:
        """The topic's full name."""
        shared = self.history_prefix if topic in (Topic.HISTORY, Topic.BEHAVIOURS) else None
        return topic.named(shared or self.topic_prefix)

    @property
    def group_protocol(self) -> GroupProtocol:
        """Kafka's `group.protocol` of all groups."""
        return GroupProtocol.CONSUMER if self.affinity is Affinity.CONSUMER_PROTOCOL else GroupProtocol.CLASSIC

    @property
    def jobs_topic(self) -> Topic:
        """The topic of the pre-infer jobs."""
        return Topic.RANKING if self.affinity is Affinity.ONE_TOPIC else Topic.PREINFER

    @property
    def worker_topics(self) -> tuple[Topic, ...]:
        """The topics that the workers' group reads."""
        return tuple(dict.fromkeys((self.jobs_topic, Topic.RANKING)))

    @property
    def catalogue(self) -> Mapping[Topic, TopicSpec]:
        """The topics of this deployment: all but that of the jobs, if they are on the ranking topic."""
        unused = {Topic.PREINFER} - set(self.worker_topics)
        return {topic: spec for topic, spec in CATALOGUE.items() if topic not in unused}

    @property
    def workers_group(self) -> str:
        return f"{self.group_prefix}.workers"

    @property
    def trigger_group(self) -> str:
        return f"{self.group_prefix}.trigger"

    @property
    def overflow_group(self) -> str:
        return f"{self.group_prefix}.overflow"

    @property
    def pool_group(self) -> str:
        """The share group of the pre-infer workers."""
        return f"{self.group_prefix}.preinfer-pool"

    @property
    def unjoined_group(self) -> str:
        """librdkafka needs a group's name even for a consumer that joins none, and asks for its coordinator."""
        return f"{self.group_prefix}.unjoined"
