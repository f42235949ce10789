"""Settings of the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field, field_validator, model_validator

from relaygr.runtime.settings import Section
from relaygr.worker.pool.stores import forms, store_url
from relaygr.worker.pool.stores.contract import StoreUrl
from relaygr.worker.pool.stores.mooncake import url_text


class PoolSettings(Section):
    """A third tier of prefixes, in memory that the workers share (docs/pool.md)."""

    store: str | None = Field(
        None,
        description=f"URL of the store: {forms()}; none: no pool. Needs `relaygr[pool]` and a DRAM tier",
    )
    address: str | None = Field(
        None, description="earlier form of `store`, read for one more release: HOST:PORT of the Mooncake master"
    )
    protocol: str | None = Field(None, description="earlier form of the option in `store`, with `address` only")
    prefix: str = Field(
        "relaygr",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="beginning of all keys: workers with the same prefix share their prefixes",
    )
    secret_file: Path | None = Field(
        None,
        description="file with at least 16 bytes, the same on all workers, under which users' ids are hashed and "
        "objects are sealed; must be set with a store",
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

    @property
    def url(self) -> StoreUrl | None:
        """The store's, in either form; None without a pool."""
        text = self.store if self.address is None else url_text(self.address, self.protocol)
        return None if text is None else store_url(text)

    @field_validator("store")
    @classmethod
    def _names_a_store(cls, text: str | None) -> str | None:
        if text is not None:
            store_url(text)
        return text

    @model_validator(mode="after")
    def _one_form_and_a_secret(self) -> PoolSettings:
        if self.store is not None and (self.address is not None or self.protocol is not None):
            raise ValueError("address and protocol are the earlier form of store: remove them, and keep store")
        if self.url is not None and self.secret_file is None:
            raise ValueError("a store needs a secret_file: without a secret, keys would tell who the users are")
        return self
