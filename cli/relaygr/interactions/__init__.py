"""Reads interaction logs in their common layouts into one history per user.

`recognise` says which layout a file has, by its content; `read_interactions` reads all of it.
"""

from relaygr.interactions.layouts import Layout, LayoutKind, recognise
from relaygr.interactions.reading import BadLine, Interactions, Limits, ReadReport, read_interactions

__all__ = [
    "BadLine",
    "Interactions",
    "Layout",
    "LayoutKind",
    "Limits",
    "ReadReport",
    "read_interactions",
    "recognise",
]
