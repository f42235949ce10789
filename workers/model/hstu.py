"""HSTU layers, composed once from small modules, and the stack that runs them over pages.

    z = norm(x) W + b ;  U, V, Q, K = split(z) ;  SiLU on U or on all four
    A = attention(Q, K, V)                                     (`attention.py`)
    y = x + concat(U, A, U * norm(A)) Wo                       or  x + (U * norm(A)) Wo + bo
                                                               or  x + concat(U, norm(A), U * norm(A)) Wo + bo

Source: arXiv 2402.17152, and the variants of Meta's generative-recommenders (DLRM-v3) and NVIDIA's
recsys-examples, which differ in what `LayerOptions` names. `W` is [D, H(2 dv + 2 dqk)] in the order U, V, Q, K,
head-major inside each block; `Wo` is [H dv or 3 H dv, D]. Options choose modules when a layer is built; nothing
asks for them when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from workers.kv import KvDtype
from workers.model.attention import (
    PagedKv,
    attend_causal,
    attend_prefix,
    attend_self,
    attend_suffix,
    rounding,
)
from workers.model.config import Activated, ModelConfig, OutputForm

RowFunction = Callable[[torch.Tensor], torch.Tensor]
OutputFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What the layers that share the name HSTU differ in. Sizes are per head."""

    num_heads: int
    attention_dim: int
    hidden_dim: int
    norm_eps: float
    activated: Activated
    output_form: OutputForm
    group_norm: bool


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; None where the layer has none."""

    input_norm_weight: torch.Tensor | None
    input_norm_bias: torch.Tensor | None
    projection_weight: torch.Tensor
    projection_bias: torch.Tensor | None
    output_norm_weight: torch.Tensor | None
    output_norm_bias: torch.Tensor | None
    output_weight: torch.Tensor
    output_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Projected:
    """One layer's view of some rows: u [rows, H dv]; v, q, k [H, rows, dim]."""

    u: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor


class LayerNorm:
    """LayerNorm over the last dimension, with or without weight and bias."""

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, width: int, eps: float) -> None:
        self._weight, self._bias, self._shape, self._eps = weight, bias, (width,), eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class HeadNorm:
    """Each head normalised on its own, with one weight and one bias a head."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, num_heads: int, eps: float) -> None:
        self._weight, self._bias, self._num_heads, self._eps = weight[:, None], bias[:, None], num_heads, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        heads = x.view(rows, self._num_heads, columns // self._num_heads)
        normal = F.layer_norm(heads, heads.shape[-1:], None, None, self._eps)
        return torch.addcmul(self._bias, normal, self._weight).flatten(-2)


class Projection:
    """Rows to U, V, Q, K: one matrix product, and SiLU in place on the first `activated_columns`."""

    def __init__(self, options: LayerOptions, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias if bias is not None else weight.new_zeros(weight.shape[1])
        self._heads = options.num_heads
        u = options.num_heads * options.hidden_dim
        qk = options.num_heads * options.attention_dim
        self._split = [u, u, qk, qk]
        self._activated_columns = u if options.activated is Activated.U else weight.shape[1]

    def __call__(self, x: torch.Tensor) -> Projected:
        z = torch.addmm(self._bias, x, self._weight)
        F.silu(z[:, : self._activated_columns], inplace=True)
        u, v, q, k = torch.split(z, self._split, dim=1)
        return Projected(u, self._by_head(v), self._by_head(q), self._by_head(k))

    def _by_head(self, block: torch.Tensor) -> torch.Tensor:
        rows, columns = block.shape
        return block.view(rows, self._heads, columns // self._heads).transpose(0, 1)


class GatedOutput:
    """y = x + (U * norm(A)) Wo [+ bo]"""

    def __init__(self, norm: RowFunction, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._norm, self._weight, self._bias = norm, weight, bias

    def __call__(self, x: torch.Tensor, u: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(x, self._norm(a).mul_(u), self._weight)
        return y if self._bias is None else y.add_(self._bias)


class ConcatenatedOutput:
    """y = x + [U, A, U * norm(A)] Wo [+ bo], as three products, so that nothing is concatenated."""

    def __init__(self, norm: RowFunction, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._gated = GatedOutput(norm, weight.chunk(3)[2], bias)
        self._of_u, self._of_a, _ = weight.chunk(3)

    def __call__(self, x: torch.Tensor, u: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return self._gated(x, u, a).addmm_(u, self._of_u).addmm_(a, self._of_a)


class ConcatenatedNormOutput:
    """y = x + [U, norm(A), U * norm(A)] Wo [+ bo], as three products."""

    def __init__(self, norm: RowFunction, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._norm, self._bias = norm, bias
        self._of_u, self._of_normal, self._of_gated = weight.chunk(3)

    def __call__(self, x: torch.Tensor, u: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        normal = self._norm(a)
        y = torch.addmm(x, u, self._of_u).addmm_(normal, self._of_normal).addmm_(normal.mul_(u), self._of_gated)
        return y if self._bias is None else y.add_(self._bias)


_OUTPUTS: dict[OutputForm, Callable[[RowFunction, torch.Tensor, torch.Tensor | None], OutputFunction]] = {
    OutputForm.U_A_UNORM: ConcatenatedOutput,
    OutputForm.U_NA_UNORM: ConcatenatedNormOutput,
    OutputForm.UNORM: GatedOutput,
}


class HstuLayer:
    """One layer: what comes before attention, and what comes after. The caller brings the attention."""

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

        self._input_norm = LayerNorm(w.input_norm_weight, w.input_norm_bias, width, options.norm_eps)
        self._project = Projection(options, w.projection_weight, w.projection_bias)
        norm: RowFunction
        if options.group_norm:
            if w.output_norm_weight is None or w.output_norm_bias is None:
                raise ValueError("group norm needs a weight and a bias a head")
            norm = HeadNorm(w.output_norm_weight, w.output_norm_bias, options.num_heads, options.norm_eps)
        else:
            norm = LayerNorm(w.output_norm_weight, w.output_norm_bias, values, options.norm_eps)
        self._output = _OUTPUTS[options.output_form](norm, w.output_weight, w.output_bias)

    def project(self, x: torch.Tensor) -> Projected:
        """x [rows, D] -> U, V, Q, K."""
        return self._project(self._input_norm(x))

    def combine(self, x: torch.Tensor, u: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """x [rows, D], u [rows, H dv], a [rows, H dv] (divided by N) -> y [rows, D]."""
        return self._output(x, u, a)


@dataclass(frozen=True, slots=True)
class RankRows:
    """One request's part of the rows of a ranking batch."""

    start: int
    suffix_rows: int
    candidate_rows: int
    prefix_tokens: int
    pages: NDArray[np.int32]

    @property
    def end(self) -> int:
        return self.start + self.suffix_rows + self.candidate_rows


class HstuStack:
    """All layers, over K,V in pages. Takes embedded rows and gives rows; knows nothing of items or tasks."""

    def __init__(
        self, layers: Sequence[HstuLayer], options: LayerOptions, alpha: float, normalizer: float, kv_dtype: KvDtype
    ) -> None:
        self._layers = tuple(layers)
        self._heads = options.num_heads
        self._hidden = options.hidden_dim
        self._alpha = alpha
        self._scale = 1.0 / normalizer
        self._rounded = rounding(kv_dtype)

    def pre_infer(self, kv: PagedKv, x: torch.Tensor, start: int, pages: NDArray[np.int32]) -> torch.Tensor:
        """Stores K,V of rows x [tokens, D] at places start, start+1, ...; those before are in the pages already.

        Returns the rows after the last layer, which a prefix has no use for.
        """
        end = start + x.shape[0]
        spans, slots = kv.spans(pages, end), kv.slots(pages, start, end)
        for index, layer in enumerate(self._layers):
            p = layer.project(x)
            kv.write(index, slots, p.k, p.v)
            sums = self._sums(x)
            attend_causal(kv, index, spans, start, p.q * self._alpha, sums)
            x = layer.combine(x, p.u, self._by_row(sums))
        return x

    def rank(self, kv: PagedKv, x: torch.Tensor, requests: Sequence[RankRows]) -> torch.Tensor:
        """Rows x [all rows of all requests, D]; each request's are its suffix, then its candidates.

        Returns the rows after the last layer. Requests share the matrix products and nothing else.
        """
        spans = [kv.spans(request.pages, request.prefix_tokens) for request in requests]
        for index, layer in enumerate(self._layers):
            p = layer.project(x)
            q, k, v = p.q * self._alpha, self._rounded(p.k), self._rounded(p.v)
            sums = self._sums(x)
            for request, own_spans in zip(requests, spans, strict=True):
                rows = slice(request.start, request.end)
                suffix = slice(request.start, request.start + request.suffix_rows)
                candidates = slice(suffix.stop, request.end)
                attend_prefix(kv, index, own_spans, q[:, rows], sums[:, rows])
                if request.suffix_rows:
                    attend_suffix(q[:, rows], k[:, suffix], v[:, suffix], sums[:, rows])
                attend_self(q[:, candidates], k[:, candidates], v[:, candidates], sums[:, candidates])
            x = layer.combine(x, p.u, self._by_row(sums))
        return x

    def _sums(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros((self._heads, x.shape[0], self._hidden))

    def _by_row(self, sums: torch.Tensor) -> torch.Tensor:
        """[H, rows, dv] sums -> attention [rows, H dv]."""
        out = sums.new_empty((sums.shape[1], self._heads, self._hidden))
        torch.mul(sums.transpose(0, 1), self._scale, out=out)
        return out.flatten(1)


def options_of(config: ModelConfig) -> LayerOptions:
    """The layer options that a configuration asks for."""
    return LayerOptions(
        num_heads=config.num_heads,
        attention_dim=config.attention_dim,
        hidden_dim=config.hidden_dim,
        norm_eps=config.norm_eps,
        activated=config.activated,
        output_form=config.output_form,
        group_norm=config.group_norm,
    )


def layer_weights(tensors: Mapping[str, torch.Tensor], layer: int) -> LayerWeights:
    """The weights of one layer of a checkpoint."""

    def find(name: str) -> torch.Tensor | None:
        return tensors.get(f"layers.{layer}.{name}")

    return LayerWeights(
        input_norm_weight=find("input_norm.weight"),
        input_norm_bias=find("input_norm.bias"),
        projection_weight=tensors[f"layers.{layer}.projection.weight"],
        projection_bias=find("projection.bias"),
        output_norm_weight=find("output_norm.weight"),
        output_norm_bias=find("output_norm.bias"),
        output_weight=tensors[f"layers.{layer}.output.weight"],
        output_bias=find("output.bias"),
    )


def build_layers(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> list[HstuLayer]:
    """The layers of a checkpoint whose tensors were checked (`checkpoint.py`)."""
    options = options_of(config)
    return [HstuLayer(options, layer_weights(tensors, index)) for index in range(config.num_layers)]


def _check(name: str, weight: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if weight is not None and tuple(weight.shape) != shape:
        raise ValueError(f"{name} is {list(weight.shape)}, expected {list(shape)}")
