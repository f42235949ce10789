"""The CUDA back end: HSTU attention by Triton kernels that read K,V in the pages where they lie.

A forward of any mixture of chunks and requests is two launches a layer: K,V of the chunks into their pages, and
attention of all rows (a third adds partial sums where few rows meet many keys). What a forward needs beside the rows,
one int32 array, goes to the device once (`triton_plan.py`).

It computes the plain HSTU mask, with candidates alone or in groups; `choose.py` takes it on CUDA, and says so.
Importing this module imports Triton, so nothing imports it but `accelerated.py`, when it is about to be used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from relaygr.worker.device import Device
from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment, place
from relaygr.worker.model.attention.spec import AttentionSpec, rounding
from relaygr.worker.model.triton.launch import (
    BLOCK_ROWS,
    Blocks,
    DevicePlan,
    Formula,
    LayerPages,
    attend,
    choose_block_rows,
    padded_rows,
    store,
    tuned,
)
from relaygr.worker.model.triton.plan import (
    MAX_SPLITS,
    Capacity,
    PackedPlan,
    PlanShape,
    SegmentArrays,
    arrays_of,
    choose_splits,
    pack,
)

_SPLIT_KEYS = 64
"""Keys of a block when splits are chosen; the block that is tuned may be another."""
_PROGRAMS_PER_UNIT = 2
"""Programs of the attention kernel that fit on one multiprocessor, by their registers and shared memory."""


class TritonAttention:
    """Contract: `interface.Attention`.

    `blocks` given by the caller replace the tuned ones, as under the interpreter, which has no clock to tune by.
    """

    name = "triton"

    def __init__(self, spec: AttentionSpec, device: Device, blocks: Blocks | None = None) -> None:
        """Raises ValueError for a mask that the kernels do not compute."""
        if not spec.is_plain_but_for_groups or spec.normalizer is None:
            raise ValueError("the Triton kernels compute the plain mask only, with or without groups")
        self._spec = spec
        self._formula = Formula(spec.alpha, spec.normalizer, spec.target_group_size)
        self._device = device
        # By the rows of a tile, as they become known.
        self._blocks = {} if blocks is None else dict.fromkeys(BLOCK_ROWS, blocks)

    def begin(self, kv: PagedKv, segments: Sequence[Segment]) -> TritonPass:
        arrays = self.arrays(kv, segments)
        plan = self.packed(kv, arrays, self.shape(arrays), arrays.capacity)
        return self.started(kv, plan)

    def arrays(self, kv: PagedKv, segments: Sequence[Segment]) -> SegmentArrays:
        """The segments as numbers. Raises ValueError for a segment whose pages do not hold its tokens."""
        kv.check(segments)
        # The kernels need no order among segments; the interface promises that a wrong one is refused.
        list(place(segments))
        return arrays_of(segments, kv.geometry.page_tokens)

    def shape(self, arrays: SegmentArrays) -> PlanShape:
        """How the kernels are started for these segments."""
        spec = self._spec
        longest_rows = int(arrays.rows.max(initial=0))
        longest_keys = int((arrays.context_tokens + arrays.causal_rows).max(initial=0))
        block_rows = choose_block_rows(spec.compute_dtype, longest_rows, max(spec.attention_dim, spec.hidden_dim))
        # Padding tiles end at once: those that work are to fill the device.
        programs = int((-(-arrays.rows // block_rows)).sum()) * spec.num_heads
        room = _PROGRAMS_PER_UNIT * self._device.compute_units
        return PlanShape(
            block_rows, choose_splits(programs, longest_keys, _SPLIT_KEYS, room), bool(arrays.stores.any())
        )

    def packed(self, kv: PagedKv, arrays: SegmentArrays, shape: PlanShape, capacity: Capacity) -> PackedPlan:
        """What the kernels read, on the host."""
        return pack(arrays, kv.geometry.page_tokens, shape, capacity)

    def started(self, kv: PagedKv, plan: PackedPlan) -> TritonPass:
        """A pass over that plan, on the device."""
        packed = self._device.sent(torch.from_numpy(plan.packed))
        return TritonPass(self._formula, self._device, kv, DevicePlan(plan, packed), self._blocks)

    def scratch_bytes(self, rows: int, max_tokens: int) -> int:  # noqa: ARG002 - keys stay where they are
        spec = self._spec
        # Partial sums are split only while programs are fewer than the device has room for, of 128 rows at most.
        room = _PROGRAMS_PER_UNIT * self._device.compute_units
        split = min(MAX_SPLITS * padded_rows(rows) * spec.num_heads, room * 128) * spec.hidden_dim
        return (2 * padded_rows(rows) * spec.row_width + split) * 4


class TritonPass:
    """One forward. Its plan's array may be overwritten by that of another forward of the same shape and capacity."""

    def __init__(
        self, formula: Formula, device: Device, kv: PagedKv, plan: DevicePlan, blocks: dict[int, Blocks]
    ) -> None:
        """`blocks`: by the rows of a tile; what is not there is tuned, and noted there."""
        self._formula = formula
        self._device = device
        self._kv = kv
        self._plan = plan
        self._blocks = blocks

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pages = LayerPages(self._kv.k(layer), self._kv.v(layer))
        if self._plan.plan.shape.stores:
            store(k, v, pages, self._plan)
        block_rows = self._plan.plan.shape.block_rows
        if block_rows not in self._blocks:
            self._blocks[block_rows] = tuned(q, k, v, pages, self._plan, self._formula)
        return attend(q, k, v, pages, self._plan, self._formula, self._blocks[block_rows]).flatten(1)

    def replace(self, plan: PackedPlan) -> None:
        """Describes another forward, in the same memory of the device."""
        self._device.sent(torch.from_numpy(plan.packed), self._plan.packed)


def warm_up(attention: TritonAttention, spec: AttentionSpec, geometry: KvGeometry, device: Device, tokens: int) -> None:
    """Compiles and tunes the kernels on a chunk, a batch and a single request, over scratch pages of one layer.

    `tokens`: of a long prefix, whose second half the chunk is, and whose first half the requests rank against.

    Raises whatever Triton raises where it cannot compile or run them.
    """
    one_layer = KvGeometry(
        1, geometry.num_heads, geometry.attention_dim, geometry.hidden_dim, geometry.page_tokens, geometry.dtype
    )
    pages = np.arange(one_layer.pages_for(tokens), dtype=np.int32)
    kv = PagedKv(device.empty_bytes(pages.size, one_layer.page_bytes).zero_(), one_layer)
    rounded = rounding(one_layer.dtype)

    def run(segments: Sequence[Segment]) -> None:
        rows = sum(segment.rows for segment in segments)
        # As a layer gives them: Triton compiles another kernel for other strides, and for memory that begins elsewhere.
        widths = [spec.row_width, spec.row_width, spec.key_width, spec.key_width]
        z = torch.randn((rows, sum(widths)), dtype=spec.compute_dtype, device=device.torch_device)
        _, v, q, k = (part.view(rows, spec.num_heads, -1) for part in torch.split(z, widths, 1))
        attention.begin(kv, segments).attend(0, q, rounded(k), rounded(v))

    half = tokens // 2
    suffix, candidates = tokens // 64, tokens // 16
    request = Segment(pages, half, suffix, candidates, stores=False, total_tokens=half + suffix)
    run([Segment(pages, half, half, 0, stores=True, total_tokens=tokens)])
    run([request] * 8)
    run([request])
    device.synchronize()
