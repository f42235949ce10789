"""Settings of the pool."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field, model_validator

from relaygr.runtime.settings import Section


class Transport(enum.StrEnum):
    """How bytes travel between workers and holders."""

    TCP = "tcp"
    RDMA = "rdma"
    ASCEND = "ascend"


class PoolSettings(Section):
    """A third tier of prefixes, in memory that the workers share (docs/pool.md)."""

    address: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]+:[0-9]{1,5}$",
        description="HOST:PORT of the Mooncake master; none: no pool. Needs `relaygr[pool]` and a DRAM tier",
    )
    protocol: Transport = Field(Transport.TCP, description="how bytes travel, the same as for the holders")
    prefix: str = Field(
        "relaygr",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="beginning of all keys: workers with the same prefix share their prefixes",
    )
    secret_file: Path | None = Field(
        None,
        description="file with at least 16 bytes, the same on all workers, under which users' ids are hashed and "
        "objects are sealed; must be set with an address",
    )
    visits: Annotated[
        int,
        Field(ge=1, le=100, description="the visit of a user to a worker from which on the prefix is written"),
    ] = 2
    bytes_per_s: ByteSize = Field(
        ByteSize(32 * 1024 * 1024),
        ge=1024 * 1024,
        description="rate at which a worker writes to the store, and at which its warm-ups read",
    )

    @model_validator(mode="after")
    def _address_needs_a_secret(self) -> PoolSettings:
        if self.address is not None and self.secret_file is None:
            raise ValueError("an address needs a secret_file: without a secret, keys would tell who the users are")
        return self
