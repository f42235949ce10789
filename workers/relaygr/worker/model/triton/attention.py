"""The CUDA back end: HSTU attention by Triton kernels that read K,V directly from their pages.

A forward of any mixture of chunks and requests takes two launches in each layer: one stores K,V of the chunks in their
pages, one computes attention of all rows. A third launch adds partial sums if the keys of some tiles are split. Beside
the rows, a forward needs one int32 array (`plan.py`), which is copied to the device once.

The kernels compute every mask and bias of HSTU. `attention/choose.py` selects this back end on CUDA. Importing this
module imports Triton, so `choose.py` imports it only when it selects it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from relaygr.worker.device import Device
from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.attention.bias import RelativeBiases
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment, SegmentTimes, place
from relaygr.worker.model.attention.spec import AttentionSpec, rounding
from relaygr.worker.model.triton.launch import (
    BLOCK_ROWS,
    Blocks,
    DevicePlan,
    Formula,
    LayerPages,
    attend,
    choose_block_rows,
    kernel_biases,
    store,
    tuned,
)
from relaygr.worker.model.triton.plan import (
    Capacity,
    MaskOptions,
    PackedPlan,
    PlanShape,
    SegmentArrays,
    arrays_of,
    pack,
    padded_rows,
    split_counts,
    tiles_of,
)

_PROGRAMS_PER_UNIT = 2
"""Programs of the attention kernel for which one multiprocessor has registers and shared memory."""


class TritonAttention:
    """Contract: `attention/interface.py`.

    `blocks` replaces the tuned blocks, for example under the interpreter, where tuning is impossible.
    """

    name = "triton"

    def __init__(
        self,
        spec: AttentionSpec,
        device: Device,
        biases: RelativeBiases | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        """Raises ValueError for soft-max, and if `biases` does not agree with the specification."""
        if spec.normalizer is None or spec.has_bias is not (biases is not None):
            raise ValueError("the Triton kernels compute SiLU, and need biases exactly if the spec has them")
        self._spec = spec
        self._mask = MaskOptions(
            spec.contextual_tokens, spec.max_attn_len, spec.min_full_attn_len, spec.target_group_size
        )
        self._formula = Formula(spec.alpha, spec.normalizer, self._mask, kernel_biases(biases))
        self._needs_times = biases is not None and biases.times is not None
        # The programs that run at once, for each head.
        self._room = _PROGRAMS_PER_UNIT * device.compute_units // spec.num_heads
        self._device = device
        # The blocks of each number of rows in a tile, added when they are tuned.
        self._blocks = {} if blocks is None else dict.fromkeys(BLOCK_ROWS, blocks)

    def begin(self, kv: PagedKv, segments: Sequence[Segment]) -> TritonPass:
        arrays = self.arrays(kv, segments)
        plan = self.packed(kv, arrays, self.shape(kv, arrays), arrays.capacity)
        return self.started(kv, plan)

    def arrays(self, kv: PagedKv, segments: Sequence[Segment]) -> SegmentArrays:
        """The segments as arrays. Raises ValueError if a segment lacks pages for its tokens, or times for the bias."""
        kv.check(segments)
        # The kernels work with any order of segments, but the interface refuses a wrong order.
        list(place(segments))
        return arrays_of(segments, kv.geometry.page_tokens, self._needs_times)

    def shape(self, kv: PagedKv, arrays: SegmentArrays) -> PlanShape:
        """The launch parameters for these segments."""
        spec = self._spec
        longest_rows = int(arrays.rows.max(initial=0))
        widest = max(spec.attention_dim, spec.hidden_dim)
        is_scaled = kv.geometry.dtype.is_scaled
        block_rows = choose_block_rows(spec.compute_dtype, longest_rows, widest, spec.has_bias, is_scaled)
        keys = tiles_of(arrays, block_rows, self._mask).keys
        splits = bool((split_counts(keys, self._room) > 1).any())
        return PlanShape(block_rows, self._room if splits else 0, bool(arrays.stores.any()))

    def packed(self, kv: PagedKv, arrays: SegmentArrays, shape: PlanShape, capacity: Capacity) -> PackedPlan:
        """The plan that the kernels read, on the host."""
        return pack(arrays, kv.geometry.page_tokens, shape, capacity, self._mask)

    def started(self, kv: PagedKv, plan: PackedPlan) -> TritonPass:
        """A pass with this plan, copied to the device."""
        packed = self._device.sent(torch.from_numpy(plan.packed))
        return TritonPass(self._formula, self._device, kv, DevicePlan(plan, packed), self._blocks)

    def scratch_bytes(self, rows: int, max_tokens: int) -> int:  # noqa: ARG002 - keys are not copied
        spec = self._spec
        # A split tile has at most twice as many parts as the device has room for programs.
        parts = 2 * self._room * BLOCK_ROWS[-1]
        return (padded_rows(rows) + parts) * spec.row_width * 4


class TritonPass:
    """The attention of one forward. `replace` overwrites its plan with one of the same shape and capacity."""

    def __init__(
        self, formula: Formula, device: Device, kv: PagedKv, plan: DevicePlan, blocks: dict[int, Blocks]
    ) -> None:
        """`blocks`: the blocks for each number of rows in a tile. A missing entry is tuned and added."""
        self._formula = formula
        self._device = device
        self._kv = kv
        self._plan = plan
        self._blocks = blocks

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pages = LayerPages(self._kv.k(layer), self._kv.v(layer), layer, self._kv.exponents(layer))
        if self._plan.plan.shape.stores:
            store(k, v, pages, self._plan)
        block_rows = self._plan.plan.shape.block_rows
        if block_rows not in self._blocks:
            self._blocks[block_rows] = tuned(q, k, v, pages, self._plan, self._formula)
        return attend(q, k, v, pages, self._plan, self._formula, self._blocks[block_rows]).flatten(1)

    def replace(self, plan: PackedPlan) -> None:
        """Overwrites the plan on the device with that of another forward."""
        self._device.sent(torch.from_numpy(plan.packed), self._plan.packed)


def warm_up(attention: TritonAttention, spec: AttentionSpec, geometry: KvGeometry, device: Device, tokens: int) -> None:
    """Compiles and tunes the kernels on a chunk, a batch and a single request, over scratch pages of one layer.

    `tokens`: length of a prefix. The chunk is its second half; the requests rank against its first half.

    Passes on Triton's error if it cannot compile or run the kernels.
    """
    one_layer = KvGeometry(
        1, geometry.num_heads, geometry.attention_dim, geometry.hidden_dim, geometry.page_tokens, geometry.dtype
    )
    pages = np.arange(one_layer.pages_for(tokens), dtype=np.int32)
    kv = PagedKv(device.empty_bytes(pages.size, one_layer.page_bytes).zero_(), one_layer)
    rounded = rounding(one_layer.dtype)
    # Seconds: hours apart, as behaviours are. Models without a bias by time do not read them.
    times = np.arange(2 * tokens, dtype=np.int64) * 3600

    def with_times(segment: Segment) -> Segment:
        keys = segment.causal_tokens + segment.free_rows
        return replace(segment, times=SegmentTimes(times[:keys], times[segment.context_tokens + 1 : keys + 1]))

    def run(segments: Sequence[Segment]) -> None:
        rows = sum(segment.rows for segment in segments)
        # The strides and alignment of a layer's projection: Triton compiles another kernel for others.
        widths = [spec.row_width, spec.row_width, spec.key_width, spec.key_width]
        z = torch.randn((rows, sum(widths)), dtype=spec.compute_dtype, device=device.torch_device)
        _, v, q, k = (part.view(rows, spec.num_heads, -1) for part in torch.split(z, widths, 1))
        attention.begin(kv, [with_times(segment) for segment in segments]).attend(0, q, rounded(k), rounded(v))

    half = tokens // 2
    suffix, candidates = tokens // 64, tokens // 16
    request = Segment(pages, half, suffix, candidates, stores=False, total_tokens=half + suffix)
    run([Segment(pages, half, half, 0, stores=True, total_tokens=tokens)])
    run([request] * 8)
    run([request])
    device.synchronize()
