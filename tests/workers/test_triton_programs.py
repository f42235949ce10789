"""Any forward, by programs in any order: the formula's rows, the same bits, and nothing else read or written."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.worker.kv import KvDtype
from relaygr.worker.model.options import RelativeBias
from relaygr.worker.model.triton.launch import Blocks
from relaygr.worker.model.triton.plan import PlanShape
from tests.worlds.attention import TOLERANCES, SegmentRows
from tests.worlds.programs import Order, launches
from tests.worlds.triton import INTERPRETED, Forward, nan_memory

EXAMPLES = int(os.environ.get("RELAYGR_TEST_KERNEL_EXAMPLES", "30"))
KEYS = (16, 32)
"""In a block, and the rows of a tile."""
sizes = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33]) | st.integers(0, 70)
"""The edges of blocks and tiles, and others."""


@st.composite
def segment_rows(draw: Callable[..., Any], contextual: int) -> SegmentRows:
    """A chunk, with more history after it or not, or a request with a suffix, candidates, or both.

    Every history begins with all contextual tokens.
    """
    context, causal, free = draw(sizes), draw(sizes), draw(st.just(0) | sizes.filter(lambda size: size <= 40))
    missing = max(0, contextual - context - causal)
    if free:
        return SegmentRows(context + missing, causal, free)
    return SegmentRows(context, causal, 0, later=missing + draw(st.integers(0, 9)))


@st.composite
def forwards(draw: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of `Forward`: segments of any lengths, in any types, with any mask and bias."""
    contextual = draw(st.sampled_from([0, 0, 1, 3, 20]))
    window = draw(st.sampled_from([0, 0, 1, 7, 16, 40]))
    positions = draw(st.sampled_from([0, 0, 1, 24]))
    times = draw(st.sampled_from([0, 128])) if positions else 0
    return {
        "runs": draw(st.lists(segment_rows(contextual), min_size=1, max_size=4)),
        "heads": draw(st.integers(1, 3)),
        "dqk": draw(st.sampled_from([1, 8, 15, 16, 17])),
        "dv": draw(st.sampled_from([2, 8, 16, 18])),
        "page_tokens": draw(st.sampled_from([1, 5, 8, 15, 16, 17, 32])),
        "compute": draw(st.sampled_from(list(TOLERANCES))),
        "stored": draw(st.sampled_from(list(KvDtype))),
        "group": draw(st.sampled_from([1, 1, 2, 5, 16])),
        "contextual": contextual,
        "window": window,
        "full_last": draw(st.sampled_from([0, 3, 17])) if window else 0,
        "relative_bias": RelativeBias(positions=positions, time_buckets=times) if positions else None,
        "seed": draw(st.integers(0, 2**16)),
    }


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(
    arguments=forwards(),
    rows=st.sampled_from(KEYS),
    keys=st.sampled_from(KEYS),
    splits=st.sampled_from([0, 0, 2, 12]),
    other=st.sampled_from([Order.REVERSED, Order.RANDOM]),
    seed=st.integers(0, 2**16),
)
def test_programs_in_any_order_give_the_formulas_rows_and_the_same_bits(
    arguments: dict[str, Any], rows: int, keys: int, splits: int, other: Order, seed: int
) -> None:
    forward = Forward(**arguments)
    before, expected = forward.with_guards(), forward.expected()
    shape = PlanShape(rows, splits, any(segment.stores for segment in forward.segments))
    after, found = forward.stored(), list[torch.Tensor]()
    for order in (Order.FORWARD, other):
        forward.kv.arena.copy_(before)
        with nan_memory(), launches(order, seed):
            found.append(forward.attend_by(shape, Blocks(keys)))
        assert torch.equal(forward.kv.arena, after), "K,V of others, or of another layer, were written"
    assert forward.error(found[0], expected) <= TOLERANCES[forward.spec.compute_dtype]
    assert torch.equal(*found)


@triton.jit
def both_write_kernel(out_ptr):
    """A place that all programs write."""
    tl.store(out_ptr, tl.program_id(0))


@triton.jit
def reads_its_neighbours_kernel(x_ptr):
    """What another program writes."""
    number = tl.program_id(0)
    tl.store(x_ptr + number + 1, tl.load(x_ptr + number))


@triton.jit
def reads_its_own_kernel(x_ptr):
    """Stored by one thread and loaded by another: compiled code does not wait between them."""
    number = 4 * tl.program_id(0) + tl.arange(0, 4)
    tl.store(x_ptr + number, number)
    tl.store(x_ptr + 40 + number, tl.load(x_ptr + 4 * tl.program_id(0) + 3 - tl.arange(0, 4)))


@triton.jit
def reads_beyond_kernel(x_ptr, out_ptr, rows: tl.constexpr):
    """A mask that is one row too weak."""
    row = tl.arange(0, 64)
    tl.store(out_ptr + row, tl.load(x_ptr + row, mask=row <= rows, other=0))


@triton.jit
def apart_kernel(x_ptr, out_ptr):
    """Nothing of others."""
    number = tl.program_id(0) * 2 + tl.program_id(1)
    tl.store(out_ptr + number, tl.load(x_ptr + number))


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter shows what programs read and write")
class TestWhatIsSeen:
    @pytest.mark.parametrize(
        ("kernel", "fault"),
        [
            (both_write_kernel, "both_write_kernel: programs 0 and 1 write to the same place"),
            (reads_its_neighbours_kernel, "program 1 reads what program 0 writes in this launch"),
            (reads_its_own_kernel, "program 0 reads what program 0 writes in this launch"),
        ],
    )
    def test_what_depends_on_the_order_of_programs_or_threads(self, kernel: Any, fault: str) -> None:
        with launches(), pytest.raises(AssertionError, match=fault):
            kernel[(3,)](torch.zeros(80, dtype=torch.int32))

    def test_an_access_outside_of_the_tensors(self) -> None:
        x, out = torch.zeros(20, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        with launches(), pytest.raises(Exception, match="program 0 reads outside of the tensors"):
            reads_beyond_kernel[(1,)](x, out, rows=20)
        with launches():
            reads_beyond_kernel[(1,)](x, out, rows=19)

    @pytest.mark.parametrize("order", Order)
    def test_programs_run_once_each_in_the_order_that_is_asked_for(self, order: Order) -> None:
        x, out = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        with launches(order, seed=1) as seen:
            apart_kernel[(4, 2)](x, out)
        assert torch.equal(x, out) and sorted(seen.programs) == list(range(8))
        in_turn, in_reverse = seen.programs == list(range(8)), seen.programs == list(range(7, -1, -1))
        assert (in_turn, in_reverse) == (order is Order.FORWARD, order is Order.REVERSED)
