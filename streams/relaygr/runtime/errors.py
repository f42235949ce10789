"""Errors that the user can fix."""

from __future__ import annotations


class RelayError(Exception):
    """An error that the user can fix. The text is one or two sentences: what is wrong, and what to do.

    The command line prints the text without a traceback and exits with 1.
    """
