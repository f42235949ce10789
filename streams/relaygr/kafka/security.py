"""Translates the settings section `security` for librdkafka and for aiokafka."""

from __future__ import annotations

import ssl
from typing import Any

from relaygr.kafka.settings import Security, SecurityProtocol
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
    if security.sasl_mechanism is not None and security.sasl_password is not None:
        options |= {
            "sasl.mechanism": security.sasl_mechanism.value,
            "sasl.username": security.sasl_username,
            "sasl.password": security.sasl_password.get_secret_value(),
        }
    return {name: str(value) for name, value in options.items() if value is not None}


def aiokafka_security(security: Security) -> dict[str, Any]:
    """The section as keyword arguments of aiokafka's clients. Raises RelayError if a PEM file cannot be used."""
    options: dict[str, Any] = {"security_protocol": security.protocol.value}
    if security.protocol in _TLS:
        options["ssl_context"] = _ssl_context(security)
    if security.sasl_mechanism is not None and security.sasl_password is not None:
        options |= {
            "sasl_mechanism": security.sasl_mechanism.value,
            "sasl_plain_username": security.sasl_username,
            "sasl_plain_password": security.sasl_password.get_secret_value(),
        }
    return options


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
