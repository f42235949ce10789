"""HSTU layers, built from small modules.

    z = norm(x) W + b ;  U, V, Q, K = split(z) ;  SiLU on U or on all four
    A = attention(Q, K, V)                                     (`attention/`)
    y = x + concat(U, A, U * norm(A)) Wo                       or  x + (U * norm(A)) Wo + bo
                                                               or  x + concat(U, norm(A), U * norm(A)) Wo + bo

Source: arXiv 2402.17152, and the variants of Meta's generative-recommenders (DLRM-v3) and NVIDIA's
recsys-examples. `LayerOptions` holds their differences. `W` is [D, H(2 dv + 2 dqk)] in the order U, V, Q, K,
head-major inside each block; `Wo` is [H dv or 3 H dv, D]. The options select modules when a layer is built, and are not
read when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.fused import FusedOutput, OutputShape, fused_output, input_norm
from relaygr.worker.model.layer_parts import (
    AddedProduct,
    Attend,
    HeadNorm,
    LayerNorm,
    RowFunction,
    added_product,
    product,
)
from relaygr.worker.model.options import Activated, OutputForm

OutputFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """The options of an HSTU layer. Sizes are per head."""

    num_heads: int
    attention_dim: int
    hidden_dim: int
    norm_eps: float
    activated: Activated
    output_form: OutputForm
    group_norm: bool
    compute_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, float32. None: the layer has no such weight."""

    input_norm_weight: torch.Tensor | None
    input_norm_bias: torch.Tensor | None
    projection_weight: torch.Tensor
    projection_bias: torch.Tensor | None
    output_norm_weight: torch.Tensor | None
    output_norm_bias: torch.Tensor | None
    output_weight: torch.Tensor
    output_bias: torch.Tensor | None

    @property
    def output_norm(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weight and bias of the output norm; None if it has neither."""
        if self.output_norm_weight is None or self.output_norm_bias is None:
            return None
        return self.output_norm_weight, self.output_norm_bias


@dataclass(frozen=True, slots=True)
class Projected:
    """The projection of some rows: u [rows, H dv]; v [rows, H, dv]; q, k [rows, H, dqk].

    If the layer's output applies SiLU to U, then u is the value before SiLU.
    """

    u: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor


class Projection:
    """Rows to U, V, Q, K: one matrix product, then SiLU in place on the activated columns."""

    def __init__(
        self, options: LayerOptions, weight: torch.Tensor, bias: torch.Tensor | None, activates_u: bool
    ) -> None:
        """`activates_u` false: the layer's output applies SiLU to U."""
        bias = weight.new_zeros(weight.shape[1]) if bias is None else bias
        self._product = product(weight, bias, options.compute_dtype)
        self._heads = options.num_heads
        u = options.num_heads * options.hidden_dim
        qk = options.num_heads * options.attention_dim
        self._split = [u, u, qk, qk]
        end = u if options.activated is Activated.U else weight.shape[1]
        self._activated = slice(0 if activates_u else u, end)

    def __call__(self, x: torch.Tensor) -> Projected:
        """x [rows, D] of the compute type; float32 for int8."""
        z = self._product(x)
        F.silu(z[:, self._activated], inplace=True)
        u, v, q, k = torch.split(z, self._split, dim=1)
        return Projected(u, self._by_head(v), self._by_head(q), self._by_head(k))

    def _by_head(self, block: torch.Tensor) -> torch.Tensor:
        return block.view(block.shape[0], self._heads, block.shape[1] // self._heads)


class PlainOutput:
    """y = x + read Wo [+ bo]; the form defines `read`."""

    def __init__(self, form: OutputForm, norm: RowFunction, product: AddedProduct) -> None:
        self._form, self._norm, self._product = form, norm, product

    def __call__(self, x: torch.Tensor, u: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        normal = self._norm(a)
        match self._form:
            case OutputForm.UNORM:
                read = normal.mul_(u)
            case OutputForm.U_A_UNORM:
                read = torch.cat((u, a, normal.mul_(u)), dim=1)
            case OutputForm.U_NA_UNORM:
                read = torch.cat((u, normal, normal * u), dim=1)
        return self._product(x, read)


class HstuLayer:
    """One layer. The caller passes the attention."""

    def __init__(self, options: LayerOptions, weights: LayerWeights) -> None:
        """Raises ValueError if a weight's shape does not fit the options."""
        w = weights
        width = w.projection_weight.shape[0]
        values = options.num_heads * options.hidden_dim
        columns = 2 * (values + options.num_heads * options.attention_dim)
        out_rows = values * options.output_form.blocks
        norm_shape = (options.num_heads,) if options.group_norm else (values,)
        _check("projection weight", w.projection_weight, (width, columns))
        _check("projection bias", w.projection_bias, (columns,))
        _check("input norm weight", w.input_norm_weight, (width,))
        _check("input norm bias", w.input_norm_bias, (width,))
        _check("output norm weight", w.output_norm_weight, norm_shape)
        _check("output norm bias", w.output_norm_bias, norm_shape)
        _check("output weight", w.output_weight, (out_rows, width))
        _check("output bias", w.output_bias, (width,))

        self._input_norm = input_norm(
            w.input_norm_weight, w.input_norm_bias, w.projection_weight, options.norm_eps, options.compute_dtype
        )
        fused = _fused_output(options, w)
        self._project = Projection(options, w.projection_weight, w.projection_bias, activates_u=fused is None)
        self._output: OutputFunction = _plain_output(options, w, values) if fused is None else fused

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [rows, D] -> y [rows, D], both float32."""
        p = self._project(self._input_norm(x))
        # Norms and the residual stream are float32. `float()` does nothing if attention returned float32.
        return self._output(x, p.u, attend(p.q, p.k, p.v).float())


def _fused_output(options: LayerOptions, w: LayerWeights) -> FusedOutput | None:
    """The output after attention in one kernel; None if the device has no such kernel."""
    shape = OutputShape(
        options.output_form, options.num_heads, options.norm_eps, options.group_norm, options.compute_dtype
    )
    return fused_output(shape, w.output_norm, w.output_weight, w.output_bias)


def _plain_output(options: LayerOptions, w: LayerWeights, values: int) -> OutputFunction:
    """The output after attention, in plain torch."""
    norm: RowFunction
    if options.group_norm:
        if w.output_norm is None:
            raise ValueError("group norm needs a weight and a bias for each head")
        norm = HeadNorm(*w.output_norm, options.num_heads, options.norm_eps)
    else:
        norm = LayerNorm(w.output_norm_weight, w.output_norm_bias, values, options.norm_eps)
    return PlainOutput(options.output_form, norm, added_product(w.output_weight, options.compute_dtype, w.output_bias))


def options_of(config: ModelConfig, compute_dtype: torch.dtype) -> LayerOptions:
    """The layer options of a configuration."""
    return LayerOptions(
        num_heads=config.num_heads,
        attention_dim=config.attention_dim,
        hidden_dim=config.hidden_dim,
        norm_eps=config.norm_eps,
        activated=config.activated,
        output_form=config.output_form,
        group_norm=config.group_norm,
        compute_dtype=compute_dtype,
    )


def hstu_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name (without the prefix of the layer) and shape of each tensor of a layer."""
    d, values = config.embedding_dim, config.num_heads * config.hidden_dim
    shapes: dict[str, tuple[int, ...]] = {}
    if config.norm_affine:
        out_norm = (config.num_heads,) if config.group_norm else (values,)
        shapes |= {"input_norm.weight": (d,), "input_norm.bias": (d,)}
        shapes |= {"output_norm.weight": out_norm, "output_norm.bias": out_norm}
    shapes["projection.weight"] = (d, config.projection_width)
    if config.projection_bias:
        shapes["projection.bias"] = (config.projection_width,)
    shapes["output.weight"] = (config.output_width, d)
    if config.output_bias:
        shapes["output.bias"] = (d,)
    return shapes


def build_hstu_layer(config: ModelConfig, weights: Mapping[str, torch.Tensor], compute_dtype: torch.dtype) -> HstuLayer:
    """A layer of a configuration. weights: float32, by the names of `hstu_shapes`."""
    return HstuLayer(
        options_of(config, compute_dtype),
        LayerWeights(
            input_norm_weight=weights.get("input_norm.weight"),
            input_norm_bias=weights.get("input_norm.bias"),
            projection_weight=weights["projection.weight"],
            projection_bias=weights.get("projection.bias"),
            output_norm_weight=weights.get("output_norm.weight"),
            output_norm_bias=weights.get("output_norm.bias"),
            output_weight=weights["output.weight"],
            output_bias=weights.get("output.bias"),
        ),
    )


def _check(name: str, weight: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if weight is not None and tuple(weight.shape) != shape:
        raise ValueError(f"{name} is {list(weight.shape)}, expected {list(shape)}")
