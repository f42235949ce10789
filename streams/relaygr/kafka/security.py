"""Translates the settings section `security` for librdkafka and for aiokafka.

Passwords and tokens in files are read when a client is made; librdkafka and aiokafka ask for a new token before the old
one expires.
"""

from __future__ import annotations

import base64
import importlib
import json
import ssl
from pathlib import Path
from typing import Any

from relaygr.kafka.settings import SaslMechanism, Security, SecurityProtocol
from relaygr.runtime.errors import RelayError

_TLS = (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL)


def librdkafka_security(security: Security) -> dict[str, Any]:
    """The section as options of librdkafka."""
    options: dict[str, Any] = {"security.protocol": security.protocol.value}
    if security.protocol in _TLS:
        options |= {
            "ssl.ca.location": security.ca_file,
            "ssl.certificate.location": security.certificate_file,
            "ssl.key.location": security.key_file,
            "ssl.key.password": security.key_password and security.key_password.get_secret_value(),
            "ssl.endpoint.identification.algorithm": "https" if security.verify_hostname else "none",
        }
    texts = {name: str(value) for name, value in options.items() if value is not None}
    token_file = security.sasl_token_file
    if security.sasl_mechanism is None:
        return texts
    if token_file is not None:
        read_token(token_file)
        return {**texts, "sasl.mechanism": security.sasl_mechanism.value, "oauth_cb": lambda _: read_token(token_file)}
    return {
        **texts,
        "sasl.mechanism": security.sasl_mechanism.value,
        "sasl.username": security.sasl_username,
        "sasl.password": _password(security),
    }


def aiokafka_security(security: Security) -> dict[str, Any]:
    """The section as keyword arguments of aiokafka's clients. Raises RelayError if a PEM file cannot be used."""
    options: dict[str, Any] = {"security_protocol": security.protocol.value}
    if security.protocol in _TLS:
        options["ssl_context"] = _ssl_context(security)
    if security.sasl_mechanism is SaslMechanism.OAUTHBEARER and security.sasl_token_file is not None:
        options |= {
            "sasl_mechanism": security.sasl_mechanism.value,
            "sasl_oauth_token_provider": _token_provider(security.sasl_token_file),
        }
    elif security.sasl_mechanism is not None:
        options |= {
            "sasl_mechanism": security.sasl_mechanism.value,
            "sasl_plain_username": security.sasl_username,
            "sasl_plain_password": _password(security),
        }
    return options


def read_token(path: Path) -> tuple[str, float]:
    """The JSON Web Token in a file, and the second since the epoch at which it expires.

    Raises RelayError, which never contains the token. The broker checks the token; here it is only decoded.
    """
    token = _read(path, "security.sasl_token_file")
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return token, float(claims["exp"])
    except (ValueError, LookupError, TypeError):
        raise RelayError(
            f"{path} (security.sasl_token_file) does not hold a JSON Web Token with an expiry (`exp`)."
        ) from None


def _password(security: Security) -> str:
    if security.sasl_password_file is not None:
        return _read(security.sasl_password_file, "security.sasl_password_file")
    return security.sasl_password.get_secret_value() if security.sasl_password is not None else ""


def _read(path: Path, setting: str) -> str:
    """The only line of a file. Raises RelayError."""
    try:
        text = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RelayError(f"{path} ({setting}) cannot be read: {reason}.") from None
    if not text or "\n" in text:
        raise RelayError(f"{path} ({setting}) must hold one line.")
    return text


def _token_provider(path: Path) -> Any:
    """An object that gives aiokafka the token of the file."""

    async def token(_: object) -> str:
        return read_token(path)[0]

    # Only the trigger calls this function, and only the trigger has aiokafka.
    base = importlib.import_module("aiokafka.abc").AbstractTokenProvider
    return type("TokenFile", (base,), {"token": token})()


def _ssl_context(security: Security) -> ssl.SSLContext:
    # With no password at all, OpenSSL would prompt for one on the terminal and wait.
    password = security.key_password.get_secret_value() if security.key_password is not None else ""
    try:
        context = ssl.create_default_context(cafile=str(security.ca_file) if security.ca_file is not None else None)
        if security.certificate_file is not None:
            context.load_cert_chain(security.certificate_file, security.key_file, password)
    except OSError as error:
        files = ", ".join(
            str(path) for path in (security.ca_file, security.certificate_file, security.key_file) if path is not None
        )
        raise RelayError(
            f"TLS files cannot be used ({files or 'the system authorities'}): {error}. "
            "Check security.ca_file, certificate_file, key_file and key_password"
        ) from error
    context.check_hostname = security.verify_hostname
    return context
