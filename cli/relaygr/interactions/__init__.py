"""Reads interaction logs in common layouts into one history for each user.

`recognise` finds the layout of a file from its content; `read_interactions` reads the whole file.
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
