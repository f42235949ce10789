"""Settings of `relaygr gateway`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ByteSize, Field, SecretStr

from relaygr.runtime.direct_http import is_loopback
from relaygr.runtime.settings import Section, sendable

LARGEST_BODY_BYTES = 16 << 20
"""Enough for a message of the largest size with its numbers as text."""


class GatewaySettings(Section):
    """The HTTP gateway."""

    gateway_id: str = Field(
        "gateway-http-00",
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        description="id of this gateway; each process needs its own",
    )
    listen_host: str = Field(
        "127.0.0.1", description="address of the API; another one than a loopback address needs gateway.token"
    )
    listen_port: Annotated[int, Field(ge=0, le=65535, description="port of the API; 0: any free port")] = 8088
    token: Annotated[SecretStr | None, AfterValidator(sendable)] = Field(
        None, description="callers must send it (Authorization: Bearer TOKEN), at least 16 characters; none: no check"
    )
    max_requests: Annotated[
        int, Field(ge=1, le=100_000, description="requests that are served at once; further ones are answered 429")
    ] = 256
    max_connections: Annotated[
        int,
        Field(
            ge=1,
            le=100_000,
            description="open connections; beyond it the one that was idle longest is closed. A low limit of open "
            "files (`ulimit -Hn`) lowers it, with a line in the log",
        ),
    ] = 1024
    max_body_bytes: Annotated[
        ByteSize,
        Field(ge=ByteSize(1024), le=ByteSize(LARGEST_BODY_BYTES), description="largest body of a request"),
    ] = ByteSize(1 << 20)
    body_timeout_s: Annotated[float, Field(gt=0, le=600, description="time to receive the body of a request")] = 5.0
    keep_alive_s: Annotated[
        float, Field(gt=0, le=3600, description="how long a connection may wait for its next request")
    ] = 75.0
    stop_delay_s: Annotated[
        float,
        Field(
            ge=0,
            le=600,
            description="how long the gateway serves on after SIGTERM, while /readyz is 503: longer than a load "
            "balancer needs to notice",
        ),
    ] = 0.0
    drain_s: Annotated[
        float, Field(ge=0, le=600, description="how long a stop waits for requests that are being served")
    ] = 5.0

    http_host: str = Field("127.0.0.1", description="address that the HTTP server of metrics and probes listens on")
    http_port: Annotated[int, Field(ge=0, le=65535, description="/metrics, /healthz, /readyz; 0: any free port")] = 0

    @property
    def is_local(self) -> bool:
        """Whether only programs on this machine can reach the API."""
        return is_loopback(self.listen_host)
