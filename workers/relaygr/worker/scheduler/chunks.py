"""How a prefix is cut into the pieces that the device computes it in, and what the pieces take together.

A piece is uninterrupted: between two of them anything more urgent may run. It ends at a page boundary, or with
the prefix. Each further piece costs the fixed part b0 of `relaygr.admission.latency` again, so whoever predicts the
time of a prefix counts its pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from relaygr.admission.latency import LatencyModel


@dataclass(frozen=True, slots=True)
class Chunking:
    """The bounds of one piece: predicted time, tokens, whole pages. `in_one_piece`: the model allows no cut."""

    chunk_us: float
    max_tokens: int
    page_tokens: int
    in_one_piece: bool = False

    def end(self, done_tokens: int, total_tokens: int, latency: LatencyModel) -> int:
        """Where the next piece ends: the last page boundary predicted to be reached within its bounds.

        At least one page is taken, so that there is progress whatever the prediction.
        """
        if self.in_one_piece:
            return total_tokens
        most = min(self.max_tokens, total_tokens - done_tokens)
        fitting = latency.longest_append(done_tokens, self.chunk_us, most) or 0
        if done_tokens + fitting == total_tokens:
            return total_tokens
        next_boundary = (done_tokens // self.page_tokens + 1) * self.page_tokens
        last_boundary = (done_tokens + fitting) // self.page_tokens * self.page_tokens
        return min(max(next_boundary, last_boundary), total_tokens)

    def duration_us(self, done_tokens: int, total_tokens: int, latency: LatencyModel) -> float:
        """Predicted time of all pieces that are left of a prefix; 0 if none is."""
        spent_us = 0.0
        while done_tokens < total_tokens:
            end = self.end(done_tokens, total_tokens, latency)
            spent_us += latency.append_us(done_tokens, end - done_tokens)
            done_tokens = end
        return spent_us

    def for_whole_prefixes(self, latency: LatencyModel, longest_tokens: int) -> LatencyModel:
        """The model for who knows nothing of pieces: its T_pre is what they take together.

        Exactly so for a prefix of `longest_tokens`, and about so for shorter ones.
        """
        c = latency.coefficients
        in_one_us = latency.pre_us(longest_tokens) - c.b0
        if in_one_us <= 0:
            return latency
        factor = (self.duration_us(0, longest_tokens, latency) - c.b0) / in_one_us
        return LatencyModel(replace(c, b1=c.b1 * factor, b2=c.b2 * factor))
