"""Reads interaction logs in common layouts into one history for each user.

`recognise` finds the layout of a file from its content; `read_interactions` reads the whole file, or a folder of
Parquet files; `joined` makes one log of several.
"""

from relaygr.interactions.gather import BadLine, Interactions, Limits, ReadReport
from relaygr.interactions.layouts import Layout, LayoutKind
from relaygr.interactions.parquet import require_pyarrow
from relaygr.interactions.reading import joined, log_bytes, read_interactions, recognise

__all__ = [
    "BadLine",
    "Interactions",
    "Layout",
    "LayoutKind",
    "Limits",
    "ReadReport",
    "joined",
    "log_bytes",
    "read_interactions",
    "recognise",
    "require_pyarrow",
]
