"""The security section, translated for librdkafka."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pydantic import SecretStr

from relaygr.kafka.clients import require_broker
from relaygr.kafka.security import librdkafka_security, read_token
from relaygr.kafka.settings import KafkaSettings, SaslMechanism, Security, SecurityProtocol
from relaygr.runtime.errors import RelayError
from tests.promised import program


def sasl(protocol: SecurityProtocol, mechanism: SaslMechanism = SaslMechanism.SCRAM_SHA_512) -> Security:
    return Security(
        protocol=protocol, sasl_mechanism=mechanism, sasl_username="gateway", sasl_password=SecretStr("secret")
    )


def test_plaintext_says_only_the_protocol() -> None:
    assert librdkafka_security(Security()) == {"security.protocol": "PLAINTEXT"}


PASSWORD_MECHANISMS = [mechanism for mechanism in SaslMechanism if mechanism is not SaslMechanism.OAUTHBEARER]


def token(expires_s: float, subject: str = "gateway") -> str:
    """A JSON Web Token without a signature."""
    parts: list[dict[str, object]] = [{"alg": "none"}, {"sub": subject, "iat": expires_s - 600, "exp": expires_s}]
    return ".".join([*(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts), ""])


def test_a_password_file_stands_for_the_password(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("secret\n")
    plain = sasl(SecurityProtocol.SASL_PLAINTEXT)
    from_file = Security.model_validate({**plain.model_dump(), "sasl_password": None, "sasl_password_file": path})
    assert librdkafka_security(from_file) == librdkafka_security(plain)


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", b"\xff"])
def test_a_password_file_that_holds_no_password_is_reported_without_its_content(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "password").write_bytes(content)
    security = Security(
        protocol=SecurityProtocol.SASL_SSL,
        sasl_mechanism=SaslMechanism.PLAIN,
        sasl_username="gateway",
        sasl_password_file=tmp_path / "password",
    )
    with pytest.raises(RelayError, match=r"security\.sasl_password_file") as refused:
        librdkafka_security(security)
    assert "lines" not in str(refused.value)


def test_a_token_is_read_again_each_time_that_a_client_asks(tmp_path: Path) -> None:
    path = tmp_path / "token"
    security = Security(
        protocol=SecurityProtocol.SASL_SSL, sasl_mechanism=SaslMechanism.OAUTHBEARER, sasl_token_file=path
    )
    path.write_text(token(1000) + "\n")
    callback = librdkafka_security(security)["oauth_cb"]
    assert callback("") == (token(1000), 1000.0)
    path.write_text(token(2000))
    assert callback("") == (token(2000), 2000.0)


@pytest.mark.parametrize("content", ["hunter2", "a.b.c", "a.e30.c"])
def test_a_file_without_a_token_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(RelayError, match=r"security\.sasl_token_file") as refused:
        read_token(tmp_path / "token")
    assert content not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (
            {"sasl_mechanism": "PLAIN", "sasl_username": "a", "sasl_password": "b", "sasl_password_file": "c"},
            "both set",
        ),
        ({"sasl_mechanism": "OAUTHBEARER", "sasl_username": "a", "sasl_password": "b"}, "needs sasl_token_file"),
        ({"sasl_mechanism": "PLAIN", "sasl_username": "a", "sasl_token_file": "c"}, "is not OAUTHBEARER"),
    ],
)
def test_ways_to_log_in_are_not_mixed(given: dict[str, str], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Security.model_validate({"protocol": "SASL_SSL", **given})


@pytest.mark.parametrize("mechanism", PASSWORD_MECHANISMS)
def test_sasl_says_mechanism_user_and_password(mechanism: SaslMechanism) -> None:
    security = sasl(SecurityProtocol.SASL_PLAINTEXT, mechanism)
    assert librdkafka_security(security) == {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism.value,
        "sasl.username": "gateway",
        "sasl.password": "secret",
    }


def test_tls_names_the_files_and_the_check_of_the_brokers_name() -> None:
    security = Security(
        protocol=SecurityProtocol.SSL,
        ca_file=Path("ca.pem"),
        certificate_file=Path("client.pem"),
        key_file=Path("client.key"),
        key_password=SecretStr("secret"),
    )
    assert librdkafka_security(security) == {
        "security.protocol": "SSL",
        "ssl.ca.location": "ca.pem",
        "ssl.certificate.location": "client.pem",
        "ssl.key.location": "client.key",
        "ssl.key.password": "secret",
        "ssl.endpoint.identification.algorithm": "https",
    }


@pytest.mark.parametrize("verify", [True, False])
def test_tls_verifies_the_brokers_certificate_and_its_name_where_asked(verify: bool) -> None:
    security = sasl(SecurityProtocol.SASL_SSL).model_copy(update={"verify_hostname": verify})
    options = librdkafka_security(security)
    # librdkafka verifies the certificate itself unless it is told not to.
    assert "enable.ssl.certificate.verification" not in options
    assert options["ssl.endpoint.identification.algorithm"] == ("https" if verify else "none")


@pytest.mark.parametrize("protocol", [SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL])
def test_librdkafka_takes_the_options(protocol: SecurityProtocol) -> None:
    kafka = KafkaSettings(bootstrap="127.0.0.1:1,127.0.0.1:2", security=sasl(protocol))
    Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 0, **librdkafka_security(kafka.security)})


def connect(security: Security) -> None:
    require_broker(KafkaSettings(bootstrap="127.0.0.1:1", connect_timeout_s=0.5, security=security))


def test_the_option_of_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "ca.pem"
    broken.write_text("no certificate")
    for path in (broken, tmp_path / "absent.pem"):
        with pytest.raises(RelayError, match=r"ssl\.ca\.location failed.*Check `security`"):
            connect(Security(protocol=SecurityProtocol.SSL, ca_file=path))


@pytest.mark.parametrize("name", ["ca_file", "certificate_file", "key_file", "key_password"])
def test_tls_files_without_tls_are_refused_instead_of_going_in_the_clear(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is set, but protocol is PLAINTEXT: use SSL or SASL_SSL"):
        Security.model_validate({name: "x"})


def test_a_key_without_its_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="set certificate_file"):
        Security(protocol=SecurityProtocol.SSL, key_file=Path("client.key"))


@pytest.mark.slow
def test_a_locked_key_without_its_password_is_refused_instead_of_asking_the_terminal(tmp_path: Path) -> None:
    key, certificate = tmp_path / "client.key", tmp_path / "client.pem"
    make = [program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=client", "-passout", "pass:secret"]
    subprocess.run([*make, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    locked = Security(protocol=SecurityProtocol.SSL, certificate_file=certificate, key_file=key)
    with pytest.raises(RelayError, match=r"ssl\.key\.location failed.*Check `security`"):
        connect(locked)
    with pytest.raises(RelayError, match="Connection refused"):
        connect(locked.model_copy(update={"key_password": SecretStr("secret")}))
