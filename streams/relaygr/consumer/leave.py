"""Makes a static member leave its group at once, instead of at the end of its session.

A static member sends no leave request when it closes, and librdkafka has none for it. The broker accepts a LeaveGroup
request of version 3 with an empty member id and the `group.instance.id`, from any client. aiokafka sends it: it has
the connection with TLS and every SASL mechanism, and the look-up of the coordinator, but only versions 0 and 1 of the
request, so version 3 is declared here.

Import this module only where it is used, because it imports aiokafka.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

from aiokafka.abc import AbstractTokenProvider
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.errors import KafkaError, NoError, UnknownMemberIdError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Int16, Int32, Schema, String

from relaygr.kafka.security import password_of, read_token
from relaygr.kafka.settings import KafkaSettings, Security
from relaygr.runtime.errors import RelayError

_TIMEOUT_S = 5.0
_PAUSE_S = 0.1
_GONE = (UnknownMemberIdError.errno, 69)
"""The group has no such member, or (GROUP_ID_NOT_FOUND, which aiokafka does not know) does not exist."""


def leave(kafka: KafkaSettings, group: str, instance_id: str, timeout_s: float = _TIMEOUT_S) -> bool:
    """Makes the static member `instance_id` leave. False if the group has no such member.

    Call it after the end of the member's process: a live member joins again. Raises RelayError if the request
    fails or takes longer than `timeout_s`.
    """
    try:
        return asyncio.run(asyncio.wait_for(_leave(kafka, group, instance_id), timeout_s))
    except (KafkaError, OSError) as error:
        cause = str(error) or type(error).__name__
        raise RelayError(
            f"{instance_id} did not leave {group}: {cause}. Its partitions move to other workers at the end of its "
            f"session, {kafka.session_timeout_ms} ms after its last heartbeat."
        ) from error


async def _leave(kafka: KafkaSettings, group: str, instance_id: str) -> bool:
    client = AIOKafkaClient(
        bootstrap_servers=kafka.bootstrap.split(","),
        client_id=f"relaygr-{instance_id}-leave",
        **_security(kafka.security),
    )
    await client.bootstrap()
    try:
        while True:
            try:
                coordinator = await client.coordinator_lookup(CoordinationType.GROUP, group)
                answer = await client.send(coordinator, _LeaveGroup(group, instance_id))
                codes = (answer.error_code, *(code for _, _, code in answer.members))
                if any(code in _GONE for code in codes):
                    return False
                for code in codes:
                    if code != NoError.errno:
                        raise for_code(code)()
                return True
            except KafkaError as error:
                if not error.retriable:
                    raise
            await asyncio.sleep(_PAUSE_S)
    finally:
        await client.close()


def _security(security: Security) -> dict[str, Any]:
    """The settings section as keyword arguments of aiokafka's client. Raises RelayError or OSError for a bad file."""
    options: dict[str, Any] = {"security_protocol": security.protocol.value}
    if security.uses_tls:
        options["ssl_context"] = _ssl_context(security)
    if security.sasl_mechanism is None:
        return options
    options["sasl_mechanism"] = security.sasl_mechanism.value
    if security.sasl_token_file is not None:
        return options | {"sasl_oauth_token_provider": _TokenFile(security.sasl_token_file)}
    return options | {
        "sasl_plain_username": security.sasl_username,
        "sasl_plain_password": password_of(security),
    }


def _ssl_context(security: Security) -> ssl.SSLContext:
    # With no password at all, OpenSSL would prompt for one on the terminal and wait.
    password = security.key_password.get_secret_value() if security.key_password is not None else ""
    context = ssl.create_default_context(cafile=str(security.ca_file) if security.ca_file is not None else None)
    if security.certificate_file is not None:
        context.load_cert_chain(security.certificate_file, security.key_file, password)
    context.check_hostname = security.verify_hostname
    return context


class _TokenFile(AbstractTokenProvider):  # type: ignore[misc]
    """Gives aiokafka the token of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def token(self) -> str:
        return read_token(self._path)[0]


class _LeaveGroupResponseV3(Response):  # type: ignore[misc]
    API_KEY = 13
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        (
            "members",
            Array(("member_id", String("utf-8")), ("group_instance_id", String("utf-8")), ("error_code", Int16)),
        ),
    )


class _LeaveGroupRequestV3(RequestStruct):  # type: ignore[misc]
    API_KEY = 13
    API_VERSION = 3
    RESPONSE_TYPE = _LeaveGroupResponseV3
    SCHEMA = Schema(
        ("group", String("utf-8")),
        ("members", Array(("member_id", String("utf-8")), ("group_instance_id", String("utf-8")))),
    )


class _LeaveGroup(Request[_LeaveGroupRequestV3]):  # type: ignore[misc]
    API_KEY = 13

    def __init__(self, group: str, instance_id: str) -> None:
        self._group = group
        self._instance_id = instance_id

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class(self._group, [("", self._instance_id)])
