"""Searches for changes that make a model agree with the scores of its source.

Round 1 tries each suspect alone on a sample of the requests. If none makes the scores agree, the next round tries all
suspects on top of the best trials, and so on. If the scores of the sample agree and those of other requests do not, the
worst of these requests join the sample, and the search begins again. Two suspects follow from measurements:

* N. Scores depend smoothly on 1/N, so Gauss-Newton steps find a constant. The lengths of the source's batches are tried
  as well, since Meta's and NVIDIA's code divide by them.
* Features that are hidden from short sequences. The requests are scored once with and once without the feature, and
  the lengths of those that agree better without it give the limit.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from relaygr.compare.measures import relative_errors
from relaygr.compare.requests import Request, Scores
from relaygr.compare.running import Scorer
from relaygr.compare.suspects import SUSPECTS
from relaygr.compare.trial import Change, Trial
from relaygr.worker.device import Device
from relaygr.worker.model.checkpoint import Checkpoint
from relaygr.worker.model.options import InputForm

SAMPLE_REQUESTS = 12
_ADDED_REQUESTS = 6
"""The most requests that join the sample at once."""
_BEST_TRIALS = 4
_MOST_ROUNDS = 5
_GAIN = 0.99
"""The share to which the mean square error must fall for another round."""
_HALF = 0.25
"""The share of the mean square error that is left where errors are halved."""
_GRID = tuple(4.0**power for power in range(-4, 5))
_STEPS = 8
_ALWAYS_HIDDEN = 65_536


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A trial and its errors, relative to the largest score of the source."""

    trial: Trial
    worst: float
    mean_square: float


@dataclass(frozen=True, slots=True)
class Found:
    """The best outcome on the sample, and the outcomes of all trials on it, the best first."""

    best: Outcome
    tried: tuple[Outcome, ...]
    sample: tuple[int, ...]
    errors: tuple[float, ...]
    """The worst error of each request, those outside the sample too, with the best trial."""
    trials: int
    """With those on earlier samples."""
    in_time: bool
    """False if the time was up before all suspects were tried."""

    def agreeing(self, tolerance: float) -> int:
        """The number of requests that agree."""
        return sum(error <= tolerance for error in self.errors)


class _TimeIsUpError(Exception):
    pass


class Search:
    """The search for one model. `requests`: all, since they give the lengths of batches, and show whether all agree."""

    def __init__(
        self, checkpoint: Checkpoint, device: Device, requests: Sequence[Request], tolerance: float, seconds: float
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._requests = tuple(requests)
        self._tolerance = tolerance
        self._seconds = seconds
        self._end_s = float("inf")
        self._tried: list[Outcome] = []
        self._expanded: list[Trial] = []
        self._trials_made = 0

    def run(self, errors: Sequence[float], looks_rounded: bool) -> Found:
        """`errors`: the worst error of each request with the model as it is.

        `looks_rounded`: more than two changes are combined only if two halve the error.
        """
        self._end_s = time.monotonic() + self._seconds
        found = self._search(_sample(self._requests, errors), looks_rounded)
        while found.in_time and found.best.worst <= self._tolerance < max(found.errors):
            others = [number for number in _worst_first(found.errors) if number not in found.sample]
            worst = [number for number in others[:_ADDED_REQUESTS] if found.errors[number] > self._tolerance]
            if not worst:
                break
            after = self._search(tuple(sorted({*found.sample, *worst})), looks_rounded)
            if after.best.worst > self._tolerance:
                return replace(found, trials=self._trials_made, in_time=after.in_time)
            found = after
        return found

    def _search(self, sample: tuple[int, ...], looks_rounded: bool) -> Found:
        """The search on one sample."""
        self._tried, self._expanded = [], []
        start = Trial(self._checkpoint, tuple(self._requests[number] for number in sample))
        # The model as it is needs no time, so that there is always an outcome.
        first = self._measured(start, trial_scores(start, self._device))
        best = [first]
        in_time = True
        try:
            for number in range(_MOST_ROUNDS):
                before = best[0]
                best = self._round(best)
                if best[0].worst <= self._tolerance or best[0].mean_square > _GAIN * before.mean_square:
                    break
                if looks_rounded and number == 1 and best[0].mean_square > _HALF * first.mean_square:
                    break
        except _TimeIsUpError:
            in_time = False
        tried = sorted(self._tried, key=lambda outcome: (outcome.worst, len(outcome.trial.changes)))
        whole = replace(tried[0].trial, requests=self._requests)
        errors = _errors(whole, trial_scores(whole, self._device))
        worst = tuple(float(own.max()) for own in errors)
        return Found(tried[0], tuple(tried), sample, worst, self._trials_made, in_time)

    def _round(self, best: Sequence[Outcome]) -> list[Outcome]:
        """The best trials with one change more, and those before."""
        found = list(best)
        for before in best:
            if any(before.trial is trial for trial in self._expanded):
                continue
            self._expanded.append(before.trial)
            for trial in self._trials(before.trial):
                outcome = self.outcome(trial)
                found.append(outcome)
                if outcome.worst <= self._tolerance:
                    return [outcome]
        return sorted(found, key=lambda outcome: outcome.mean_square)[:_BEST_TRIALS]

    def _trials(self, trial: Trial) -> Iterator[Trial]:
        # The causes that are most common and found by few runs come first.
        yield from self._batch_lengths(trial)
        yield from self._hidden_features(trial)
        for suspect in SUSPECTS:
            yield from suspect(trial)
        yield from self._constant(trial)

    def outcome(self, trial: Trial) -> Outcome:
        """Runs a trial. Raises _TimeIsUpError."""
        return self._measured(trial, self.scores(trial))

    def _measured(self, trial: Trial, scores: Sequence[Scores]) -> Outcome:
        errors = np.concatenate(_errors(trial, scores))
        outcome = Outcome(trial, float(errors.max()), float((errors**2).mean()))
        self._tried.append(outcome)
        self._trials_made += 1
        return outcome

    def scores(self, trial: Trial) -> list[Scores]:
        """Our scores in a trial. Raises _TimeIsUpError."""
        if time.monotonic() > self._end_s:
            raise _TimeIsUpError
        return trial_scores(trial, self._device)

    def _batch_lengths(self, trial: Trial) -> Iterator[Trial]:
        """N as the length of a batch."""
        config = trial.config
        if config.normalizer is None or trial.normalizer_of is not None:
            return
        layout = config.layout()

        def of_prefix(request: Request) -> int:
            return layout.tokens(len(request.behaviours))

        def own(request: Request) -> float:
            return of_prefix(request) + request.candidates.size

        whole = max(map(of_prefix, self._requests)) + max(request.candidates.size for request in self._requests)
        yield self._with_constant(trial, float(whole), "the padded length of all requests together")
        yield trial.scaled(self._varying("the request's own length", own), own)
        batches: dict[int, list[Request]] = defaultdict(list)
        for request in self._requests:
            if request.batch is not None:
                batches[request.batch].append(request)
        if sum(map(len, batches.values())) < len(self._requests):
            return
        padded: dict[int, float] = {}
        longest: dict[int, float] = {}
        doubled: dict[int, float] = {}
        for batch, members in batches.items():
            padded[batch] = max(map(of_prefix, members)) + max(request.candidates.size for request in members)
            longest[batch] = max(map(own, members))
            doubled[batch] = layout.tokens(max(request.tokens for request in members))
        kinds = {"the padded length of the batch": padded, "the longest length of the batch": longest}
        if config.inputs is InputForm.INTERLEAVED:
            # NVIDIA's code for training has an action beside each candidate.
            kinds["the longest length of the batch, with two tokens for each candidate"] = doubled
        for text, lengths in kinds.items():

            def of_batch(request: Request, lengths: dict[int, float] = lengths) -> float:
                return float(lengths[request.batch or 0])

            yield trial.scaled(self._varying(text, of_batch), of_batch)

    def _varying(self, text: str, normalizer_of: Callable[[Request], float]) -> Change:
        values = [normalizer_of(request) for request in self._requests]
        return Change(f"N is {text}, {min(values):g} to {max(values):g}", VARYING, _N)

    def _with_constant(self, trial: Trial, value: float, how: str) -> Trial:
        text = f"N {value:.6g} instead of {self._checkpoint.config.normalizer:.6g} ({how})"
        return trial.configured(Change(text, f"convert with --normalizer {value:.6g}", _N), normalizer=value)

    def _constant(self, trial: Trial) -> Iterator[Trial]:
        """The constant N with the smallest error."""
        now = trial.config.normalizer
        if now is None or trial.normalizer_of is not None:
            return
        theirs = [request.scores for request in trial.changed_requests()]
        largest = np.abs(np.concatenate(theirs)).max(axis=0)
        largest = np.where(largest > 0, largest, 1.0)

        def rest(inverse: float) -> NDArray[np.float64]:
            ours = self.scores(trial.configured(_NO_CHANGE, normalizer=1 / inverse))
            return np.concatenate([(a - b) / largest for a, b in zip(ours, theirs, strict=True)])

        at = min((1 / (now * factor) for factor in _GRID), key=lambda inverse: float((rest(inverse) ** 2).sum()))
        value, other = rest(at), rest(at * 1.01)
        before = at * 1.01
        for _ in range(_STEPS):
            slope = (value - other) / (at - before)
            square = float((slope * slope).sum())
            step = float((slope * value).sum()) / square if square > 0 else 0.0
            # At most to a quarter or to four times of N, since the scores are not linear in 1/N.
            new = float(np.clip(at - step, at / 4, at * 4))
            if not np.isfinite(new) or abs(new - at) < 1e-7 * at:
                break
            before, other, at = at, value, new
            value = rest(at)
        found = 1 / at
        whole = float(max(1, round(found)))
        is_whole = abs(whole - found) < 0.02 * max(1.0, found / 1000)
        yield self._with_constant(trial, whole if is_whole else found, "fitted")

    def _hidden_features(self, trial: Trial) -> Iterator[Trial]:
        """Features that are hidden from sequences below some length."""
        described = trial.config.contextual_features
        chosen = [tuple(range(len(described)))] if len(described) > 1 else []
        lengths = np.array([request.tokens for request in trial.requests])
        # Requests outside the sample have other lengths, between which the limit can lie.
        known = np.unique([request.tokens for request in self._requests])
        limits = [0, *known.tolist(), int(known.max()) + 1]
        for which in (*chosen, *((index,) for index in range(len(described)))):

            def limited(least: int, which: tuple[int, ...] = which) -> Trial:
                changed = tuple(
                    feature.model_copy(update={"min_tokens": least}) if index in which else feature
                    for index, feature in enumerate(described)
                )
                told = " ".join(f"--hide-below {described[index].name}={least}" for index in which)
                names = " and ".join(described[index].name for index in which)
                below = int(known[known < least].max(initial=-1)) + 1
                text = f"{names} hidden below {least} tokens" if least else f"{names} never hidden"
                if least and below < least:
                    text += f" (any from {below} to {least} fits)"
                change = Change(text, f"convert with {told}", f"hidden {names}")
                return trial.configured(change, contextual_features=changed)

            shown, hidden = (
                np.array([float((errors**2).sum()) for errors in _errors(other, self.scores(other))])
                for other in (limited(0), limited(_ALWAYS_HIDDEN))
            )
            sums = [float(np.where(lengths < least, hidden, shown).sum()) for least in limits]
            best = limits[int(np.argmin(sums))]
            if any(described[index].min_tokens != best for index in which):
                yield limited(best)


VARYING = (
    "no constant reproduces scores that depend on the batch: fix the scale in training, or choose --normalizer by "
    "docs/checkpoints.md"
)
_N = "normalizer"
_NO_CHANGE = Change("", "")


def _errors(trial: Trial, scores: Sequence[Scores]) -> list[Scores]:
    return relative_errors(scores, [request.scores for request in trial.changed_requests()])


def trial_scores(trial: Trial, device: Device) -> list[Scores]:
    """Our scores of a trial's requests."""
    requests = trial.changed_requests()
    if trial.normalizer_of is None:
        return list(Scorer(trial.checkpoint, device, requests).full(requests).scores)
    found: dict[int, Scores] = {}
    values = [trial.normalizer_of(request) for request in requests]
    for value in sorted(set(values)):
        numbers = [number for number, own in enumerate(values) if own == value]
        members = [requests[number] for number in numbers]
        config = trial.config.model_copy(update={"normalizer": value})
        scorer = Scorer(replace(trial.checkpoint, config=config), device, members)
        found |= dict(zip(numbers, scorer.full(members).scores, strict=True))
    return [found[number] for number in range(len(requests))]


def _sample(requests: Sequence[Request], errors: Sequence[float]) -> tuple[int, ...]:
    """Requests of all lengths, and those with the largest errors."""
    by_length = sorted(range(len(requests)), key=lambda number: requests[number].tokens)
    spread = np.linspace(0, len(by_length) - 1, min(SAMPLE_REQUESTS // 2, len(by_length))).round().astype(int)
    chosen = dict.fromkeys(by_length[place] for place in spread)
    for number in _worst_first(errors):
        if len(chosen) >= SAMPLE_REQUESTS:
            break
        chosen[number] = None
    return tuple(sorted(chosen))


def _worst_first(errors: Sequence[float]) -> list[int]:
    """The numbers of the requests, that of the largest error first."""
    return sorted(range(len(errors)), key=errors.__getitem__, reverse=True)
