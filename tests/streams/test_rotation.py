"""Certificates and passwords that are renewed, or are not, while processes run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion
from prometheus_client import CollectorRegistry

import relaygr.kafka.session
from relaygr.client import DeliveryReport, Ended, RelayClient
from relaygr.cluster.admin import create_topics
from relaygr.devbroker.local import free_ports
from relaygr.kafka.client_errors import is_refusal
from relaygr.kafka.clients import make_admin
from relaygr.kafka.security import SecurityFiles
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings, SaslMechanism, Security, SecurityProtocol
from relaygr.processes import is_ready
from relaygr.runtime.errors import RelayError
from tests.echo_worker import echo_worker
from tests.promised import program
from tests.waiting import until
from tests.worlds.broker_proxy import RawProxy
from tests.worlds.certificates import Authority
from tests.worlds.own_broker import own_broker
from tests.worlds.relay import Relay, make_model

with_a_broker = [pytest.mark.kafka, pytest.mark.slow]
LIFETIME_S = 15


@dataclass(frozen=True, slots=True)
class World:
    """A broker with a listener for client certificates and one for passwords, each behind a proxy."""

    authority: Authority
    plain: KafkaSettings
    certificates: RawProxy
    passwords: RawProxy

    def by_certificate(self, folder: Path, lifetime_s: float) -> tuple[KafkaSettings, float]:
        """Settings of a client, and when its certificate expires, in seconds since the epoch."""
        expires_s = time.time() + lifetime_s
        certificate, key = self.authority.issue("client", folder, lifetime_s)
        security = Security(
            protocol=SecurityProtocol.SSL,
            ca_file=self.authority.certificate,
            certificate_file=certificate,
            key_file=key,
        )
        return self._settings(self.certificates, security), expires_s

    def by_password(self, file: Path) -> KafkaSettings:
        security = Security(
            protocol=SecurityProtocol.SASL_SSL,
            ca_file=self.authority.certificate,
            sasl_mechanism=SaslMechanism.SCRAM_SHA_512,
            sasl_username="gateway",
            sasl_password_file=file,
        )
        return self._settings(self.passwords, security)

    def set_password(self, password: str) -> None:
        wanted = UserScramCredentialUpsertion(
            "gateway", ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096), password.encode()
        )
        admin = make_admin(self.plain, "test")
        for made in admin.alter_user_scram_credentials([wanted]).values():
            made.result(30)

    def _settings(self, proxy: RawProxy, security: Security) -> KafkaSettings:
        address = f"127.0.0.1:{proxy.port}"
        return self.plain.model_copy(update={"bootstrap": address, "security": security, "connect_timeout_s": 15.0})


@dataclass(frozen=True, slots=True)
class Secured:
    """The broker of all tests, whose listeners advertise the ports of the proxies."""

    authority: Authority
    plain: KafkaSettings
    ports: tuple[int, int]
    listeners: tuple[str, str]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    program("openssl")
    folder = tmp_path_factory.mktemp("rotation")
    authority = Authority.make(folder / "authority")
    certificate, key = authority.issue("broker", folder)
    keystore = folder / "keystore.pem"
    keystore.write_text(key.read_text() + certificate.read_text())
    properties = {
        "listener.name.certificates.ssl.client.auth": "required",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.certificate),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.passwords.scram-sha-512.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
    }
    first, second = free_ports(2)
    advertised = {"CERTIFICATES": f"127.0.0.1:{first}", "PASSWORDS": f"127.0.0.1:{second}"}
    with own_broker({"CERTIFICATES": "SSL", "PASSWORDS": "SASL_SSL"}, properties, advertised) as broker:
        plain = KafkaSettings(bootstrap=broker.bootstrap, topic_prefix="rotated", group_prefix="rotated", partitions=2)
        assert create_topics(plain).ok
        listeners = broker.others["CERTIFICATES"], broker.others["PASSWORDS"]
        yield Secured(authority, plain, (first, second), listeners)


@pytest.fixture
def world(secured: Secured) -> Iterator[World]:
    with ExitStack() as stack:
        certificates, passwords = (
            stack.enter_context(RawProxy(port, listener))
            for port, listener in zip(secured.ports, secured.listeners, strict=True)
        )
        yield World(secured.authority, secured.plain, certificates, passwords)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaygr.kafka.session, "LOOK_S", 0.05)


def is_ranked(client: RelayClient) -> bool:
    return client.rank("ann", [1, 2], budget_ms=2_000).status is Ended.RANKED


def cut(proxy: RawProxy) -> None:
    proxy.cut()
    proxy.listen()


class TestClient:
    pytestmark = with_a_broker

    def test_a_certificate_renewed_in_time_is_taken_and_one_that_expires_is_named_until_its_successor_is_taken(
        self, world: World, tmp_path: Path
    ) -> None:
        """Both clients wait for the same end of the first certificates."""
        lifetime_s = LIFETIME_S + 5 * self.first_answer_s(world, tmp_path / "first")
        prompt, _ = world.by_certificate(tmp_path / "prompt", lifetime_s)
        tardy, expires_s = world.by_certificate(tmp_path / "tardy", lifetime_s)
        with (
            echo_worker(world.plain),
            RelayClient(prompt, "gw-0", registry=CollectorRegistry()) as in_time,
            RelayClient(tardy, "gw-1", registry=CollectorRegistry()) as late,
        ):
            until(lambda: is_ranked(in_time) and is_ranked(late), "an answer", 60)
            before = in_time._link._consumer
            world.authority.issue("client", tmp_path / "prompt")
            until(lambda: in_time._link._consumer is not before, "new clients", 60)
            assert is_ranked(in_time)
            until(lambda: time.time() > expires_s + 1, "the first certificates have expired", lifetime_s + 10)
            cut(world.certificates)
            until(lambda: is_ranked(in_time), "an answer by a new connection", 60)
            assert in_time.refusal is None
            until(lambda: late.refusal is not None, "a cause", 60)
            reports: list[DeliveryReport] = []
            late.tombstone("ben", reports.append)
            world.authority.issue("client", tmp_path / "tardy")
            until(lambda: is_ranked(late), "an answer with the new certificate", 60)
            until(lambda: bool(reports), "the report of the message", 60)
            assert [report.error for report in reports] == [None]
            assert late.refusal is None

    @staticmethod
    def first_answer_s(world: World, folder: Path) -> float:
        """How long this machine takes from a new certificate to an answer."""
        started_s = time.monotonic()
        kafka, _ = world.by_certificate(folder, 86_400)
        with echo_worker(world.plain), RelayClient(kafka, "gw-first", registry=CollectorRegistry()) as client:
            until(lambda: is_ranked(client), "an answer", 60)
        return time.monotonic() - started_s

    def test_a_password_that_is_changed_is_taken(self, world: World, tmp_path: Path) -> None:
        file = tmp_path / "password"
        file.write_text("one")
        world.set_password("one")
        kafka = world.by_password(file)
        with echo_worker(world.plain), RelayClient(kafka, "gw-0", registry=CollectorRegistry()) as client:
            until(lambda: is_ranked(client), "an answer", 60)
            world.set_password("two")
            cut(world.passwords)
            until(lambda: client.refusal is not None, "a cause", 60)
            file.write_text("two")
            until(lambda: is_ranked(client), "an answer with the new password", 60)


class TestProcess:
    pytestmark = with_a_broker

    def test_servers_that_kafka_refuses_end_for_their_new_files_and_a_gateway_takes_them(
        self, world: World, tmp_path: Path
    ) -> None:
        file = tmp_path / "password"
        file.write_text("one")
        world.set_password("one")
        model = make_model(tmp_path / "model")
        with Relay(world.by_password(file), tmp_path / "relay", model) as relay:
            servers = relay.start_worker(), relay.start_trigger()
            gateway = relay.processes.start("gateway", ["gateway"], "gateway", ["gateway.listen_port=0"])
            relay.await_ready(*servers, gateway)
            world.set_password("two")
            cut(world.passwords)
            until(lambda: not is_ready(gateway.port), "the gateway is not ready", 60)
            assert all(server.process.poll() is None for server in servers)
            file.write_text("two")
            until(lambda: is_ready(gateway.port), "the gateway is ready again", 60)
            for server in servers:
                assert server.process.wait(90) == 1, server.name
                said = " ".join(server.log_tail().split())
                assert "start it again" in said and file.name in said
                relay.forget(server)


# -- without a broker --------------------------------------------------------------------------------


def security(tmp_path: Path) -> Security:
    for name in ("ca.pem", "client.pem", "client.key"):
        (tmp_path / name).write_text(name)
    return Security(
        protocol=SecurityProtocol.SSL,
        ca_file=tmp_path / "ca.pem",
        certificate_file=tmp_path / "client.pem",
        key_file=tmp_path / "client.key",
    )


@pytest.mark.parametrize("name", ["ca.pem", "client.pem", "client.key"])
def test_each_file_counts_and_a_missing_one_does_not(tmp_path: Path, name: str) -> None:
    files = SecurityFiles(security(tmp_path))
    assert not files.changed()
    (tmp_path / name).rename(tmp_path / "aside")
    assert not files.changed()
    (tmp_path / name).write_text("renewed")
    assert files.changed()
    (tmp_path / "aside").rename(tmp_path / name)
    assert not files.changed()


def test_a_secret_behind_a_link_that_is_re_pointed_counts(tmp_path: Path) -> None:
    """Kubernetes renews a mounted secret by one link to a folder."""
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "password").write_text(version)
    (tmp_path / "data").symlink_to("1")
    kafka = Security(
        protocol=SecurityProtocol.SASL_PLAINTEXT,
        sasl_mechanism=SaslMechanism.PLAIN,
        sasl_username="u",
        sasl_password_file=tmp_path / "data" / "password",
    )
    files = SecurityFiles(kafka)
    (tmp_path / "new").symlink_to("2")
    (tmp_path / "new").replace(tmp_path / "data")
    assert files.changed()


@pytest.mark.parametrize(
    ("code", "text", "refused"),
    [
        (KafkaError._SSL, "SSL handshake failed", True),
        (KafkaError._AUTHENTICATION, "SASL authentication error", True),
        (KafkaError._TRANSPORT, "Receive failed: error:0A000416:SSL routines::ssl/tls alert certificate unknown", True),
        (KafkaError._TRANSPORT, "Connection refused", False),
        (KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down", False),
        (KafkaError._TRANSPORT, "SSL handshake failed: Disconnected: connecting to a PLAINTEXT listener?", False),
        (KafkaError._TRANSPORT, "SASL authentication error: SaslAuthenticateRequest failed: transport failure", False),
    ],
)
def test_a_broker_that_is_away_refuses_nobody(code: int, text: str, refused: bool) -> None:
    assert is_refusal(KafkaError(code, text)) is refused


@pytest.mark.parametrize(("is_changed", "is_refused"), [(True, True), (True, False), (False, True)])
def test_a_process_ends_only_if_kafka_refuses_it_and_its_files_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_changed: bool, is_refused: bool
) -> None:
    kills: list[int] = []
    monkeypatch.setattr(relaygr.kafka.session.os, "kill", lambda _, number: kills.append(number))
    given = security(tmp_path)
    session = KafkaSession(KafkaSettings(security=given), "test")

    def serve() -> None:
        with session.ends_for_new_files():
            if is_changed:
                given.certificate_file and given.certificate_file.write_text("renewed")
            if is_refused:
                session._note_rejection(0, KafkaError(KafkaError._SSL, "certificate expired"))
            looks = 40 if is_changed and is_refused else 4
            for _ in range(looks):
                if not kills:
                    time.sleep(0.05)

    if is_changed and is_refused:
        with pytest.raises(RelayError, match="start it again"):
            serve()
        assert kills == [signal.SIGTERM]
    else:
        serve()
        assert not kills
