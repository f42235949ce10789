"""Reads interaction logs in common layouts into one history for each user.

`recognise` finds the layout of a file from its content; `read_interactions` reads the whole file; `joined` makes one
log of several files.
"""

from relaygr.interactions.layouts import Layout, LayoutKind, recognise
from relaygr.interactions.reading import BadLine, Interactions, Limits, ReadReport, joined, read_interactions

__all__ = [
    "BadLine",
    "Interactions",
    "Layout",
    "LayoutKind",
    "Limits",
    "ReadReport",
    "joined",
    "read_interactions",
    "recognise",
]
