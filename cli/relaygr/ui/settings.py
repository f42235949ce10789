"""Settings of the live page."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from relaygr.runtime.settings import Section, sendable


class UiSettings(Section):
    """The live page of `relaygr ui`."""

    http_host: str = Field(
        "127.0.0.1", description="address that the page is served on; any but a loopback address needs a token"
    )
    http_port: Annotated[int, Field(ge=0, le=65535, description="port of the page; 0: any free port")] = 9310
    token: Annotated[SecretStr | None, AfterValidator(sendable)] = Field(
        None,
        description="what a browser must give to see the page, at least 16 characters; none: nothing on a loopback "
        "address, else a token that is made at the start and printed",
    )
    scrape: tuple[str, ...] = Field(
        (),
        max_length=64,
        description="addresses of /metrics pages of triggers, gateways, supervisors and workers; a name with "
        "several addresses is read at each",
    )
    scrape_workers: bool = Field(True, description="also read the /metrics pages that workers name in their statuses")
    scrape_interval_s: Annotated[float, Field(ge=0.2, le=600, description="time between two reads of a page")] = 2.0
