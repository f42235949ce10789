"""The latency model: predicted device times of a worker, for the decisions of trigger, scheduler and cache.

    T_full(n, m)    = a0 + a1 (n+m) + a2 (n+m)²       full inference
    T_pre(n)        = b0 + b1 n + b2 n²               pre-infer of a whole prefix
    T_append(n, k)  = b0 + b1 k + b2 k (2n+k) + b3 n  k new tokens on n cached ones; T_append(0, k) = T_pre(k)
    T_hit(n, m)     = c0 + c1 m + c2 m (n+m) + c3 n   ranking on a cached prefix
    T_batch         = sum of T_hit - (requests-1) s   one ranking pass of several requests
    T_reload(bytes) = d0 + d1 bytes                   a copy from DRAM to HBM

n: prefix tokens, m: suffix tokens + candidates, k: new prefix tokens; all times in µs of device time.
The linear terms are the projections, the quadratic terms the attention: each of k new rows attends to n + k/2 keys on
average (hence k (2n+k) / 2), each of the m rows of a ranking to n + m keys. b3 and c3 are the cost of reading the K,V
of the cached tokens, which does not depend on the number of rows. Splitting a prefix into appends costs b0 and this
reading for each additional chunk: T_append(0, x) + T_append(x, y) = T_append(0, x+y) + b0 + b3 x. The requests of a
batch share the calls and the reading of the weights: each but the first saves s, which does not depend on its length,
so batches pay for short work. Each worker measures s, and its status does not carry s. Without a measurement s is c0.
Background: RelayGR, arXiv 2601.01712 (at-risk test and pre-infer budget), and `docs/trigger.md`.

Every coefficient is at least 0, so each time is monotone in each of its arguments: `LatencyModel` refuses others.
`relaygr.admission.fit` fits a model to measurements; `relaygr.admission.corrector` adapts it to a device whose speed
drifts.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from relaygr.schemas.messages import LENGTH_BUCKETS, LatencyCoefficients
from relaygr.schemas.record import record

LONG_WAIT_PART: Final = 0.5
"""The part of a request's time, from its receipt to its deadline, above which its wait in the queue is a long one.

A wait is in proportion to 1 / (1 - load). It doubles when half of the device's free time is given away, so a queue that
takes half of the time now takes all of it after a few per cent more load: at a load of 0.90, after 0.05 more.
"""


def is_long_wait(queue_us: int, time_us: int) -> bool:
    """Whether a wait in the queue is long for a request with so much time from its receipt to its deadline."""
    return queue_us > LONG_WAIT_PART * time_us


def length_bucket(prefix_tokens: int) -> int:
    """The bucket of prefixes of this length: the bit length of their number of tokens."""
    bits = prefix_tokens.bit_length()
    return bits if bits < LENGTH_BUCKETS else LENGTH_BUCKETS - 1


def fewest_tokens(bucket: int) -> str:
    """The label of a bucket in metrics: its fewest prefix tokens."""
    return str(1 << (bucket - 1) if bucket else 0)


TAIL_PART: Final = 1 / 2
"""A tail stays in the suffix while it lengthens a ranking pass by at most this part of the fixed cost of an append."""


class Stage(enum.StrEnum):
    """A kind of device work with its own coefficients. Appends and pre-infer share PRE."""

    FULL = "full"
    PRE = "pre"
    HIT = "hit"
    RELOAD = "reload"


_STAGES: Final = tuple(Stage)
"""Iterating the class takes longer, and every ranking request scales a model."""


@record(frozen=True, slots=True)
class LatencyModel:
    """Predicted device times in µs. Raises ValueError for a coefficient that is negative or not finite."""

    coefficients: LatencyCoefficients
    shared_us: float | None = None
    """s: what each request of a batch but the first saves; None: not measured."""

    def __post_init__(self) -> None:
        if self.shared_us is not None and not (math.isfinite(self.shared_us) and self.shared_us >= 0):
            raise ValueError(f"shared_us is {self.shared_us}; it must be finite and at least 0")
        values = self._values()
        # A sum is finite only if every value is: one test for all of them, since each observation makes a model.
        if min(values) >= 0 and math.isfinite(sum(values)):
            return
        for each in fields(self.coefficients):
            value = getattr(self.coefficients, each.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"latency coefficient {each.name} is {value}; it must be finite and at least 0")

    def _values(self) -> tuple[float, ...]:
        c = self.coefficients
        return (c.a0, c.a1, c.a2, c.b0, c.b1, c.b2, c.c0, c.c1, c.c2, c.d0, c.d1, c.c3, c.b3)

    def full_us(self, prefix_tokens: int, scored_tokens: int) -> float:
        """Full inference over prefix, suffix and candidates."""
        c = self.coefficients
        tokens = prefix_tokens + scored_tokens
        return c.a0 + c.a1 * tokens + c.a2 * tokens * tokens

    def pre_us(self, prefix_tokens: int) -> float:
        """Pre-infer of a whole prefix in one chunk."""
        return self.append_us(0, prefix_tokens)

    def append_us(self, cached_tokens: int, new_tokens: int) -> float:
        """Pre-infer of `new_tokens` after `cached_tokens` whose K,V is cached."""
        c = self.coefficients
        attended = c.b2 * new_tokens * (2 * cached_tokens + new_tokens)
        return c.b0 + c.b1 * new_tokens + attended + c.b3 * cached_tokens

    def cut_us(self, cached_tokens: int) -> float:
        """What it costs to cut a prefix after `cached_tokens`: a further chunk, which reads their K,V again."""
        return self.coefficients.b0 + self.coefficients.b3 * cached_tokens

    def hit_us(self, prefix_tokens: int, scored_tokens: int) -> float:
        """Ranking on a prefix that is ready in HBM."""
        c = self.coefficients
        attended = c.c2 * scored_tokens * (prefix_tokens + scored_tokens)
        return c.c0 + c.c1 * scored_tokens + attended + c.c3 * prefix_tokens

    def tail_stays_in_suffix(self, cached_tokens: int, tail_tokens: int, scored_tokens: int) -> bool:
        """Whether a tail that is not cached is better ranked with the suffix, now and at later visits, than appended.

        Each visit until the append ranks the tail again, and the tail grows. To wait saves the fixed cost of an append,
        since a longer one takes the place of two: its cost by tokens is paid in any case. If the tail grows by equal
        steps, the mean cost of a visit is least if the tail is appended at the m-th visit, where it lengthens a pass by
        2 / (m + 1) of that fixed cost. m is not known here; `TAIL_PART` is right for three.
        """
        prefix_tokens = cached_tokens + tail_tokens
        longer_us = self.hit_us(cached_tokens, scored_tokens + tail_tokens) - self.hit_us(prefix_tokens, scored_tokens)
        return longer_us <= TAIL_PART * self.cut_us(cached_tokens)

    def further_us(self, prefix_tokens: int, scored_tokens: int) -> float:
        """What a request adds to a batch that has at least one other."""
        shared_us = self.coefficients.c0 if self.shared_us is None else self.shared_us
        return max(0.0, self.hit_us(prefix_tokens, scored_tokens) - shared_us)

    def batch_us(self, sizes: Sequence[tuple[int, int]]) -> float:
        """One ranking pass of requests of these sizes: prefix tokens, and suffix tokens + candidates."""
        if not sizes:
            return 0.0
        return self.hit_us(*sizes[0]) + sum(self.further_us(*size) for size in sizes[1:])

    def reload_us(self, size_bytes: int) -> float:
        """A copy of `size_bytes` from DRAM to HBM."""
        return self.coefficients.d0 + self.coefficients.d1 * size_bytes

    def longest_append(self, cached_tokens: int, budget_us: float, limit_tokens: int) -> int | None:
        """The most new tokens, at most `limit_tokens`, that fit into `budget_us`; None if the fixed cost exceeds it."""
        c = self.coefficients
        spare_us = budget_us - (c.b0 + c.b3 * cached_tokens)
        if limit_tokens < 0 or spare_us < 0:
            return None
        # The root of b2 k² + (b1 + 2 b2 n) k = spare, in the numerically stable form. Called for every chunk.
        linear = c.b1 + 2 * c.b2 * cached_tokens
        steepness = linear + math.sqrt(linear * linear + 4 * c.b2 * spare_us)
        tokens = limit_tokens if steepness <= 0 else int(min(2 * spare_us / steepness, limit_tokens))
        # `append_us`, written out, against the rounding of the root.
        b0, b1, b2, read_us, twice = c.b0, c.b1, c.b2, c.b3 * cached_tokens, 2 * cached_tokens
        while tokens < limit_tokens:
            more = tokens + 1
            if b0 + b1 * more + b2 * more * (twice + more) + read_us > budget_us:
                break
            tokens = more
        while tokens > 0 and b0 + b1 * tokens + b2 * tokens * (twice + tokens) + read_us > budget_us:
            tokens -= 1
        return tokens

    def scaled(self, factors: dict[Stage, float], extra_us: dict[Stage, float] | None = None) -> LatencyModel:
        """The model with each stage's times multiplied by its factor (absent: 1), plus its extra (absent: 0)."""
        extra_us = extra_us or {}
        return self.scaled_by(
            [factors.get(stage, 1.0) for stage in _STAGES], [extra_us.get(stage, 0.0) for stage in _STAGES]
        )

    def scaled_by(self, factors: Sequence[float], extra_us: Sequence[float]) -> LatencyModel:
        """`scaled`, with the factor and the extra of each stage in the order of `Stage`."""
        c = self.coefficients
        full, pre, hit, reload = factors
        more_full, more_pre, more_hit, more_reload = extra_us
        return LatencyModel(
            LatencyCoefficients(
                c.a0 * full + more_full, c.a1 * full, c.a2 * full, c.b0 * pre + more_pre, c.b1 * pre, c.b2 * pre,
                c.c0 * hit + more_hit, c.c1 * hit, c.c2 * hit, c.d0 * reload + more_reload, c.d1 * reload, c.c3 * hit,
                c.b3 * pre,
            ),
            # The extra is one of each pass, so the requests of a batch share it, too.
            None if self.shared_us is None else self.shared_us * hit + more_hit,
        )  # fmt: skip
