"""What is measured of a request: its Python calls, by `sys.setprofile`, or its CPU time."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

import relaygr.bench

_BENCHMARKS = str(Path(next(iter(relaygr.bench.__path__))))
_PRODUCT = "relaygr."
_MODEL = "relaygr.worker.model."


class Probe(Protocol):
    """Measures what the calling thread does between `begin` and `end`."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class CpuTimes:
    """The CPU time of the calling thread from each `begin` to its `end`."""

    def __init__(self) -> None:
        self.took_us: list[float] = []
        self._began_ns = 0

    def begin(self) -> None:
        self._began_ns = time.thread_time_ns()

    def end(self) -> None:
        self.took_us.append((time.thread_time_ns() - self._began_ns) / 1e3)


class Trace:
    """Calls of product code on the thread of `begin`: the namespace `relaygr` without benchmarks and without the model.

    The model and its calls are left out, because a null engine takes its place. Only the functions `within` and their
    calls are counted. A *move* is a call into another file than that of the call before.
    """

    def __init__(self, within: Iterable[Callable[..., Any]]) -> None:
        self._within = {function.__code__ for function in within}
        self._inside: FrameType | None = None
        self._in_model: FrameType | None = None
        self._file = ""
        self.by_function: Counter[tuple[str, str]] = Counter()
        """Calls by file and qualified name."""
        self.by_move: Counter[tuple[str, str]] = Counter()
        """Moves by the file before and the file after."""

    @property
    def calls(self) -> int:
        return self.by_function.total()

    @property
    def files(self) -> int:
        return len({file for file, _ in self.by_function})

    @property
    def classes(self) -> int:
        """Classes whose methods were called."""
        names = ((file, name.split(".<locals>")[0].rpartition(".")[0]) for file, name in self.by_function)
        return len({(file, owner) for file, owner in names if owner})

    @property
    def moves(self) -> int:
        return self.by_move.total()

    def begin(self) -> None:
        """Counts on the calling thread, until `end`."""
        sys.setprofile(self._on_event)

    def end(self) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            if self._inside is None and frame.f_code in self._within:
                self._inside = frame
            if self._inside is None or self._in_model is not None:
                return
            module = str(frame.f_globals.get("__name__", ""))
            if module.startswith(_MODEL):
                self._in_model = frame
            elif module.startswith(_PRODUCT) and not frame.f_code.co_filename.startswith(("<", _BENCHMARKS)):
                # Methods that dataclasses generate have no file.
                self._count(frame.f_code)
        elif event == "return" and frame is self._in_model:
            self._in_model = None
        elif event == "return" and frame is self._inside:
            self._inside = None

    def _count(self, code: CodeType) -> None:
        if code.co_filename != self._file:
            self.by_move[self._file, code.co_filename] += 1
            self._file = code.co_filename
        self.by_function[code.co_filename, code.co_qualname] += 1
