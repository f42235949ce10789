"""Texts of others, for a terminal."""

from __future__ import annotations


def printable(text: str, but: str = "") -> str:
    """The text with escapes for what would move a terminal's cursor or change its colours. `but`: characters that are
    kept, such as line breaks.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in but else each.encode("unicode_escape").decode() for each in text
    )
