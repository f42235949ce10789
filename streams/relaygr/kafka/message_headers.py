"""Reads the headers of a received message. No other module calls `Message.headers()`.

In Kafka the name of a header may be any bytes. If a name is not UTF-8, confluent-kafka 2.16 raises SystemError and
leaves an incomplete list in the message. A second call returns that list, and access to it crashes the process. So
this module removes the headers of such a message.
"""

from __future__ import annotations

import operator
from typing import Final

from confluent_kafka import Message

from relaygr.kafka.client_errors import LimitedLog
from relaygr.schemas.headers import RawHeaders

# `methodcaller` makes the call in C. The specializing interpreter of Python 3.11 does not check for an error that comes
# with a result, so a frequent direct call would return the incomplete list already at the first call.
_READ: Final = operator.methodcaller("headers")

# Any producer may write any number of such messages.
_limited_log: Final = LimitedLog()


def headers_of(message: Message) -> RawHeaders:
    """The message's headers as pairs; None if a header's name is not UTF-8. Raises no exception."""
    try:
        headers: RawHeaders = _READ(message)
    except (SystemError, UnicodeDecodeError):
        message.set_headers([])
        _limited_log.warning("the headers of a message are dropped: a name is not UTF-8", None)
        return None
    return headers
