"""Settings of everything that talks to Kafka."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from relaygr.runtime.settings import Section
from relaygr.schemas.topics import DEFAULT_PARTITIONS, DEFAULT_PREFIX, Topic, check_prefix

_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s,:/\[\]]+)(:[0-9]{1,5})?")


class SecurityProtocol(enum.StrEnum):
    """Kafka's `security.protocol`."""

    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"


class SaslMechanism(enum.StrEnum):
    """Kafka's `sasl.mechanism`, as far as both of our clients know it."""

    PLAIN = "PLAIN"
    SCRAM_SHA_256 = "SCRAM-SHA-256"
    SCRAM_SHA_512 = "SCRAM-SHA-512"


class Security(Section):
    """TLS and SASL, for librdkafka and aiokafka alike."""

    protocol: SecurityProtocol = SecurityProtocol.PLAINTEXT
    ca_file: Path | None = Field(None, description="PEM file of the authorities to trust; none: the system's")
    certificate_file: Path | None = Field(None, description="PEM file of the client's certificate")
    key_file: Path | None = Field(None, description="PEM file of the client's key")
    key_password: SecretStr | None = Field(None, description="password of the client's key")
    verify_hostname: bool = Field(True, description="check the broker's name against its certificate")
    sasl_mechanism: SaslMechanism | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None

    @model_validator(mode="after")
    def _sasl_is_whole(self) -> Security:
        wants_sasl = self.protocol in (SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL)
        given = (self.sasl_mechanism, self.sasl_username, self.sasl_password)
        if wants_sasl and None in given:
            raise ValueError(f"{self.protocol} needs sasl_mechanism, sasl_username and sasl_password")
        if not wants_sasl and any(value is not None for value in given):
            raise ValueError(f"sasl_* is set, but protocol is {self.protocol}: use SASL_PLAINTEXT or SASL_SSL")
        return self

    @model_validator(mode="after")
    def _files_are_used(self) -> Security:
        files = ("ca_file", "certificate_file", "key_file", "key_password")
        given = [name for name in files if getattr(self, name) is not None]
        if given and self.protocol not in (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL):
            raise ValueError(f"{given[0]} is set, but protocol is {self.protocol}: use SSL or SASL_SSL")
        if self.key_file is not None and self.certificate_file is None:
            raise ValueError("key_file is set without the certificate that it belongs to: set certificate_file")
        return self


class GroupProtocol(enum.StrEnum):
    """Kafka's `group.protocol`. CONSUMER needs a broker with short heartbeats: see docs/operations.md."""

    CLASSIC = "classic"
    CONSUMER = "consumer"


class KafkaSettings(Section):
    """Where Kafka is and how we use it. The root settings inherit these fields."""

    bootstrap: str = Field("127.0.0.1:9092", description="HOST:PORT[,HOST:PORT...] of the cluster")
    topic_prefix: str = Field(DEFAULT_PREFIX, description="topics are PREFIX.retrieval, PREFIX.ranking, ...")
    group_prefix: str = Field(DEFAULT_PREFIX, description="groups are PREFIX.workers, PREFIX.trigger, ...")
    partitions: Annotated[int, Field(ge=1, le=4096, description="of retrieval, preinfer, ranking and history")] = (
        DEFAULT_PARTITIONS
    )
    replication_factor: Annotated[int, Field(ge=1, le=32, description="of the topics that we create")] = 1
    group_protocol: GroupProtocol = GroupProtocol.CLASSIC
    session_timeout_ms: Annotated[
        int, Field(ge=1000, le=300_000, description="classic protocol; the broker's least is 6000")
    ] = 6000
    heartbeat_interval_ms: Annotated[int, Field(ge=50, description="classic protocol; below the session time-out")] = (
        500
    )
    fetch_wait_max_ms: Annotated[int, Field(ge=1, le=10_000, description="1 to 5 on the embedded cluster, else 20")] = (
        20
    )
    connect_timeout_s: Annotated[float, Field(gt=0, le=600, description="how long a start waits for the cluster")] = 4.0
    security: Security = Security()

    @field_validator("topic_prefix", "group_prefix")
    @classmethod
    def _prefix_is_legal(cls, value: str) -> str:
        return check_prefix(value)

    @field_validator("bootstrap")
    @classmethod
    def _bootstrap_is_addresses(cls, value: str) -> str:
        """librdkafka takes more than this, aiokafka does not: the trigger would find no broker where others do."""
        addresses = [address.strip() for address in value.split(",")]
        for address in addresses:
            if not _ADDRESS.fullmatch(address):
                raise ValueError(f"{address!r} is no address: HOST:PORT[,HOST:PORT...] is wanted, with no protocol")
        return ",".join(addresses)

    @model_validator(mode="after")
    def _heartbeats_fit_the_session(self) -> Self:
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            raise ValueError(
                f"heartbeat_interval_ms is {self.heartbeat_interval_ms}, session_timeout_ms {self.session_timeout_ms}: "
                "a member needs several heartbeats in a session, so lower the first"
            )
        return self

    def topic(self, topic: Topic) -> str:
        """The topic's full name."""
        return topic.named(self.topic_prefix)

    @property
    def workers_group(self) -> str:
        return f"{self.group_prefix}.workers"

    @property
    def trigger_group(self) -> str:
        return f"{self.group_prefix}.trigger"

    @property
    def overflow_group(self) -> str:
        return f"{self.group_prefix}.overflow"
