"""Translates the settings section `security` for librdkafka.

Certificates, keys and passwords in files are read when a client is made: `SecurityFiles` says that they have changed
since. librdkafka asks for a new token before the old one expires.
"""

from __future__ import annotations

import base64
import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from relaygr.kafka.settings import Security
from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import read_regular


def librdkafka_security(security: Security) -> dict[str, Any]:
    """The section as options of librdkafka."""
    options: dict[str, Any] = {"security.protocol": security.protocol.value}
    if security.uses_tls:
        for name in ("ca_file", "certificate_file", "key_file"):
            path: Path | None = getattr(security, name)
            # The clients would wait for the writer of a FIFO.
            if path is not None and path.exists() and not (path.is_file() or path.is_dir()):
                raise RelayError(f"{path} (security.{name}) is not a regular file.")
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
        "sasl.password": password_of(security),
    }


class SecurityFiles:
    """The files that a client reads only when it is made."""

    def __init__(self, security: Security) -> None:
        """Reads them. Make it before the clients."""
        files = (security.ca_file, security.certificate_file, security.key_file, security.sasl_password_file)
        self.paths = tuple(path for path in files if path is not None)
        self._digest = self._read()

    def changed(self) -> bool:
        """Whether a file has another content now. Reads them all; a file that is missing is being replaced."""
        digest = self._read()
        return digest is not None and digest != self._digest

    def _read(self) -> bytes | None:
        try:
            return b"".join(blake2b(read_regular(path)).digest() for path in self.paths)
        except OSError:
            return None


def read_token(path: Path) -> tuple[str, float]:
    """The JSON Web Token in a file, and the second since the epoch at which it expires.

    Raises RelayError, which never contains the token. The broker checks the token; here it is only decoded.
    """
    token = read_secret(path, "security.sasl_token_file")
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return token, float(claims["exp"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        raise RelayError(
            f"{path} (security.sasl_token_file) does not hold a JSON Web Token with an expiry (`exp`)."
        ) from None


def password_of(security: Security) -> str:
    """The password of SASL, from its file if there is one. Raises RelayError if the file cannot be read."""
    if security.sasl_password_file is not None:
        return read_secret(security.sasl_password_file, "security.sasl_password_file")
    return security.sasl_password.get_secret_value() if security.sasl_password is not None else ""


def read_secret(path: Path, setting: str) -> str:
    """The only line of the file that a setting names. Raises RelayError, which never contains the line."""
    try:
        text = read_regular(path).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RelayError(f"{path} ({setting}) cannot be read: {reason}.") from None
    if not text or "\n" in text:
        raise RelayError(f"{path} ({setting}) must hold one line.")
    return text
