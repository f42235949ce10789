"""The contract of every engine, for every kind of model and every back end: cached inference is full inference.

The oracle computes full inference, dense and in float64 (`tests.worlds.dense`). Calls that a model's rules
forbid (chunks, a suffix, an append) are refused, and calls that they allow are exact.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.worker.kv import KvDtype
from relaygr.worker.model import layer_parts
from relaygr.worker.model.attention.mask import AttentionMask, Visible
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.attention.spec import AttentionSpec, spec_of
from relaygr.worker.model.checkpoint import Checkpoint, random_checkpoint
from relaygr.worker.model.config import ModelConfig, RuleError
from relaygr.worker.model.engine import own_engine
from relaygr.worker.model.inputs.tokens import Column
from relaygr.worker.model.interface import PrefixChunk, RankInputs
from relaygr.worker.model.options import ComputeDtype, PositionOrigin
from relaygr.worker.model.vectors.masks import MaskOptions, attention_mask
from tests.workers.engine_kinds import BACKENDS, HAS_ONEDNN, KINDS
from tests.worlds.dense import full_inference
from tests.worlds.dense.encodings import positions_from_end
from tests.worlds.dense.layers import Product
from tests.worlds.dense.small import int8_product
from tests.worlds.model import ARENA_PAGES, VOCABULARY, configs

TOLERANCE = 2e-5
UNWRITTEN = 0xFF
AS_CHOSEN = "as chosen on the CPU"
CASES = [
    (kind, backend)
    for backend, made in BACKENDS.items()
    for kind, config in KINDS.items()
    if kind in made.kinds and made.computes(spec_of(config, ComputeDtype.FLOAT32))
]
OF_EACH_MASK = {
    (spec_of(KINDS[kind], ComputeDtype.FLOAT32), backend): (kind, backend) for kind, backend in reversed(CASES)
}
each_case = pytest.mark.parametrize(
    ("kind", "backend"),
    [pytest.param(*case, marks=() if case[1] == AS_CHOSEN else pytest.mark.slow, id="; ".join(case)) for case in CASES],
)
each_mask = pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param(*case, marks=pytest.mark.slow if BACKENDS[case[1]].is_slow else (), id="; ".join(case))
        for case in OF_EACH_MASK.values()
    ],
)
each_kind = pytest.mark.parametrize("kind", KINDS)
PRODUCTS = {
    "torch": (),
    "oneDNN": pytest.mark.skipif(not HAS_ONEDNN, reason="this build of torch has no oneDNN"),
}


@dataclass(frozen=True, slots=True)
class User:
    """One user's inputs, and the pages of the prefix."""

    features: NDArray[np.int64]
    history: Behaviours
    candidates: NDArray[np.int64]
    query_time_ms: int
    pages: NDArray[np.int32]


class ContractWorld:
    """A random model in an engine on a back end, with an arena."""

    def __init__(
        self,
        kind: str | ModelConfig,
        backend: str = "as chosen on the CPU",
        seed: int = 0,
        page_tokens: int | None = None,
        kv_dtype: KvDtype = KvDtype.FLOAT32,
        compute_dtype: ComputeDtype = ComputeDtype.FLOAT32,
    ) -> None:
        self.config = KINDS[kind] if isinstance(kind, str) else kind
        self.checkpoint: Checkpoint = random_checkpoint(self.config, seed)
        made = BACKENDS[backend]
        device = made.device()
        self.engine = own_engine(
            self.checkpoint,
            device,
            kv_dtype,
            page_tokens or made.page_tokens,
            compute_dtype,
            made.choose,
            device_table_bytes=made.device_table_bytes,
        )
        # Rows that are not written are NaN, so that a read of one shows in the scores.
        self.arena = torch.full(
            (ARENA_PAGES, self.engine.geometry.page_bytes), UNWRITTEN, dtype=torch.uint8, device=device.torch_device
        )
        self.engine.bind(self.arena)
        self.random = np.random.default_rng(seed)
        self._free = self.random.permutation(ARENA_PAGES).astype(np.int32)

    def user(self, behaviours: int, candidates: int = 7) -> User:
        """A user with pages of their own. Times are minutes to days apart; some items and actions are unknown."""
        random = self.random
        times = 1_700_000_000_000 + np.cumsum(random.exponential(10_000_000, behaviours)).astype(np.int64)
        query_time_ms = int(times[-1] if behaviours else 1_700_000_000_000) + int(random.integers(0, 10_000_000))
        count = self.engine.geometry.pages_for(self.engine.layout.tokens(behaviours))
        pages, self._free = self._free[:count], self._free[count:]
        return User(
            features=random.integers(-1, 6, self.config.contextual_tokens),
            history=Behaviours(
                random.integers(0, VOCABULARY + 4, behaviours), random.integers(0, 8, behaviours).astype("u2"), times
            ),
            candidates=random.integers(0, VOCABULARY + 4, candidates),
            query_time_ms=query_time_ms,
            pages=pages,
        )

    def chunks(self, user: User, start: int, behaviours: int, cuts: list[int]) -> list[PrefixChunk]:
        """The user's first `behaviours` from token `start` on, cut where the rules allow it."""
        features = self.engine.shown_features(user.features, len(user.history), user.candidates.size)
        inputs = self.engine.prefix_inputs(features, user.history[:behaviours], user.query_time_ms)
        inner = {cut for cut in cuts if start < cut < inputs.tokens} if self.engine.rules.chunks else set()
        ends = sorted(inner | {inputs.tokens}) if inputs.tokens > start else []
        starts = [start, *ends[:-1]]
        return [PrefixChunk(inputs, low, high, user.pages) for low, high in zip(starts, ends, strict=False)]

    def pre_infer(self, user: User, behaviours: int, cuts: list[int], start: int = 0) -> int:
        """Computes the prefix chunk by chunk; returns its tokens."""
        for chunk in self.chunks(user, start, behaviours, cuts):
            self.engine.pre_infer(chunk)
        return self.engine.layout.tokens(behaviours)

    def request(self, user: User, behaviours: int, candidates: NDArray[np.int64] | None = None) -> RankInputs:
        """Ranks the candidates after a prefix of that length; the rest of the history is the suffix."""
        return self.engine.rank_inputs(
            self.engine.layout.tokens(behaviours),
            user.pages,
            user.history[behaviours:],
            user.candidates if candidates is None else candidates,
            user.query_time_ms,
            user.history[:behaviours].timestamps_ms,
        )

    def prefix_of(self, behaviours: int, suffix: int) -> int:
        """The number of prefix behaviours, with `suffix` in the suffix if the rules allow one."""
        return max(0, behaviours - suffix) if self.engine.rules.grows else behaviours

    def exact(self, user: User, dtype: torch.dtype = torch.float64) -> NDArray[np.float64]:
        """The oracle's scores."""
        return self._exact(self.checkpoint, user, dtype)

    def exact_nearby(self, user: User, seed: int) -> NDArray[np.float64]:
        """The oracle's scores with weights that are changed by up to their last bit in float32."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: tensor * (1 + 2**-23 * (2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1))
            if tensor.is_floating_point()
            else tensor
            for name, tensor in self.checkpoint.tensors.items()
        }
        return self._exact(replace(self.checkpoint, tensors=tensors), user, torch.float64)

    def exact_in_int8(self, user: User) -> NDArray[np.float64]:
        """The oracle's scores with products in int8."""
        return self._exact(self.checkpoint, user, torch.float64, int8_product)

    @staticmethod
    def _exact(
        checkpoint: Checkpoint, user: User, dtype: torch.dtype, product: Product = torch.matmul
    ) -> NDArray[np.float64]:
        outputs = full_inference(
            checkpoint, user.features, user.history, user.candidates, user.query_time_ms, dtype, product=product
        )
        return outputs.scores.double().numpy()


RULES = {kind: ContractWorld(kind).engine.rules for kind in KINDS}


def error(ours: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    """Largest difference as a share of the largest value."""
    return float(np.abs(ours - expected).max() / np.abs(expected).max())


def assert_exact(world: ContractWorld, user: User, scores: NDArray[np.float32]) -> None:
    """A norm over nearly equal values magnifies float32's own rounding, with or without the cache, and so do scores
    that cancel. There the error may be four times the effect of the last bits of the weights."""
    expected = world.exact(user)
    assert scores.dtype == np.float32
    worst = error(scores, expected)
    assert worst <= TOLERANCE or worst <= 4 * max(error(world.exact_nearby(user, seed), expected) for seed in range(4))


@each_case
@settings(max_examples=12, deadline=None)
@given(
    page_tokens=st.sampled_from([1, 3, 8, 64]),
    behaviours=st.integers(0, 40),
    suffix=st.integers(0, 9),
    candidates=st.integers(1, 12),
    cuts=st.lists(st.integers(1, 80), max_size=4),
    seed=st.integers(0, 2**16),
)
def test_cached_inference_is_full_inference(
    kind: str,
    backend: str,
    page_tokens: int,
    behaviours: int,
    suffix: int,
    candidates: int,
    cuts: list[int],
    seed: int,
) -> None:
    world = ContractWorld(kind, backend, seed, page_tokens)
    user = world.user(behaviours, candidates)
    prefix = world.prefix_of(behaviours, suffix)
    world.pre_infer(user, prefix, cuts)
    assert_exact(world, user, world.engine.rank([world.request(user, prefix)])[0].scores)


@pytest.mark.parametrize(
    ("kind", "products", "kv_dtype"),
    [
        # Each kind with each way, and each way with each type.
        pytest.param(kind, products, list(KvDtype)[(number + way) % len(KvDtype)], marks=mark)
        for number, kind in enumerate(KINDS)
        for way, (products, mark) in enumerate(PRODUCTS.items())
    ],
)
def test_cached_inference_is_full_inference_whoever_computes_the_products(
    kind: str, products: str, kv_dtype: KvDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_parts._Choice, "uses_onednn", products == "oneDNN")
    world = ContractWorld(kind, seed=8, kv_dtype=kv_dtype)
    user = world.user(40, 16)
    prefix = world.prefix_of(40, 8)
    world.pre_infer(user, prefix, [11, 30])
    cached = world.engine.rank([world.request(user, prefix)])[0].scores
    if kv_dtype is KvDtype.FLOAT32:
        assert_exact(world, user, cached)
        return
    world.pre_infer(user, 40, [])
    full = world.engine.rank([world.request(user, 40)])[0].scores
    # K,V that differ in their last bit may be rounded to another number.
    assert error(cached, full) <= max(error(full, world.exact(user)), TOLERANCE)


@settings(max_examples=80, deadline=None)
@given(
    config=configs(),
    page_tokens=st.sampled_from([1, 3, 8, 64]),
    behaviours=st.integers(0, 70),
    suffix=st.integers(0, 9),
    cuts=st.lists(st.integers(1, 72), max_size=4),
    seed=st.integers(0, 2**16),
)
@pytest.mark.slow
def test_cached_inference_is_full_inference_for_any_combination_of_options(
    config: ModelConfig, page_tokens: int, behaviours: int, suffix: int, cuts: list[int], seed: int
) -> None:
    world = ContractWorld(config, seed=seed, page_tokens=page_tokens)
    user = world.user(behaviours)
    prefix = world.prefix_of(behaviours, suffix)
    world.pre_infer(user, prefix, cuts)
    assert_exact(world, user, world.engine.rank([world.request(user, prefix)])[0].scores)


@pytest.mark.slow
@each_mask
def test_histories_and_candidates_of_several_tiles_are_as_exact(kind: str, backend: str) -> None:
    """Tiles are of 256 rows and 512 keys; groups of candidates, windows and the diagonal cross their edges.

    Those of an interpreted back end are of 64 rows and 16 keys.
    """
    behaviours, candidates = (120, 70) if BACKENDS[backend].is_slow else (560, 290)
    config = KINDS[kind].model_copy(update={"max_prefix_behaviours": 600, "max_candidates": 300})
    # The larger pages hold more than a tile's keys.
    page_tokens = 1024 if backend == AS_CHOSEN else 64
    world = ContractWorld(config, backend, 1, page_tokens)
    user = world.user(behaviours, candidates)
    prefix = world.prefix_of(behaviours, 16)
    world.pre_infer(user, prefix, [behaviours // 2 + 21])
    assert_exact(world, user, world.engine.rank([world.request(user, prefix)])[0].scores)


@pytest.mark.slow
@each_case
@settings(max_examples=5, deadline=None)
@given(
    first=st.integers(0, 30),
    appended=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cut=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_an_appended_prefix_is_the_longer_prefix(
    kind: str, backend: str, first: int, appended: list[int], cut: int, seed: int
) -> None:
    world = ContractWorld(kind, backend, seed)
    if not world.engine.rules.grows:
        return
    length = first + sum(appended)
    user = world.user(length)
    tokens = 0
    for behaviours in accumulate([first, *appended]):
        tokens = world.pre_infer(user, behaviours, [cut], start=tokens)
    assert_exact(world, user, world.engine.rank([world.request(user, length)])[0].scores)


@pytest.mark.slow
@each_kind
def test_a_user_at_every_limit_is_ranked_with_an_empty_user(kind: str) -> None:
    world = ContractWorld(kind, seed=6, page_tokens=13)
    limits, grows = world.engine.limits, world.engine.rules.grows
    most = world.user(
        limits.max_prefix_behaviours + (limits.max_suffix_behaviours if grows else 0), limits.max_candidates
    )
    new, unasked = world.user(0, 1), world.user(3, 0)
    requests = []
    for user in (new, most, unasked):
        prefix = world.prefix_of(len(user.history), limits.max_suffix_behaviours)
        world.pre_infer(user, prefix, [64, 128])
        requests.append(world.request(user, prefix))
    of_new, of_most, of_unasked = world.engine.rank(requests)
    assert_exact(world, new, of_new.scores)
    assert_exact(world, most, of_most.scores)
    assert of_unasked.scores.shape == (0, world.engine.num_tasks)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if RULES[kind].uses_query_time])
@pytest.mark.parametrize("times_ms", [(5, 4, 3), (0, 0, 2**62), (-(2**63), 2**63 - 1, -1)])
def test_times_may_decrease_lie_in_the_future_and_be_extreme(kind: str, times_ms: tuple[int, ...]) -> None:
    world = ContractWorld(kind, seed=7)
    user = world.user(3)
    history = Behaviours(user.history.items, user.history.actions, np.array(times_ms))
    user = replace(user, history=history, query_time_ms=1_700_000_000_000)
    world.pre_infer(user, 3, [])
    assert_exact(world, user, world.engine.rank([world.request(user, 3)])[0].scores)


@pytest.mark.slow
@each_case
def test_one_forward_of_chunks_and_requests_equals_a_forward_of_each(kind: str, backend: str) -> None:
    def setting() -> tuple[ContractWorld, list[PrefixChunk], list[RankInputs], list[User]]:
        world = ContractWorld(kind, backend, 3)
        users = [world.user(length, 3 + length % 5) for length in (17, 0, 9, 26, 14)]
        begun, whole, *ranked = users
        first, *rest = world.chunks(begun, 0, 17, [7])
        if rest:
            world.engine.pre_infer(first)
        requests = []
        for user in ranked:
            prefix = world.prefix_of(len(user.history), 3)
            world.pre_infer(user, prefix, [])
            requests.append(world.request(user, prefix))
        return world, [*(rest or [first]), *world.chunks(whole, 0, 0, [])], requests, ranked

    together, chunks, requests, ranked = setting()
    scores = together.engine.forward(chunks, requests)
    apart, chunks, requests, _ = setting()
    assert apart.engine.forward([], []) == []
    for chunk in chunks:
        apart.engine.pre_infer(chunk)
    for user, request, outputs in zip(ranked, requests, scores, strict=True):
        assert error(outputs.scores, apart.engine.rank([request])[0].scores) <= TOLERANCE
        assert_exact(together, user, outputs.scores)
    ours, theirs = (world.arena.view(torch.float32).cpu() for world in (together, apart))
    written = ~theirs.isnan()
    assert torch.equal(~ours.isnan(), written)
    assert float((ours - theirs)[written].abs().max() / theirs[written].abs().max()) <= TOLERANCE


@each_case
def test_candidates_see_nobody_outside_their_group(kind: str, backend: str) -> None:
    world = ContractWorld(kind, backend, 4)
    user = world.user(20, 10)
    world.pre_infer(user, 20, [])
    scores = world.engine.rank([world.request(user, 20)])[0].scores
    size = world.config.target_group_size
    for first in range(0, 10, size):
        group = world.request(user, 20, user.candidates[first : first + size])
        assert error(world.engine.rank([group])[0].scores, scores[first : first + size]) <= TOLERANCE


@pytest.mark.slow
@each_case
def test_bfloat16_costs_at_most_twice_what_it_costs_the_oracle(kind: str, backend: str) -> None:
    ours = theirs = 0.0
    for seed in range(4):
        world = ContractWorld(kind, backend, seed, kv_dtype=KvDtype.BFLOAT16, compute_dtype=ComputeDtype.BFLOAT16)
        user = world.user(40, 16)
        prefix = world.prefix_of(40, 8)
        world.pre_infer(user, prefix, [11, 30])
        scores = world.engine.rank([world.request(user, prefix)])[0].scores
        exact = world.exact(user)
        ours = max(ours, error(scores, exact))
        theirs = max(theirs, error(world.exact(user, torch.bfloat16), exact))
    assert 0 < ours <= 2 * theirs


@pytest.mark.parametrize("kv_dtype", [dtype for dtype in KvDtype if dtype.is_scaled])
@each_kind
def test_scores_on_kv_in_8_bits_are_near_and_agree_with_and_without_the_cache(kind: str, kv_dtype: KvDtype) -> None:
    """K,V that differ in their last bit may be rounded to another number, so scores may differ by a part of the error
    of the type."""
    for seed in range(3):
        world = ContractWorld(kind, seed=seed, kv_dtype=kv_dtype)
        user = world.user(40, 16)
        prefix = world.prefix_of(40, 8)
        world.pre_infer(user, prefix, [11, 30])
        cached = world.engine.rank([world.request(user, prefix)])[0].scores
        world.pre_infer(user, 40, [])
        full = world.engine.rank([world.request(user, 40)])[0].scores
        of_type = error(full, world.exact(user))
        # Random models with a bias or soft-max are much less exact than others.
        assert 0 < of_type <= (0.1 if kv_dtype is KvDtype.INT8 else 0.5)
        assert error(cached, full) <= max(0.5 * of_type, TOLERANCE)


@pytest.mark.usefixtures("exact_int8")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if HAS_ONEDNN])
def test_int8_costs_at_most_twice_what_it_costs_the_oracle_with_and_without_the_cache(kind: str) -> None:
    """A sum of attention that differs in its last bit may round a row to another int8, so cached and full scores differ
    by the error of the type, not by that of float32."""
    cached_error = full_error = difference = of_oracle = 0.0
    for seed in range(4):
        world = ContractWorld(kind, seed=seed, page_tokens=16, compute_dtype=ComputeDtype.INT8)
        user = world.user(40, 16)
        prefix = world.prefix_of(40, 8)
        world.pre_infer(user, prefix, [11, 30])
        cached = world.engine.rank([world.request(user, prefix)])[0].scores
        world.pre_infer(user, 40, [])
        full = world.engine.rank([world.request(user, 40)])[0].scores
        exact = world.exact(user)
        cached_error, full_error = max(cached_error, error(cached, exact)), max(full_error, error(full, exact))
        difference = max(difference, error(cached, full))
        of_oracle = max(of_oracle, error(world.exact_in_int8(user), exact))
    assert of_oracle > 0
    assert max(cached_error, full_error, difference) <= 2 * of_oracle


@each_case
def test_layer_ready_is_called_before_each_layer_reads_the_pages(kind: str, backend: str) -> None:
    """A ranking may begin while a reload is still copying K,V layer by layer."""
    world = ContractWorld(kind, backend, 5)
    user = world.user(20)
    world.pre_infer(user, 20, [])
    expected = world.engine.rank([world.request(user, 20)])[0].scores
    arrived = world.arena.clone()
    world.arena.fill_(UNWRITTEN)
    layer_bytes, asked = world.engine.geometry.layer_bytes, []

    def arrive(layer: int) -> None:
        asked.append(layer)
        part = slice(layer * layer_bytes, (layer + 1) * layer_bytes)
        world.arena[:, part] = arrived[:, part]

    request = world.request(user, 20)
    waiting = replace(request, layer_ready=arrive)
    assert np.array_equal(world.engine.rank([waiting])[0].scores, expected)
    assert asked == [0, 1]


@settings(max_examples=150, deadline=None)
@given(
    contextual=st.integers(0, 4),
    window=st.integers(0, 12),
    exempt=st.integers(0, 8),
    group=st.integers(1, 4),
    context=st.integers(0, 20),
    causal=st.integers(0, 12),
    free=st.integers(0, 8),
    step=st.integers(1, 9),
)
@pytest.mark.slow
def test_tiles_of_the_mask_are_the_mask(
    contextual: int, window: int, exempt: int, group: int, context: int, causal: int, free: int, step: int
) -> None:
    """The expected mask is checked against test vectors of other implementations (`masks.py`)."""
    history = context + causal
    contextual = min(contextual, history)
    spec = AttentionSpec(1, 1, 1, 1.0, 1.0, contextual, window, exempt if window else 0, group)
    mask = AttentionMask(spec, Segment(np.empty(0, "i4"), context, causal, free, False, history), torch.device("cpu"))
    options = MaskOptions(contextual, window, exempt if window else 0)
    expected = attention_mask(history + free, history + free, free, options)
    for row in range(free):
        expected[history + row, history + row - row % group : history + row] = True
    ranges = [
        range(low, min(low + step, stop))
        for start, stop in ((0, history), (history, history + free))
        for low in range(start, stop, step)
    ]
    for rows in ranges:
        for keys in ranges:
            tile = mask.tile(rows, keys)
            ours = tile if isinstance(tile, torch.Tensor) else torch.full((len(rows), len(keys)), tile is Visible.ALL)
            assert torch.equal(ours, expected[rows.start : rows.stop, keys.start : keys.stop])


@each_kind
def test_places_are_those_of_the_definition(kind: str) -> None:
    world = ContractWorld(kind)
    user, config = world.user(25), world.config
    rows = world.engine.prefix_inputs(user.features, user.history, user.query_time_ms).rows
    places = np.concatenate((rows[:, Column.PLACE], world.request(user, 25).rows[:, Column.PLACE]))
    size, end = places.size, rows.shape[0]
    expected = torch.zeros(size, dtype=torch.int64)
    if config.num_positions and config.position_origin is PositionOrigin.END:
        contextual = world.engine.layout.contextual_tokens
        expected = positions_from_end(size, size - end, contextual, config.num_positions)
    elif config.num_positions:
        expected = torch.arange(size).clamp(max=min(end, config.num_positions - 1))
    assert np.array_equal(places, expected.numpy())


def test_the_rules_are_those_of_the_mask_and_the_encodings() -> None:
    assert [kind for kind, rules in RULES.items() if not rules.grows] == [
        "research",
        "soft-max with every mask option",
        "windowed, the newest rows see all",
        "contextual mask",
        "contextual mask and window",
        "positions from the end",
        "interleaved with bias by time",
        "dlrm-v3",
    ]
    assert [kind for kind, rules in RULES.items() if not rules.chunks] == [
        "soft-max with every mask option",
        "contextual mask",
        "contextual mask and window",
    ]
    assert [kind for kind, rules in RULES.items() if rules.uses_query_time] == [
        "research",
        "soft-max with every mask option",
        "positions from the end",
        "times from the query",
        "interleaved with bias by time",
        "dlrm-v3",
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not RULES[kind].grows])
def test_an_append_to_a_prefix_that_does_not_grow_would_be_wrong(kind: str) -> None:
    """One more behaviour changes K,V of earlier rows, so appends and suffixes are refused."""
    world = ContractWorld(kind)
    user = world.user(20)
    with pytest.raises(RuleError, match="cannot be followed by a suffix"):
        world.request(user, 19)
    later_ms = user.query_time_ms + 86_400_000
    shorter = User(user.features, user.history[:19], user.candidates, later_ms, user.pages)
    world.pre_infer(shorter, 19, [])
    before = world.arena.clone()
    world.pre_infer(User(user.features, user.history, user.candidates, later_ms, user.pages), 20, [])
    written = ~before.view(torch.float32).isnan()
    assert not torch.equal(world.arena.view(torch.float32)[written], before.view(torch.float32)[written])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if RULES[kind].uses_query_time])
def test_where_the_query_time_is_in_the_key_it_changes_kv_or_scores(kind: str) -> None:
    world = ContractWorld(kind)
    user = world.user(20)
    world.pre_infer(user, 20, [])
    before = world.arena.clone()
    later = User(user.features, user.history, user.candidates, user.query_time_ms + 86_400_000, user.pages)
    world.pre_infer(later, 20, [])
    assert not torch.equal(world.arena, before)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not RULES[kind].chunks])
def test_a_chunk_is_refused_where_rows_see_later_ones(kind: str) -> None:
    world = ContractWorld(kind)
    user = world.user(20)
    inputs = world.engine.prefix_inputs(user.features, user.history, user.query_time_ms)
    for start, end in ((0, 10), (10, inputs.tokens)):
        with pytest.raises(RuleError, match="computed in one chunk"):
            world.engine.forward([PrefixChunk(inputs, start, end, user.pages)], [])
    assert bool((world.arena == UNWRITTEN).all())


@pytest.mark.parametrize("kind", ["research", "interleaved with bias by time"])
def test_a_bias_by_time_without_the_prefix_s_times_is_refused(kind: str) -> None:
    world = ContractWorld(kind)
    user = world.user(20)
    tokens = world.engine.layout.tokens(20)
    for times in (None, user.history[:10].timestamps_ms):
        with pytest.raises(RuleError, match="timestamps of all behaviours"):
            world.engine.rank_inputs(tokens, user.pages, Behaviours.empty(), user.candidates, 0, times)


def test_pages_that_do_not_hold_a_prefix_are_refused_before_anything_is_written() -> None:
    world = ContractWorld("meta")
    user = world.user(20)
    other = world.user(5)
    chunk, *_ = world.chunks(other, 0, 5, [])
    wrong = User(user.features, user.history, user.candidates, user.query_time_ms, np.array([0, 1, ARENA_PAGES], "i4"))
    with pytest.raises(ValueError, match="not in an arena of"):
        world.engine.forward([chunk], [world.request(wrong, 20)])
    few = User(user.features, user.history, user.candidates, user.query_time_ms, user.pages[:1])
    with pytest.raises(ValueError, match="need 3 pages"):
        world.engine.forward([chunk], [world.request(few, 20)])
    assert bool((world.arena == UNWRITTEN).all())


@each_kind
def test_a_replaced_engine_frees_its_weights_without_a_garbage_collection(kind: str) -> None:
    """The heap of a worker is excluded from collections, and an idle process makes none."""
    world = ContractWorld(kind)
    user = world.user(20)
    prefix = world.prefix_of(20, 4)
    world.pre_infer(user, prefix, [])
    [ranked] = world.engine.rank([world.request(user, prefix)])
    assert ranked.scores.size
    weights = [weakref.ref(tensor) for tensor in world.checkpoint.tensors.values()]
    engine = weakref.ref(world.engine)
    gc.disable()
    try:
        del world
        assert engine() is None
        assert [number for number, tensor in enumerate(weights) if tensor() is not None] == []
    finally:
        gc.enable()
