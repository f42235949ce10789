"""`research_`: the ICML'24 layer with its relative bias of position and time, over pages."""

from __future__ import annotations

import numpy as np
import torch

from relaygr.worker.model.attention.bias import RelativeBiases
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.hstu import HstuLayer, LayerOptions, LayerWeights
from relaygr.worker.model.options import Activated, OutputForm, RelativeBias
from relaygr.worker.model.vectors.cases import Checked, MalformedCaseError, VectorCase, compare, require_rows, slices
from relaygr.worker.model.vectors.runs import PAGINGS, PagedLayers, SequenceTimes

_KNOWN = frozenset({"N", "heads", "dqk", "dv", "eps", "buckets", "log_base", "concat_ua"})


_CONCATENATED = (OutputForm.U_NA_UNORM, OutputForm.U_A_UNORM)
"""The possible meanings of `concat_ua`: the middle block may be A after its norm, or before."""


def run_research(case: VectorCase) -> list[Checked]:
    """Checks layers with SiLU on U, V, Q, K, norms without weights, and a relative bias by position and time.

    If `concat_ua` is set, the output form with the smaller error counts.
    """
    case.require_known(_KNOWN)
    forms = _CONCATENATED if case.flag("concat_ua", False) else (OutputForm.UNORM,)
    return min((_checked(case, form) for form in forms), key=lambda checked: max(one.error for one in checked))


def _checked(case: VectorCase, form: OutputForm) -> list[Checked]:
    options = LayerOptions(
        num_heads=case.whole("heads"),
        attention_dim=case.whole("dqk"),
        hidden_dim=case.whole("dv"),
        norm_eps=case.number("eps"),
        activated=Activated.UVQK,
        output_form=form,
        group_norm=False,
    )
    size, layers = case.whole("N"), _layers(case, options)
    biases = _biases(case, len(layers), size)
    spec = AttentionSpec(
        num_heads=options.num_heads,
        attention_dim=options.attention_dim,
        hidden_dim=options.hidden_dim,
        alpha=1.0,
        normalizer=float(size),
        has_bias=True,
    )
    paged = PagedLayers(layers, spec, biases)
    x, lengths, stamps = case.floats("x"), case.lengths(), case.integers("timestamps").numpy()
    require_rows("x", x.shape[0], lengths)
    if stamps.shape != (len(lengths), size):
        raise MalformedCaseError(f"timestamps is {list(stamps.shape)}, expected {[len(lengths), size]}")
    checked = []
    for paging in PAGINGS:
        out = []
        for user, own in enumerate(slices(lengths)):
            length = own.stop - own.start
            # The last row of the padded matrix is its own following row.
            following = np.append(stamps[user, 1:], stamps[user, -1:])[:length]
            times = SequenceTimes(stamps[user, :length], following)
            # The last third is a suffix against the pages.
            out.append(paged.run(x[own], length - length // 3, 0, *paging, times).rows)
        checked.append(compare(f"y in pages of {paging[0]}", torch.cat(out), case.floats("y")))
    return checked


def _layers(case: VectorCase, options: LayerOptions) -> list[HstuLayer]:
    layers: list[HstuLayer] = []
    while case.has(f"w/_attention_layers.{len(layers)}._uvqk"):
        prefix = f"w/_attention_layers.{len(layers)}."
        layers.append(
            HstuLayer(
                options,
                LayerWeights(
                    input_norm_weight=None,
                    input_norm_bias=None,
                    projection_weight=case.floats(f"{prefix}_uvqk"),
                    projection_bias=None,
                    output_norm_weight=None,
                    output_norm_bias=None,
                    output_weight=case.floats(f"{prefix}_o.weight").T.contiguous(),
                    output_bias=case.optional_floats(f"{prefix}_o.bias"),
                ),
            )
        )
    if not layers:
        raise MalformedCaseError("w/_attention_layers.0._uvqk is missing")
    return layers


def _biases(case: VectorCase, layers: int, size: int) -> RelativeBiases:
    """The bias tables of all layers; a missing table is zeros."""
    buckets = case.whole("buckets", 1)
    names = [f"w/_attention_layers.{layer}._rel_attn_bias." for layer in range(layers)]
    # The table of a bias by position only has another name.
    positions = [
        _table(case, f"{name}_pos_w" if case.has(f"{name}_pos_w") else f"{name}_w", 2 * size - 1) for name in names
    ]
    times = [_table(case, f"{name}_ts_w", buckets + 1) for name in names]
    config = RelativeBias(positions=size, time_buckets=buckets, log_base=case.number("log_base", 0.301))
    return RelativeBiases(config, positions, times)


def _table(case: VectorCase, name: str, rows: int) -> torch.Tensor:
    table = case.optional_floats(name)
    if table is None:
        return torch.zeros(rows)
    if table.numel() != rows:
        raise MalformedCaseError(f"{name} has {table.numel()} entries, expected {rows}")
    return table
