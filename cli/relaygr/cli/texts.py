"""Parses option values for several commands."""

from __future__ import annotations

from relaygr.runtime.errors import RelayError


def parse_task(text: str) -> dict[str, str]:
    """Parses NAME[:binary|:regression]."""
    name, _, kind = text.partition(":")
    return {"name": name, "kind": kind or "binary"}


def parse_pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    """Parses values of the form NAME=VALUE. Raises RelayError for another form."""
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise RelayError(f"{option} {text}: write NAME=VALUE.")
        pairs[name] = value
    return pairs
