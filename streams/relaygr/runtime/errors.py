"""Errors whose text is written for the person at the keyboard."""

from __future__ import annotations


class RelayError(Exception):
    """Something that the user can mend. The text is one or two sentences: what is wrong, and what to do.

    The command line prints it without a traceback and exits with 1.
    """
