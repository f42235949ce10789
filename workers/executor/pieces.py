"""One piece of a prefix: what the device computes of it without interruption."""

from __future__ import annotations

from dataclasses import dataclass

from streams.latency import LatencyModel
from workers.device import Event
from workers.model.interface import PrefixChunk
from workers.work import PrefixWork


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of `prefix` from what is done up to `end_tokens`; its pages are taken."""

    prefix: PrefixWork
    end_tokens: int

    @property
    def tokens(self) -> int:
        return self.end_tokens - self.prefix.done_tokens

    @property
    def chunk(self) -> PrefixChunk:
        return PrefixChunk(self.prefix.inputs, self.prefix.done_tokens, self.end_tokens, self.prefix.pages)

    def predicted_us(self, latency: LatencyModel) -> float:
        """What it takes by itself."""
        return latency.append_us(self.prefix.done_tokens, self.tokens)


@dataclass(frozen=True, slots=True)
class RunningPiece:
    """A piece that the device was given, and what completes with it."""

    piece: Piece
    started_us: int
    event: Event
