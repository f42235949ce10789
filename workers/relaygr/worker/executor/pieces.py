"""Pieces of prefixes on the device: one at a time, each without interruption.

`run` gives the device a piece. An accelerator works on it by itself, and the host goes on with look-ups; `settle` waits
for it before the next piece of work: only then it is written, and its time known. On the CPU a piece is done when
its call returns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from relaygr.admission.latency import LatencyModel, Stage
from relaygr.worker.device import Event
from relaygr.worker.executor.context import Shared
from relaygr.worker.executor.plan import Chunking
from relaygr.worker.executor.work import PrefixWork
from relaygr.worker.model.interface import PrefixChunk

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of `prefix` from what is done up to `end_tokens`; its pages are taken."""

    prefix: PrefixWork
    end_tokens: int

    @property
    def chunk(self) -> PrefixChunk:
        return PrefixChunk(self.prefix.inputs, self.prefix.done_tokens, self.end_tokens, self.prefix.pages)

    def predicted_us(self, latency: LatencyModel) -> float:
        """What it takes by itself."""
        return latency.append_us(self.prefix.done_tokens, self.end_tokens - self.prefix.done_tokens)


@dataclass(frozen=True, slots=True)
class _Running:
    """A piece that the device was given, and what completes with it."""

    piece: Piece
    started_us: int
    event: Event


class Prefixes(Protocol):
    """What becomes of a prefix before and after a piece (`relaygr.worker.executor.prefixes`)."""

    def begin(self, prefix: PrefixWork, now_us: int) -> bool: ...
    def advance(self, prefix: PrefixWork, now_us: int) -> None: ...
    def fail(self, prefix: PrefixWork, error: Exception) -> None: ...


class PieceFlow:
    """Belongs to the device thread."""

    def __init__(self, shared: Shared, prefixes: Prefixes) -> None:
        self._shared = shared
        self._prefixes = prefixes
        self._running: _Running | None = None

    def run(self, prefix: PrefixWork, now_us: int) -> None:
        """Gives the device the next piece of the prefix, if it has its pages and is still wanted."""
        device = self._shared.engine.device
        try:
            piece = self._next(prefix, now_us, self._shared.chunking)
            if piece is None:
                return
            self._shared.engine.pre_infer(piece.chunk)
            self._running = _Running(piece, now_us, device.current_stream().record())
        except Exception as error:
            # One prefix may not take the process, and so everybody else's requests, with it.
            device.settle()
            return self._failed(prefix, error)
        if device.is_cpu:
            self.settle()

    def settle(self) -> None:
        """Waits for the piece that the device has, if it has one, and takes account of it."""
        running, self._running = self._running, None
        if running is None:
            return
        piece = running.piece
        # Who comes late cannot tell when it ended.
        is_timed = self._shared.engine.device.is_cpu or not running.event.done()
        try:
            running.event.wait()
        except Exception as error:
            return self._failed(piece.prefix, error)
        ended_us = self._shared.now_us()
        duration_us = ended_us - running.started_us
        if is_timed:
            calibrated = self._shared.corrector.calibrated
            self._shared.corrector.observe(Stage.PRE, piece.predicted_us(calibrated), duration_us)
        self.computed(piece, duration_us, ended_us)

    def within(self, slack_us: float, now_us: int) -> Piece | None:
        """The next piece of the most urgent pre-infer work that is predicted to fit, its pages taken."""
        prefix = self._shared.scheduler.preinfer.peek()
        if not isinstance(prefix, PrefixWork):
            return None
        latency = self._shared.latency
        chunking = replace(self._shared.chunking, chunk_us=min(self._shared.chunk_us, slack_us))
        first = Piece(prefix, chunking.end(prefix.done_tokens, prefix.total_tokens, latency))
        if first.predicted_us(latency) > slack_us:
            return None
        try:
            piece = self._next(prefix, now_us, chunking)
        except Exception as error:
            self._failed(prefix, error)
            return None
        return piece if piece is not None and piece.predicted_us(latency) <= slack_us else None

    def computed(self, piece: Piece, duration_us: int, now_us: int) -> None:
        """The piece is written, in so much of the device's time."""
        prefix = piece.prefix
        self._shared.charge(prefix.work_class, duration_us, now_us)
        for waiter in prefix.waiters:
            waiter.pre_infer_us += duration_us
        prefix.done_tokens = piece.end_tokens
        self._prefixes.advance(prefix, now_us)

    def _next(self, prefix: PrefixWork, now_us: int, chunking: Chunking) -> Piece | None:
        if not self._prefixes.begin(prefix, now_us):
            return None
        return Piece(prefix, chunking.end(prefix.done_tokens, prefix.total_tokens, self._shared.latency))

    def _failed(self, prefix: PrefixWork, error: Exception) -> None:
        log.warning("pre-infer failed", tokens=prefix.total_tokens, error=repr(error))
        self._prefixes.fail(prefix, error)
