"""What a model allows, found by experiment: the rules that decide which K,V may be used again (docs/rankers.md).

Each rule compares two ways to the same scores on the same engine, on histories from short to long. The measure of a
difference is the spread of the scores, as in `score_error`. A rule that was not broken by what was tried may still be
broken elsewhere: more histories and more time find more.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.model.interface import Engine, PrefixChunk, RankInputs
from relaygr.worker.score_error import SampleUser, Scores, scales, unknown_inputs, unknown_user, with_unknown

TOLERANCE = 1e-4
"""A share of the spread of scores. Sums in float32 in another order differ by some 1e-6."""
_LENGTHS = (1, 2, 3, 5, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SUFFIX = 16
_EARLIER_MS = 3 * 3_600_000
_FIRST_USERS = 4
_ALWAYS_TRIED = 8
"""Behaviours: up to these, each rule is tried, whatever the time."""


class Rule(enum.Enum):
    """What may hold for a model, as a sentence, and what it costs if it does not."""

    FINITE = "scores are finite numbers", "the model is refused"
    DETERMINISTIC = "the same request has the same scores", "the model is refused"
    HISTORY = "scores depend on the history", "nothing is gained: no score reads what the relay computes"
    CHUNKS = "a prefix may be computed in chunks", "pre-infer computes each prefix in one pass, which delays requests"
    GROWS = "a history that grew keeps its K,V", "no append and no suffix: only an unchanged history is a hit"
    SUFFIX = "a behaviour counts the same in prefix and suffix", "no append and no suffix, as for a history that grew"
    QUERY_TIME = "K,V do not depend on the time of the request", "a prefix serves one impression, not the next visit"
    CANDIDATES = "a candidate's score does not depend on the others", "no cost here: all candidates go in one request"
    BATCH = "a request's scores do not depend on others in its pass", "the model is refused"
    UNCHANGED = "the model is the same after all of this", "the model is refused"

    @property
    def text(self) -> str:
        return str(self.value[0])

    @property
    def cost(self) -> str:
        return str(self.value[1])


NEEDED = (Rule.FINITE, Rule.DETERMINISTIC, Rule.BATCH, Rule.UNCHANGED)
"""Without these no K,V can be trusted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one rule, of `tried` comparisons."""

    rule: Rule
    tried: int
    error: float = 0.0
    """The largest difference, as a share of the spread of scores."""
    smallest: str | None = None
    """The smallest case that breaks the rule; None if none did."""
    longest: int = 0
    """Behaviours of the longest history that was tried."""

    @property
    def holds(self) -> bool:
        return self.tried > 0 and self.smallest is None

    @property
    def case(self) -> str:
        """How the smallest case breaks the rule, as the end of a sentence."""
        if self.error != self.error:
            return f"with {self.smallest} scores are not finite numbers"
        return f"with {self.smallest} scores differ by {self.error:.2%} of their spread"


def rules_found(findings: Sequence[Finding]) -> PrefixRules:
    """The rules that a worker may use. A model that takes no suffix cannot break the rule of it."""
    holds = {each.rule for each in findings if each.holds}
    is_suffix_broken = Rule.SUFFIX in {each.rule for each in findings} - holds
    return PrefixRules(
        grows=Rule.GROWS in holds and not is_suffix_broken,
        chunks=Rule.CHUNKS in holds,
        uses_query_time=Rule.QUERY_TIME not in holds,
    )


@dataclass(frozen=True, slots=True)
class _Way:
    """One of the ways to the scores of a user's first `behaviours` behaviours."""

    behaviours: int
    """Of the prefix and the suffix together."""
    suffix: int = 0
    grown_from: int = 0
    """Behaviours of a prefix that is computed first, as one that ends there. Then the rest is appended."""
    chunk_tokens: int | None = None
    """The most tokens of a pass. None: all in one pass."""
    computed_earlier_ms: int = 0
    """The prefix is computed for a request that is so much earlier."""


class ModelCheck:
    """Compares scores of one engine. Binds it to a new arena, so the caller must bind it again."""

    def __init__(
        self,
        engine: Engine,
        users: Sequence[SampleUser],
        candidates: NDArray[np.int64],
        seconds: float,
        tolerance: float = TOLERANCE,
    ) -> None:
        """`users`: each length takes their oldest behaviours. `seconds`: no rule gets more than its part, but each is
        tried with a few short histories. Raises ValueError without users or candidates.
        """
        if not users or not candidates.size:
            raise ValueError("nothing to check: no users, or no candidates")
        self._engine = engine
        # The first one has all lengths.
        self._users = sorted(users, key=lambda user: -len(user.behaviours))
        self._candidates = candidates
        self._tolerance = tolerance
        self._part_s = seconds / len(Rule)
        self._random = np.random.default_rng(0)
        longest = min(len(self._users[0].behaviours), engine.limits.max_prefix_behaviours)
        self._lengths = [length for length in _LENGTHS if length < longest] + [longest]
        tokens = engine.layout.tokens(longest)
        bind_own_arena(engine, 2, tokens)
        pages = engine.geometry.pages_for(tokens)
        self._pages = [np.arange(pages * each, pages * (each + 1), dtype=np.int32) for each in range(2)]

    def run(self) -> Iterator[Finding]:
        """The findings, one by one. What the model raises passes through."""
        claimed = self._engine.rules
        longest_suffix = min(_SUFFIX, self._engine.limits.max_suffix_behaviours)
        before = [self._scores(user, _Way(length)) for user, length in self._first_cases()]
        yield self._finite_scores()
        yield self._finding(Rule.DETERMINISTIC, self._against(_Way))
        yield self._reads_histories()
        yield self._finding(Rule.CANDIDATES, self._fewer_candidates)
        yield self._finding(Rule.BATCH, self._together)
        if claimed.chunks:
            yield self._finding(
                Rule.CHUNKS, self._against(lambda n: _Way(n, chunk_tokens=int(self._random.integers(1, 1 + n))))
            )
        if claimed.grows:
            yield self._finding(Rule.GROWS, self._against(lambda n: _Way(n, grown_from=max(1, n - 1 - n // 4))))
        if claimed.grows and longest_suffix:
            yield self._finding(Rule.SUFFIX, self._against(lambda n: _Way(n, suffix=min(longest_suffix, n // 2 + 1))))
        yield self._finding(Rule.QUERY_TIME, self._against(lambda n: _Way(n, computed_earlier_ms=_EARLIER_MS)))
        after = [self._scores(user, _Way(length)) for user, length in self._first_cases()]
        errors = [difference(one, other) for one, other in zip(before, after, strict=True)]
        worst = max(errors, key=lambda error: (math.isnan(error), error))
        broken = None if worst <= self._tolerance else "the first histories again"
        yield Finding(Rule.UNCHANGED, len(errors), worst, broken, self._lengths[0])

    def _first_cases(self) -> list[tuple[SampleUser, int]]:
        return [(user, min(self._lengths[0], len(user.behaviours))) for user in self._users[:_FIRST_USERS]]

    def _finding(self, rule: Rule, compare: Callable[[int, int], float]) -> Finding:
        """Compares all cases, until one breaks the rule."""
        tried, worst, longest = 0, 0.0, 0
        for index, length in self._cases():
            error = compare(index, length)
            tried, worst, longest = tried + 1, max(worst, error), max(longest, length)
            # One that is not a number is a difference.
            if not error <= self._tolerance:
                return Finding(rule, tried, error, f"{length} behaviour{'s' * (length > 1)}", longest)
        return Finding(rule, tried, worst, longest=longest)

    def _cases(self) -> Iterator[tuple[int, int]]:
        """The users, by their places, and all lengths of each, until the time of a rule is over."""
        until_s = time.monotonic() + self._part_s
        for index, user in enumerate(self._users):
            for length in self._lengths:
                if length > len(user.behaviours):
                    break
                if (index or length > _ALWAYS_TRIED) and time.monotonic() > until_s:
                    return
                yield index, length

    def _reads_histories(self) -> Finding:
        """Unlike other rules, this one holds if one case shows it: other items in a history change a score."""
        tried, worst, longest = 0, 0.0, 0
        for index, length in self._cases():
            user, way = self._users[index], _Way(length)
            own = user.behaviours[:length]
            other = Behaviours(np.resize(self._candidates, length), own.actions, own.timestamps_ms)
            error = difference(self._scores(user, way), self._scores(SampleUser(user.features, other), way))
            tried, worst, longest = tried + 1, max(worst, error), max(longest, length)
            if not error <= self._tolerance:
                return Finding(Rule.HISTORY, tried, error, longest=longest)
        return Finding(Rule.HISTORY, tried, worst, "every history", longest)

    def _finite_scores(self) -> Finding:
        """Also with items and actions that the model does not know: a catalogue has new ones each day."""
        user = unknown_user(self._lengths[-1])
        with unknown_inputs():
            request = self._request(user, _Way(len(user.behaviours)), with_unknown(self._candidates), 0)
            scores = self._engine.rank([request])[0].scores
        if not np.isfinite(scores).all():
            return Finding(Rule.FINITE, 1, float("nan"), "unknown items and actions", len(user.behaviours))
        return self._finding(Rule.FINITE, self._finite)

    def _finite(self, index: int, length: int) -> float:
        return 0.0 if np.isfinite(self._scores(self._users[index], _Way(length))).all() else float("nan")

    def _against(self, way: Callable[[int], _Way]) -> Callable[[int, int], float]:
        """Compares this way with the plain one: the whole history as a prefix, in one pass."""

        def compare(index: int, length: int) -> float:
            user = self._users[index]
            return difference(self._scores(user, _Way(length)), self._scores(user, way(length)))

        return compare

    def _fewer_candidates(self, index: int, length: int) -> float:
        """Every third candidate alone, in the other order."""
        user = self._users[index]
        request = self._request(user, _Way(length), self._candidates, 0)
        fewer = self._request(user, _Way(length), self._candidates[::-3], 0, computes=False)
        all_scores, of_fewer = (self._engine.rank([each])[0].scores for each in (request, fewer))
        return difference(all_scores[::-3], of_fewer, scales_of=all_scores)

    def _together(self, index: int, length: int) -> float:
        """In one pass with another user."""
        user, other = self._users[index], self._users[(index + 1) % len(self._users)]
        alone = self._request(user, _Way(length), self._candidates, 0)
        beside = self._request(other, _Way(min(length, len(other.behaviours))), self._candidates, 1)
        scores = self._engine.rank([alone])[0].scores
        return difference(scores, self._engine.rank([beside, alone])[1].scores)

    def _scores(self, user: SampleUser, way: _Way) -> Scores:
        return self._engine.rank([self._request(user, way, self._candidates, 0)])[0].scores

    def _request(
        self, user: SampleUser, way: _Way, candidates: NDArray[np.int64], place: int, *, computes: bool = True
    ) -> RankInputs:
        """The request, after its prefix was computed into the pages of the place."""
        engine, pages = self._engine, self._pages[place]
        history = user.behaviours[: way.behaviours]
        count = way.behaviours - way.suffix
        prefix, suffix = history[:count], history[count:]
        query_time_ms = int(history.timestamps_ms[-1]) + 1
        features = engine.shown_features(user.features, way.behaviours, int(candidates.size))
        done = 0
        for length in (way.grown_from, count) if way.grown_from else (count,):
            inputs = engine.prefix_inputs(features, prefix[:length], query_time_ms - way.computed_earlier_ms)
            while computes and done < inputs.tokens:
                end = min(done + (way.chunk_tokens or inputs.tokens), inputs.tokens)
                engine.pre_infer(PrefixChunk(inputs, done, end, pages))
                done = end
        tokens = engine.layout.tokens(count)
        return engine.rank_inputs(tokens, pages, suffix, candidates, query_time_ms, prefix.timestamps_ms)


def difference(expected: Scores, found: Scores, scales_of: Scores | None = None) -> float:
    """The largest difference of scores [candidates, tasks], as a share of the spread of `scales_of` or `expected`."""
    measure = scales((expected if scales_of is None else scales_of).astype(np.float64)[None])[0]
    return float((np.abs(expected.astype(np.float64) - found) / measure).max())
