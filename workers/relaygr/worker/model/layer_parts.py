"""The parts of layers of every family: the layer interface, norms, and products added to a residual stream; and the
dense modules of inputs and read-out: linear, norms, and MLPs of a few layers.

    swish-norm(x) = x * sigmoid(LayerNorm(x))

Weights of the dense modules are [in, out]; rows are [rows, width].

Norms compute in float32, whatever the type of the matrix products around them. A narrow type rounds the arguments of
each product, and never a sum: neither torch's products nor the residual stream accumulate in it.

A product in int8 (oneDNN, CPU) gives each row and each column of the weight a scale of its own: their largest absolute
value is 127. The sums are whole numbers, hence exact. So the result of a row does not depend on the rows beside it.

oneDNN compiles a product for each number of rows, for about 1 ms. So on the CPU rows are `padded` to few numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q, k [rows, heads, attention_dim], v [rows, heads, hidden_dim] -> A [rows, heads * hidden_dim]"""


class Layer(Protocol):
    """One layer. It holds its weights; the caller passes the attention."""

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [rows, D] float32 -> [rows, D] float32, with one call of `attend`."""


RowFunction = Callable[[torch.Tensor], torch.Tensor]


class LayerNorm:
    """LayerNorm over the last dimension, with or without weight and bias."""

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, width: int, eps: float) -> None:
        self._weight, self._bias, self._shape, self._eps = weight, bias, (width,), eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class HeadNorm:
    """Normalises each head by itself, with one weight and one bias for each head."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, num_heads: int, eps: float) -> None:
        self._weight, self._bias, self._num_heads, self._eps = weight[:, None], bias[:, None], num_heads, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        heads = x.view(rows, self._num_heads, columns // self._num_heads)
        normal = F.layer_norm(heads, heads.shape[-1:], None, None, self._eps)
        return torch.addcmul(self._bias, normal, self._weight).flatten(-2)


class AddedProduct(Protocol):
    """rows @ weight [+ bias], added to float32 rows."""

    def __call__(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns y + rows @ weight [+ bias] as a new tensor."""


_ROW_STEP = 16
_STEPS_OF_A_DOUBLING = 8


def padded_rows(count: int) -> int:
    """The number of rows that the CPU computes for so many: at most an eighth more, or a multiple of 16."""
    step = max(_ROW_STEP, (1 << max(0, count - 1).bit_length()) // (2 * _STEPS_OF_A_DOUBLING))
    return -(-count // step) * step


def padded(rows: torch.Tensor) -> torch.Tensor:
    """rows [M, K], on the CPU with rows of zeros behind them, which the caller cuts off the product."""
    if rows.device.type != "cpu":
        return rows
    missing = padded_rows(rows.shape[0]) - rows.shape[0]
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def onednn_product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """rows [M, K] @ weight [N, K]^T [+ bias] by oneDNN, on the CPU. torch itself uses oneDNN only for narrow types."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out


ONEDNN_GAINS = ((16, 1.2), (128, 1.02))
"""oneDNN is used if for each number of rows it is this many times as fast as torch's own product."""
_ROUNDS = 40
_PACKED_ROWS = 256
"""Rows for which oneDNN chooses the layout of a weight. Fewer rows are as fast with this layout as with their own."""


class _Choice:
    """Whether oneDNN computes the float32 products of this process; None: not decided yet."""

    uses_onednn: bool | None = None


def use_onednn(choice: bool) -> None:
    """Takes over another process's choice. Engines that exist keep theirs."""
    _Choice.uses_onednn = choice and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def onednn_is_faster() -> bool:
    """Whether oneDNN computes the float32 products on the CPU.

    `use_onednn` decides, or else a measurement at the first call.
    """
    if _Choice.uses_onednn is None:
        _Choice.uses_onednn = measure_onednn()
    return _Choice.uses_onednn


def measure_onednn() -> bool:
    """Whether oneDNN's float32 products are faster on this CPU than torch's own, which MKL or another BLAS computes.

    Measured as layers use them: with a packed weight, on one thread. On AMD CPUs with AVX-512, oneDNN reached twice
    MKL's rate, on some of them for a few rows only; on one without, MKL is faster for many rows. On a busy machine few
    rounds have been wrong. It takes about 100 ms to measure.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return all(_onednn_gain(rows) > gain for rows, gain in ONEDNN_GAINS)
    finally:
        torch.set_num_threads(threads)


def _onednn_gain(rows_count: int) -> float:
    """How many times as fast oneDNN's product of so many rows is; 0 without oneDNN."""
    rows, weight, bias = torch.ones(rows_count, 512), torch.ones(512, 512), torch.ones(512)
    own_s = onednn_s = float("inf")
    try:
        packed = _in_onednn_layout(weight)
        for _ in range(_ROUNDS):
            start_s = time.perf_counter()
            torch.addmm(bias, rows, weight)
            middle_s = time.perf_counter()
            onednn_product(rows, packed, bias)
            own_s = min(own_s, middle_s - start_s)
            onednn_s = min(onednn_s, time.perf_counter() - middle_s)
    # A build of torch without oneDNN has no such operator.
    except (AttributeError, RuntimeError):
        return 0.0
    return own_s / onednn_s


_PACKED_UNIT = 64
"""oneDNN rounds both sides of a weight up to at most a multiple of this."""
_COLUMN_BYTES = 12
"""Of a column of a weight in int8: its scale, its zero point, and the sum that oneDNN keeps."""


def copy_bytes(shape: Sequence[int], dtype: torch.dtype, device_type: str) -> int:
    """The most memory for the copy that a product of this type makes of its float32 weight [K, N]; 0 without a copy."""
    if dtype is torch.bfloat16:
        return math.prod(shape) * dtype.itemsize
    if dtype is torch.float32 and not _is_packed(device_type):
        return 0
    rows, columns = (-(-side // _PACKED_UNIT) * _PACKED_UNIT for side in shape)
    return rows * columns * dtype.itemsize + (columns * _COLUMN_BYTES if dtype is torch.int8 else 0)


def _is_packed(device_type: str) -> bool:
    return device_type == "cpu" and onednn_is_faster()


def _packed(weight: torch.Tensor) -> torch.Tensor | None:
    """A copy of weight [K, N] float32 in oneDNN's layout; None if torch's own product is to be used."""
    if not _is_packed(weight.device.type):
        return None
    return _in_onednn_layout(weight)


def _in_onednn_layout(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous(), _PACKED_ROWS)
    return packed


def product(weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype = torch.float32) -> RowFunction:
    """The function from rows to rows @ weight + bias, all of type `dtype`; rows and result are float32 for int8.

    `weight` and `bias` are float32.
    """
    if dtype is torch.int8:
        whole = Int8Weight(weight)
        return lambda rows: whole(rows, bias)
    if dtype is not torch.float32:
        narrow, narrow_bias = weight.to(dtype), bias.to(dtype)
        return lambda rows: torch.addmm(narrow_bias, padded(rows), narrow)[: rows.shape[0]]
    packed = _packed(weight)
    if packed is None:
        return lambda rows: torch.addmm(bias, rows, weight)
    return lambda rows: onednn_product(padded(rows), packed, bias)[: rows.shape[0]]


LARGEST = 127.0
_ZERO = 128
"""Added to the numbers of rows. For signed rows oneDNN has only its reference, which took 2,000 times as long."""
LARGEST_WEIGHT = 127.0
"""Older CPUs add pairs of products into int16, without overflow only up to 63: tests use that there."""
_SMALLEST_SCALE = 1e-30
"""The scale of numbers that are all 0."""


def quantised(
    numbers: torch.Tensor, dim: int, largest: float = LARGEST, zero: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as int8 from -largest to largest, and the scales of its rows [M, 1] (dim 1) or columns [1, N] (dim 0).

    A number is about its int8 times its scale. The scale of numbers that are not all finite is not finite. With `zero`,
    the numbers are uint8, and that much larger.
    """
    # In one call, `vector_norm` or `aminmax`, the maximum takes five times as long.
    scales = numbers.abs().amax(dim, keepdim=True).div_(largest).clamp_(_SMALLEST_SCALE)
    if zero:
        # All are positive, so the cast rounds down.
        return (numbers / scales).add_(zero + 0.5).to(torch.uint8), scales
    return (numbers / scales).round_().to(torch.int8), scales


_INT8_ROWS = 256
"""Rows of one product in int8: the float32 rows, numbers and sums of a block stay in the processor's cache."""


class Int8Weight:
    """A weight [K, N] in int8, in oneDNN's layout.

    torch's other ways do less: `quantized.linear_dynamic` has one scale for all rows, `_int_mm` does not keep a packed
    weight and writes int32, which needs another pass.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        numbers, scales = quantised(weight, 0, LARGEST_WEIGHT)
        self._packed = torch.ops.onednn.qlinear_prepack(numbers.t().contiguous(), None)
        self._scales, self._zeros = scales.flatten(), torch.zeros(weight.shape[1], dtype=torch.int32)

    def __call__(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """added + rows @ weight as a new tensor [M, N]. `added` is [N] or [M, N]."""
        out = rows.new_empty(rows.shape[0], self._scales.shape[0])
        for low in range(0, rows.shape[0], _INT8_ROWS):
            block = slice(low, low + _INT8_ROWS)
            numbers, scales = quantised(rows[block], 1, zero=_ZERO)
            sums = torch.ops.onednn.qlinear_pointwise(
                padded(numbers),
                1.0,
                _ZERO,
                self._packed,
                self._scales,
                self._zeros,
                None,
                1.0,
                0,
                torch.float32,
                "none",
                [],
                "",
            )[: numbers.shape[0]]
            torch.addcmul(added if added.dim() == 1 else added[block], sums, scales, out=out[block])
        return out


class NarrowProduct:
    """The product in a narrower type. The result is widened when it is added."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self._weight, self._dtype = weight.to(dtype), dtype

    def __call__(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return y + torch.mm(padded(rows.to(self._dtype)), self._weight)[: rows.shape[0]]


def full_product(weight: torch.Tensor) -> AddedProduct:
    """The product in float32: one fused call."""
    packed = _packed(weight)
    if packed is None:
        return lambda y, rows: torch.addmm(y, rows, weight)

    def added(y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(padded(rows), padded(y), packed, None, "add")
        return out[: rows.shape[0]]

    return added


def int8_product(weight: torch.Tensor) -> AddedProduct:
    """The product in int8 of float32 rows."""
    whole = Int8Weight(weight)
    return lambda y, rows: whole(rows, y)


def added_product(weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> AddedProduct:
    """The product for a compute type, with a bias if one is given."""
    made: AddedProduct
    if dtype is torch.int8:
        made = int8_product(weight)
    else:
        made = full_product(weight) if dtype is torch.float32 else NarrowProduct(weight, dtype)
    return made if bias is None else lambda y, rows: made(y, rows).add_(bias)


_L2_EPS = 1e-6


def linear(tensors: Mapping[str, torch.Tensor], name: str) -> RowFunction:
    """x weight + bias, with the tensors NAME.weight and NAME.bias."""
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return product(weight, bias)


def layer_norm(tensors: Mapping[str, torch.Tensor], name: str, eps: float) -> RowFunction:
    """LayerNorm with the tensors NAME.weight and NAME.bias."""
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return lambda x: F.layer_norm(x, weight.shape, weight, bias, eps)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Rows divided by their length."""
    length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp_min(_L2_EPS)


def swish_norm(tensors: Mapping[str, torch.Tensor], name: str, eps: float) -> RowFunction:
    """Swish-norm with the norm's tensors NAME.weight and NAME.bias."""
    norm = layer_norm(tensors, name, eps)
    return lambda x: x * torch.sigmoid(norm(x))


def chain(parts: Sequence[RowFunction]) -> RowFunction:
    """The functions applied in order."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        for part in parts:
            x = part(x)
        return x

    return apply


def swish_norm_mlp(tensors: Mapping[str, torch.Tensor], name: str, eps: float, swish_eps: float) -> RowFunction:
    """Linear, swish-norm, linear, LayerNorm: tensors NAME.{0, inner_norm, 1, outer_norm}. eps: of the LayerNorm."""
    return chain(
        (
            linear(tensors, f"{name}.0"),
            swish_norm(tensors, f"{name}.inner_norm", swish_eps),
            linear(tensors, f"{name}.1"),
            layer_norm(tensors, f"{name}.outer_norm", eps),
        )
    )


def swish_norm_mlp_shapes(name: str, rows: int, hidden: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of `swish_norm_mlp`."""
    return {
        f"{name}.0.weight": (rows, hidden),
        f"{name}.0.bias": (hidden,),
        f"{name}.inner_norm.weight": (hidden,),
        f"{name}.inner_norm.bias": (hidden,),
        f"{name}.1.weight": (hidden, columns),
        f"{name}.1.bias": (columns,),
        f"{name}.outer_norm.weight": (columns,),
        f"{name}.outer_norm.bias": (columns,),
    }
