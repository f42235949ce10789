"""The headers of a received message: the only place that calls `Message.headers()`.

Kafka lets a header's name be any bytes. For one that is not UTF-8 confluent-kafka 2.16 raises SystemError and
keeps a list with a hole in the message, which a second call hands out: touching it ends the process with a
segmentation fault. So such a message is left without headers here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final, Protocol

import structlog

from relaygr.schemas.headers import RawHeaders

# Called through C: once a method call in Python code has run often, the interpreter (3.11) no longer looks whether
# a result came with an error, and would hand out the list with the hole at the first call too.
_READ: Final = operator.methodcaller("headers")

_log = structlog.get_logger()


class WithHeaders(Protocol):
    """confluent-kafka's `Message`, or another client's in its clothes."""

    def headers(self) -> Any: ...


def headers_of(message: WithHeaders) -> RawHeaders:
    """The message's headers as pairs; none at all where a header's name is not UTF-8. Raises nothing."""
    try:
        headers = _READ(message)
    except (SystemError, UnicodeDecodeError):
        message.set_headers([])  # type: ignore[attr-defined]
        _log.warning("a message's headers can not be read: a name is not UTF-8")
        return None
    return headers.items() if isinstance(headers, Mapping) else headers
