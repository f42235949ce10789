"""How a prefix is cut into chunks. Pure decisions over predictions; docs/scheduling.md has the rules.

A chunk is uninterrupted: between two chunks any more urgent work may run. It ends at a page boundary, or with the
prefix. Each further chunk costs the fixed part of `relaygr.admission.latency` again and reads the K,V before it, so a
prediction for a prefix counts its chunks.
"""

from __future__ import annotations

from dataclasses import replace

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.record import record

LEAST_CHUNK_CUTS = 5
"""A chunk takes at least this many times what its cut costs, if no waiting request needs the time."""
MOST_COUNTED = 4
"""Waiting prefixes beyond this number lengthen chunks no more."""
PREDICTION_MARGIN = 1.25
"""A chunk may take this many times its predicted time without delaying a request that waits."""
DELAYED_SHARE = 0.1
"""A chunk longer than the shortest meets an unannounced request with at most this probability."""


@record(frozen=True, slots=True)
class Chunking:
    """The bounds of one chunk: predicted time, tokens, whole pages. `in_one_chunk`: the model allows no cut."""

    chunk_us: float
    max_tokens: int
    page_tokens: int
    in_one_chunk: bool = False

    def within(self, chunk_us: float) -> Chunking:
        """The same with another bound of the time."""
        return Chunking(chunk_us, self.max_tokens, self.page_tokens, self.in_one_chunk)

    def end(self, done_tokens: int, total_tokens: int, latency: LatencyModel) -> int:
        """The end of the next chunk: the last page boundary that is predicted to be reached within the bounds.

        A chunk has at least one page, so that every chunk makes progress.
        """
        if self.in_one_chunk:
            return total_tokens
        most = min(self.max_tokens, total_tokens - done_tokens)
        fitting = latency.longest_append(done_tokens, self.chunk_us, most) or 0
        if done_tokens + fitting == total_tokens:
            return total_tokens
        # A fitting chunk that ends in its first page ends with that page all the same.
        page = max(done_tokens // self.page_tokens + 1, (done_tokens + fitting) // self.page_tokens)
        return min(page * self.page_tokens, total_tokens)

    def duration_us(self, done_tokens: int, total_tokens: int, latency: LatencyModel) -> float:
        """Predicted time of all chunks that are left of a prefix; 0 if none is left."""
        spent_us = 0.0
        while done_tokens < total_tokens:
            end = self.end(done_tokens, total_tokens, latency)
            spent_us += latency.append_us(done_tokens, end - done_tokens)
            done_tokens = end
        return spent_us

    def for_whole_prefixes(self, latency: LatencyModel, longest_tokens: int) -> LatencyModel:
        """A latency model for predictions without chunks: its T_pre is the time of all chunks of a prefix.

        It is exact for a prefix of `longest_tokens`, and approximate for shorter ones.
        """
        c = latency.coefficients
        in_one_us = latency.pre_us(longest_tokens) - c.b0
        if in_one_us <= 0:
            return latency
        factor = (self.duration_us(0, longest_tokens, latency) - c.b0) / in_one_us
        return LatencyModel(replace(c, b1=c.b1 * factor, b2=c.b2 * factor))


def chunk_bound_us(
    shortest_us: float,
    longest_us: float,
    cut_us: float,
    slack_us: float,
    arrival_us: float,
    others_us: float,
    prefixes: int = 1,
) -> float:
    """The longest time of the next chunk, between `shortest_us` and `longest_us`.

    `cut_us`: what a cut costs. A chunk has at least a few times that, unless a waiting request would lose time by it.
    `prefixes`: this one, and those that wait for pre-infer. The more there are, the longer is a chunk: under load the
    cost of cuts makes more requests late than waiting for a chunk does.
    `slack_us`: time until the most urgent waiting request has to start. `arrival_us`: time until an announced request
    may arrive. `others_us`: mean time between requests that nobody announces. Each is infinite if there is none.
    """
    waiting_us = slack_us / PREDICTION_MARGIN
    leaves_us = min(waiting_us, arrival_us, others_us * DELAYED_SHARE)
    worthwhile_us = min(LEAST_CHUNK_CUTS * min(prefixes, MOST_COUNTED) * cut_us, waiting_us)
    return min(max(leaves_us, worthwhile_us, shortest_us), max(longest_us, shortest_us))
