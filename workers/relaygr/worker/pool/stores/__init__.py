"""Stores of the pool. The scheme of `worker.pool.store` chooses one from the table `STORES`.

    contract    what a store and its module have
    mooncake    Mooncake Store

A new store is one module here that keeps the contract, and an entry of the table.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, urlsplit

from relaygr.worker.pool.stores import mooncake
from relaygr.worker.pool.stores.contract import StoreModule, StoreUrl

STORES: Final[dict[str, StoreModule]] = {"mooncake": mooncake}


def forms() -> str:
    """The forms of all URLs."""
    return " or ".join(store.FORM for store in STORES.values())


def store_url(text: str) -> StoreUrl:
    """Takes the URL of a store apart. Raises ValueError, with what to write instead, if it names none or is wrong."""
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ValueError(f"{error}: write {forms()}") from None
    if parts.scheme not in STORES or "://" not in text:
        found = f"no store has the scheme `{parts.scheme}`" if "://" in text else "it has no scheme"
        raise ValueError(f"{found}: write {forms()}")
    store = STORES[parts.scheme]
    if "@" in parts.netloc or parts.fragment:
        raise ValueError(f"the URL of a store is shown, so it has no user, password or fragment: write {store.FORM}")
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ValueError(f"what follows the `?` must be NAME=VALUE&...: write {store.FORM}") from None
    if len(dict(pairs)) != len(pairs):
        raise ValueError(f"an option is given twice: write {store.FORM}")
    url = StoreUrl(text, parts.scheme, parts.netloc, parts.path, dict(pairs))
    store.check(url)
    return url
