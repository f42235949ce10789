"""The score error of inexact settings: K,V in 8 bits, a DRAM tier in fewer bits, and products in int8.

    K,V that were encoded and decoded     compared with    exact K,V, of the same engine
    products in int8                      compared with    products in float32, of another engine
    K,V in 8 bits                         compared with    K,V in the type of the products, of another engine

A worker with such a setting measures the error before it starts (`process.trial`). `relaygr model check` measures the
same on your own histories (`type_check`). Generated histories have random items of the model's vocabulary, each action
and value of a small feature, and steps of time of all sizes: they exercise the model's inputs, but do not resemble real
users.

The measure of an error is the spread of the exact scores of the same user and task, from the lowest to the highest: it
decides the order of the candidates, and a constant added to all scores does not change it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.cache.codec import make_codec
from relaygr.worker.kv import DramGeometry, DramKvDtype, KvDtype
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.description import Description
from relaygr.worker.model.engine import build_engine, load_model
from relaygr.worker.model.inference import FullRequest, full_inference
from relaygr.worker.model.interface import Engine
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.model.rankers import RankerError

TOP_K = 10
MADE_USERS = 16
_HALVINGS = 3
MADE_BEHAVIOURS = 1024
MADE_CANDIDATES = 100
_SAMPLED_ITEMS = 4096
"""The whole vocabulary of a large model would take much memory."""
LEAST_SPREAD = 2.0**-16
"""A spread of a smaller share of the largest score is rounding: float32 has 24 bits."""
UNKNOWN_ITEMS = (-1, 2**62)
"""No model has them. Items whose ids are texts have numbers of that size."""
UNKNOWN_ACTION = int(np.iinfo(np.uint16).max)
_UNKNOWN_BEHAVIOURS = 8
_LONGEST_STEP_MS = 30 * 86_400_000
_BEGIN_MS = 1_700_000_000_000

Scores = NDArray[np.float32]
"""[candidates, tasks]"""


@dataclass(frozen=True, slots=True)
class SampleUser:
    """Features int64 in the model's order, and the long-term behaviours."""

    features: NDArray[np.int64]
    behaviours: Behaviours

    def request(self, candidates: NDArray[np.int64]) -> FullRequest:
        """Ranks the candidates right after the last behaviour."""
        times = self.behaviours.timestamps_ms
        query_time_ms = int(times[-1]) + 1 if times.size else _BEGIN_MS
        return FullRequest(self.features, self.behaviours, candidates, query_time_ms)


def unknown_user(longest: int) -> SampleUser:
    """A user whose items and actions are not in the model's tables, without features."""
    count = min(_UNKNOWN_BEHAVIOURS, longest)
    behaviours = Behaviours(
        np.resize(np.array(UNKNOWN_ITEMS), count), np.full(count, UNKNOWN_ACTION, np.uint16), np.zeros(count, np.int64)
    )
    return SampleUser(np.empty(0, np.int64), behaviours)


def with_unknown(candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    """The candidates, with items that no model knows in place of the last ones."""
    return np.append(candidates, UNKNOWN_ITEMS)[-candidates.size :]


@contextmanager
def unknown_inputs() -> Iterator[None]:
    """Around a computation with them: what a team's ranker raises says what it was given."""
    try:
        yield
    except RankerError as error:
        raise RankerError(
            f"{error}. It was given what it does not know (item {UNKNOWN_ITEMS[0]} or {UNKNOWN_ITEMS[1]}, action "
            f"{UNKNOWN_ACTION}, feature -1): new items come through as they are, so give what is unknown a row of its "
            "own"
        ) from error


@dataclass(frozen=True, slots=True)
class ScoreError:
    """Score errors relative to the spread of the scores of the same user and task (`scales`), and the mean share of
    the TOP_K candidates of each user and task that stays in the TOP_K.
    """

    users: int
    candidates: int
    max_score_error: float
    mean_score_error: float
    topk_overlap: float

    def is_within(self, max_score_error: float, min_topk_overlap: float) -> bool:
        """Whether the error is within the limits. One that is not a number is not."""
        return self.max_score_error <= max_score_error and self.topk_overlap >= min_topk_overlap


def measure_dram_error(
    engine: Engine,
    dtype: DramKvDtype,
    users: Sequence[SampleUser],
    candidates: NDArray[np.int64],
    seconds: float = float("inf"),
) -> ScoreError:
    """Ranks `candidates` for each user on exact K,V, then on encoded and decoded K,V; for one user, and for others
    within `seconds`.

    Binds the engine to a new arena, so the caller must bind it again. Raises ValueError without users or candidates,
    TooLongError beyond the model's limits, RelayError without memory for the arena.
    """
    arena, pages = _own_arena(engine, users, candidates)

    def scores(user: SampleUser) -> tuple[Scores, Scores]:
        exact = full_inference(engine, user.request(candidates), pages)
        _through_dram(arena, DramGeometry(engine.geometry, dtype))
        (inexact,) = engine.rank([exact.ranked])
        return exact.outputs.scores, inexact.scores

    return _error_of((scores(user) for user in _within(users, seconds)), candidates)


def measure_engine_error(
    engine: Engine,
    exact: Engine,
    users: Sequence[SampleUser],
    candidates: NDArray[np.int64],
    seconds: float = float("inf"),
) -> ScoreError:
    """Ranks `candidates` for each user by `exact`, then by `engine`: two engines of one model.

    Binds both to new arenas. `seconds` and errors are as of `measure_dram_error`.
    """
    _, pages = _own_arena(engine, users, candidates)
    _own_arena(exact, users, candidates)

    def scores(user: SampleUser) -> tuple[Scores, Scores]:
        request = user.request(candidates)
        expected, found = (full_inference(each, request, pages).outputs.scores for each in (exact, engine))
        return expected, found

    return _error_of((scores(user) for user in _within(users, seconds)), candidates)


def _within(users: Sequence[SampleUser], seconds: float) -> Iterator[SampleUser]:
    """The first user, and others until the time is over."""
    until_s = time.monotonic() + seconds
    for index, user in enumerate(users):
        if index and time.monotonic() > until_s:
            return
        yield user


def _own_arena(
    engine: Engine, users: Sequence[SampleUser], candidates: NDArray[np.int64]
) -> tuple[torch.Tensor, NDArray[np.int32]]:
    """Binds the engine to a new arena with the pages of the longest prefix."""
    if not users or candidates.size == 0:
        raise ValueError("nothing to measure: no users, or no candidates")
    most_tokens = max(engine.layout.tokens(len(user.behaviours)) for user in users)
    arena = bind_own_arena(engine, longest_tokens=max(1, most_tokens))
    return arena, np.arange(arena.shape[0], dtype=np.int32)


def _error_of(pairs: Iterable[tuple[Scores, Scores]], candidates: NDArray[np.int64]) -> ScoreError:
    """The error of the second scores of each user."""
    exact, inexact = (np.stack(scores).astype(np.float64) for scores in zip(*pairs, strict=True))
    errors = np.abs(inexact - exact) / scales(exact)
    overlaps = [
        kept_share(exact[user, :, task], inexact[user, :, task])
        for user in range(exact.shape[0])
        for task in range(exact.shape[2])
    ]
    return ScoreError(
        users=exact.shape[0],
        candidates=int(candidates.size),
        max_score_error=float(errors.max()),
        mean_score_error=float(errors.mean()),
        topk_overlap=float(np.mean(overlaps)),
    )


def scales(exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """The measure of errors, [users, 1, tasks], for scores [users, candidates, tasks].

    It is the spread of the user's scores of the task; without one, the spread over all users; without one, the largest
    score; if all scores are 0, it is 1.
    """
    largest = np.abs(exact).max((0, 1), keepdims=True)
    of_user, of_all = np.ptp(exact, 1, keepdims=True), np.ptp(exact, (0, 1), keepdims=True)
    whole = np.where(largest > 0, largest, 1.0)
    common = np.where(of_all > LEAST_SPREAD * largest, of_all, whole)
    return np.where(of_user > LEAST_SPREAD * largest, of_user, common)


def exact_kv(compute_dtype: ComputeDtype) -> KvDtype:
    """The type of K,V that loses nothing beside these products."""
    return KvDtype(compute_dtype.of_rows.value)


def other_engine(
    engine: Engine,
    model: Path,
    kv_dtype: KvDtype,
    compute_dtype: ComputeDtype,
    device_table_bytes: int,
    ranker_modules: Sequence[str] = (),
) -> Engine:
    """An engine of the same checkpoint on the same device, with other element types.

    Raises RelayError if the folder holds another checkpoint by now.
    """
    found = load_model(model)
    if found.revision != engine.revision:
        raise RelayError(f"{model} was replaced by revision {found.revision} while it was loaded: load it again.")
    return build_engine(
        found,
        engine.device,
        kv_dtype,
        engine.geometry.page_tokens,
        compute_dtype,
        device_table_bytes=device_table_bytes,
        ranker_modules=ranker_modules,
    )


def made_sample(engine: Engine, users: int = MADE_USERS, seed: int = 0) -> tuple[list[SampleUser], NDArray[np.int64]]:
    """Random users of the engine's model, and candidates for them."""
    items = np.unique(engine.known_items(_SAMPLED_ITEMS, np.random.default_rng(seed)))
    return made_users(engine.description, items, users, seed)


def made_users(
    described: Description, items: NDArray[np.int64], users: int = MADE_USERS, seed: int = 0
) -> tuple[list[SampleUser], NDArray[np.int64]]:
    """Random users of a model with these items, and candidates for them."""
    random = np.random.default_rng(seed)
    longest = min(described.limits.max_prefix_behaviours, MADE_BEHAVIOURS)
    made = []
    for index in range(users):
        # From the longest down to short histories, which have fewer terms over which an error averages out. Most are
        # short: they are there for the values of the features.
        count = max(1, longest >> min(index, _HALVINGS))
        steps_ms = _LONGEST_STEP_MS ** random.random(count)
        # The next values of the features: a value beyond the last one is unknown to the model, as is the last action.
        features = [
            np.arange(index * each.tokens, (index + 1) * each.tokens) % (each.cardinality + 1)
            for each in described.features
        ]
        made.append(
            SampleUser(
                np.concatenate([np.empty(0, np.int64), *features]).astype(np.int64),
                Behaviours(
                    np.resize(random.choice(items, min(count, items.size), replace=False), count),
                    random.permutation(np.resize(described.actions, count)).astype(np.uint16),
                    _BEGIN_MS + np.cumsum(steps_ms.astype(np.int64)),
                ),
            )
        )
    candidates = random.choice(items, min(MADE_CANDIDATES, described.limits.max_candidates, items.size), replace=False)
    return made, candidates


def _through_dram(arena: torch.Tensor, geometry: DramGeometry) -> None:
    """Replaces all pages by the result of a spill and a reload."""
    codec = make_codec(geometry)
    if codec is None:
        return
    layers = geometry.kv.num_layers
    pages = arena.view(arena.shape[0], layers, geometry.kv.layer_bytes)
    stored = torch.empty((arena.shape[0], layers, geometry.layer_bytes), dtype=torch.uint8, device=arena.device)
    codec.encode(pages, stored)
    codec.decode(stored, pages)


def kept_share(exact: NDArray[np.float64], inexact: NDArray[np.float64], top_k: int = TOP_K) -> float:
    """The share of the best candidates that stays among as many best ones; of all if there are fewer."""
    count = min(top_k, exact.size)
    best = [set(np.argsort(-scores, kind="stable")[:count].tolist()) for scores in (exact, inexact)]
    return len(best[0] & best[1]) / count
