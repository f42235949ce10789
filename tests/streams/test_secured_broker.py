"""TLS, SASL, client certificates and tokens against a real Kafka that requires them, with both client libraries."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Message, TopicPartition
from confluent_kafka.admin import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from relaygr.client import RelayClient
from relaygr.cluster.admin import create_topics
from relaygr.consumer.leave import leave
from relaygr.devbroker import BrokerChoice, LocalBroker
from relaygr.kafka.clients import (
    ProducerKind,
    make_admin,
    make_assigned_consumer,
    make_group_consumer,
    make_producer,
    require_broker,
)
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings, SaslMechanism, Security, SecurityProtocol
from relaygr.runtime.errors import RelayError
from tests.promised import program
from tests.streams.test_security import token
from tests.waiting import until
from tests.worlds.own_broker import own_broker

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PASSWORD = "open sesame"


@dataclass(frozen=True, slots=True)
class SecuredBroker:
    """One broker: with user and password over TLS, with client certificates, with tokens, and with SCRAM.

    `unreached` is a listener that advertises an address which nobody can reach.
    """

    password: KafkaSettings
    certificate: KafkaSettings
    token: KafkaSettings
    scram: KafkaSettings
    unreached: KafkaSettings


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and key and certificate in one file as Kafka requires."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    both = folder / "keystore.pem"
    both.write_text(key.read_text() + cert.read_text())
    return cert, both


@pytest.fixture(scope="module")
def broker(real_broker: LocalBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    if real_broker.kind is not BrokerChoice.KAFKA:
        pytest.skip("tests run on a Kafka that they did not start")
    program("openssl")
    folder = tmp_path_factory.mktemp("tls")
    cert, keystore = certificate(folder)
    jaas = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    scram = "org.apache.kafka.common.security.scram.ScramLoginModule required"
    bearer = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"
    token_file = folder / "token"
    token_file.write_text(token(time.time() + 600))
    properties = {
        "listener.name.mutual.ssl.client.auth": "required",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(cert),
        "listener.name.token.sasl.enabled.mechanisms": "OAUTHBEARER",
        "listener.name.token.oauthbearer.sasl.jaas.config": f'{bearer} unsecuredLoginStringClaim_sub="broker";',
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{scram};",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": f'{jaas} user_gateway="{PASSWORD}";',
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
    }
    listeners = {"SASL_SSL": "SASL_SSL", "MUTUAL": "SSL", "TOKEN": "SASL_SSL", "UNREACHED": "PLAINTEXT"}
    with own_broker(listeners, properties, {"UNREACHED": "127.0.0.1:1"}) as started:
        by_password = KafkaSettings(
            bootstrap=started.others["SASL_SSL"],
            topic_prefix="secured",
            partitions=2,
            connect_timeout_s=15,
            security=Security(
                protocol=SecurityProtocol.SASL_SSL,
                ca_file=cert,
                sasl_mechanism=SaslMechanism.PLAIN,
                sasl_username="gateway",
                sasl_password=SecretStr(PASSWORD),
            ),
        )
        mutual = Security(
            protocol=SecurityProtocol.SSL, ca_file=cert, certificate_file=cert, key_file=folder / "key.pem"
        )
        bearing = Security(
            protocol=SecurityProtocol.SASL_SSL,
            ca_file=cert,
            sasl_mechanism=SaslMechanism.OAUTHBEARER,
            sasl_token_file=token_file,
        )
        yield SecuredBroker(
            by_password,
            by_password.model_copy(update={"bootstrap": started.others["MUTUAL"], "security": mutual}),
            by_password.model_copy(update={"bootstrap": started.others["TOKEN"], "security": bearing}),
            with_scram(by_password),
            KafkaSettings(bootstrap=started.others["UNREACHED"], connect_timeout_s=10.0),
        )


def with_scram(kafka: KafkaSettings) -> KafkaSettings:
    """Settings of a new user of the broker, whose password is checked by SCRAM."""
    wanted = UserScramCredentialUpsertion(
        "scrammer", ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096), PASSWORD.encode()
    )
    # The requests end with the client, so it needs a name.
    admin = make_admin(kafka, "test")
    for made in admin.alter_user_scram_credentials([wanted]).values():
        made.result(30)
    security = kafka.security.model_copy(
        update={"sasl_mechanism": SaslMechanism.SCRAM_SHA_512, "sasl_username": "scrammer"}
    )
    return kafka.model_copy(update={"security": security})


@pytest.fixture(scope="module")
def secured(broker: SecuredBroker) -> KafkaSettings:
    """Settings that the broker with SASL_SSL accepts."""
    return broker.password


def changed(kafka: KafkaSettings, **changes: object) -> KafkaSettings:
    security = kafka.security.model_copy(update=changes)
    return kafka.model_copy(update={"security": security, "connect_timeout_s": 4.0})


@pytest.mark.parametrize("way", ["password", "certificate", "token", "scram"])
def test_a_static_member_leaves_its_group(broker: SecuredBroker, way: str) -> None:
    kafka: KafkaSettings = getattr(broker, way)
    assert create_topics(kafka).ok
    group = f"secured-{way}"
    member = make_group_consumer(kafka, group, "test", "worker-00")
    member.subscribe(["secured.ranking"])
    until(member.assignment, "it has partitions", meanwhile=lambda: member.poll(0.05))
    member.close()
    assert leave(kafka, group, "worker-00", timeout_s=20)
    assert not leave(kafka, group, "worker-00", timeout_s=20)


@pytest.mark.parametrize("way", ["password", "certificate", "token", "scram"])
def test_producers_and_consumers_get_in(broker: SecuredBroker, way: str) -> None:
    kafka: KafkaSettings = getattr(broker, way)
    assert create_topics(kafka).ok
    producer = make_producer(kafka, ProducerKind.DURABLE, "test")
    producer.produce("secured.workers", b"v", b"k")
    assert producer.flush(30) == 0
    consumer = make_assigned_consumer(kafka, "test")
    consumer.assign([TopicPartition("secured.workers", 0, 0)])
    message = consumer.poll(30)
    assert message is not None
    assert (message.error(), message.value()) == (None, b"v")
    consumer.close()


def test_a_client_without_a_certificate_does_not_get_in(broker: SecuredBroker) -> None:
    with pytest.raises(RelayError, match="Check `security`"):
        require_broker(changed(broker.certificate, certificate_file=None, key_file=None))


def test_an_expired_token_is_told_as_such(broker: SecuredBroker, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token(time.time() - 60))
    with pytest.raises(RelayError, match="Check `security`"):
        require_broker(changed(broker.token, sasl_token_file=tmp_path / "token"))


@pytest.mark.parametrize("is_empty", [False, True], ids=["expired", "empty"])
def test_dead_letters_wait_for_a_valid_token(broker: SecuredBroker, tmp_path: Path, is_empty: bool) -> None:
    """The first dead letter stopped the poll thread for ten seconds, and then the worker ended."""
    kafka = changed(broker.token, sasl_token_file=tmp_path / "token")
    (tmp_path / "token").write_text("" if is_empty else token(time.time() - 60))
    assert create_topics(broker.token).ok
    writer, done = KafkaSession(kafka, "test").dead_letters, list[bool]()
    writer.write(
        Message(topic="secured.ranking", partition=0, offset=7, value=b"garbage"), "malformed", "", done.append
    )
    writer.poll()
    assert done == []
    (tmp_path / "token").write_text(token(time.time() + 600))
    assert writer.flush(60) == 0
    assert done == [True]


def test_a_client_starts_with_a_token(broker: SecuredBroker) -> None:
    assert create_topics(broker.token).ok
    with RelayClient(broker.token, "gateway-0", registry=CollectorRegistry()) as client:
        assert client.refusal is None


def test_a_wrong_password_is_told_as_such(secured: KafkaSettings) -> None:
    with pytest.raises(RelayError, match=r"(?i)authentication failed.*Check `security`") as refusal:
        require_broker(changed(secured, sasl_password=SecretStr("wrong word")))
    assert "wrong word" not in str(refusal.value)


def test_an_authority_that_is_not_trusted_is_told_as_such(secured: KafkaSettings) -> None:
    with pytest.raises(RelayError, match=r"certificate.*Check `security`"):
        require_broker(changed(secured, ca_file=None))


def test_brokers_that_cannot_be_reached_at_the_addresses_that_they_advertise_are_named(broker: SecuredBroker) -> None:
    """The address of `bootstrap` answered, and each command waited for 30 s and blamed time-outs."""
    with pytest.raises(RelayError, match=r"advertise: 127\.0\.0\.1:1 \(Connection refused\). Set advertised.listeners"):
        require_broker(broker.unreached)


def test_plaintext_to_a_tls_listener_points_at_security(secured: KafkaSettings) -> None:
    with pytest.raises(RelayError, match="`security`: its protocol is PLAINTEXT"):
        require_broker(secured.model_copy(update={"security": Security(), "connect_timeout_s": 4.0}))
