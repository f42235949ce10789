"""TLS and SASL against a real Kafka that requires both, with both client libraries."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from pydantic import SecretStr

import relaygr.devbroker.kafka
from relaygr.devbroker import BrokerChoice, LocalBroker, available_brokers
from relaygr.devbroker.kafka import kafka_broker
from relaygr.devbroker.local import free_ports
from relaygr.kafka.admin import create_topics
from relaygr.kafka.clients import aiokafka_options, require_broker
from relaygr.kafka.settings import KafkaSettings, SaslMechanism, Security, SecurityProtocol
from relaygr.runtime.errors import RelayError

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PASSWORD = "open sesame"


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
def secured(real_broker: LocalBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    """Settings that a broker with SASL_SSL accepts."""
    home = available_brokers().kafka_home
    if real_broker.kind is not BrokerChoice.KAFKA or home is None:
        pytest.skip("tests run on a Kafka that they did not start")
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    cert, keystore = certificate(tmp_path_factory.mktemp("tls"))
    port, controller_port, secured_port = free_ports(3)
    jaas = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    properties = {
        "listeners": f"PLAINTEXT://127.0.0.1:{port},SASL_SSL://127.0.0.1:{secured_port},"
        f"CONTROLLER://127.0.0.1:{controller_port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": f'{jaas} user_gateway="{PASSWORD}";',
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relaygr.devbroker.kafka, "free_ports", lambda _: [port, controller_port])
        with kafka_broker(home, "a test", properties=properties):
            yield KafkaSettings(
                bootstrap=f"127.0.0.1:{secured_port}",
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


def changed(kafka: KafkaSettings, **changes: object) -> KafkaSettings:
    security = kafka.security.model_copy(update=changes)
    return kafka.model_copy(update={"security": security, "connect_timeout_s": 4.0})


def test_both_clients_get_in(secured: KafkaSettings) -> None:
    assert create_topics(secured).ok

    async def produce() -> int:
        async with AIOKafkaProducer(**aiokafka_options(secured)) as producer:
            sent = await producer.send_and_wait("secured.workers", b"v", key=b"k")
            return int(sent.offset)

    assert asyncio.run(asyncio.wait_for(produce(), 30)) == 0


def test_a_wrong_password_is_told_as_such(secured: KafkaSettings) -> None:
    with pytest.raises(RelayError, match=r"(?i)authentication failed.*Check `security`") as refusal:
        require_broker(changed(secured, sasl_password=SecretStr("wrong word")))
    assert "wrong word" not in str(refusal.value)


def test_an_authority_that_is_not_trusted_is_told_as_such(secured: KafkaSettings) -> None:
    with pytest.raises(RelayError, match=r"certificate.*Check `security`"):
        require_broker(changed(secured, ca_file=None))


def test_plaintext_to_a_tls_listener_points_at_security(secured: KafkaSettings) -> None:
    with pytest.raises(RelayError, match="`security`: its protocol is PLAINTEXT"):
        require_broker(secured.model_copy(update={"security": Security(), "connect_timeout_s": 4.0}))
