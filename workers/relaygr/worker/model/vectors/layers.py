"""`stu_` and `cached_`: Meta's layers, dense and over pages, whole and against a cache; `research_`: the ICML'24 layer
with its relative bias of position and time, over pages.
"""

from __future__ import annotations

import numpy as np
import torch

from relaygr.worker.model.attention.bias import RelativeBiases
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.hstu import HstuLayer, LayerOptions, LayerWeights
from relaygr.worker.model.options import Activated, OutputForm, RelativeBias
from relaygr.worker.model.vectors.cases import (
    Checked,
    MalformedCaseError,
    VectorCase,
    alpha_of,
    compare,
    require_rows,
    slices,
)
from relaygr.worker.model.vectors.masks import MASK_OPTIONS, attention_mask, mask_options
from relaygr.worker.model.vectors.runs import PAGINGS, DenseRun, DenseStack, PagedLayers, PagedRun, SequenceTimes

_LAYER_OPTIONS = frozenset({"embedding_dim", "num_heads", "attention_dim", "hidden_dim", "num_layers", "norm_eps"})
_KNOWN = _LAYER_OPTIONS | MASK_OPTIONS | {"alpha", "attn_alpha", "use_group_norm", "target_aware", "N", "max_seq_len"}
_KNOWN_OF_RESEARCH = frozenset({"N", "heads", "dqk", "dv", "eps", "buckets", "log_base", "concat_ua"})
_CONCATENATED = (OutputForm.U_NA_UNORM, OutputForm.U_A_UNORM)
"""The possible meanings of `concat_ua`: the middle block may be A after its norm, or before."""


class _Stu:
    """The layers of one case."""

    def __init__(self, case: VectorCase) -> None:
        case.require_known(_KNOWN)
        options = LayerOptions(
            num_heads=case.whole("num_heads"),
            attention_dim=case.whole("attention_dim"),
            hidden_dim=case.whole("hidden_dim"),
            norm_eps=case.number("norm_eps", 1e-6),
            activated=Activated.U,
            output_form=OutputForm.U_A_UNORM,
            group_norm=case.flag("use_group_norm", False),
        )
        told = alpha_of(case)
        alpha = options.attention_dim**-0.5 if told is None else told
        normalizer = case.number("max_seq_len" if case.is_set("max_seq_len") else "N")
        self.num_layers = case.whole("num_layers")
        layers = [HstuLayer(options, _weights(case, f"w/layer{index}.")) for index in range(self.num_layers)]
        self._mask_options = mask_options(case)
        self.target_aware = case.flag("target_aware", True)
        self._dense = DenseStack(layers, alpha, normalizer)
        m = self._mask_options
        self._paged = PagedLayers(
            layers,
            AttentionSpec(
                num_heads=options.num_heads,
                attention_dim=options.attention_dim,
                hidden_dim=options.hidden_dim,
                alpha=alpha,
                normalizer=normalizer,
                contextual_tokens=m.contextual_seq_len,
                max_attn_len=m.max_attn_len,
                min_full_attn_len=m.min_full_attn_seq_len,
            ),
        )

    @property
    def grows(self) -> bool:
        """Whether more history rows may follow a prefix without a change of its rows."""
        return not (self._mask_options.contextual_seq_len or self._mask_options.min_full_attn_seq_len)

    def full(self, x: torch.Tensor, targets: int) -> DenseRun:
        """A whole sequence, dense."""
        mask = self._mask(x.shape[0], targets)
        return self._dense.run(x, mask)

    def rest(self, x: torch.Tensor, prefix: int, targets: int, before: DenseRun) -> torch.Tensor:
        """The rows after a computed prefix, dense."""
        mask = self._mask(x.shape[0], targets)[prefix:]
        return self._dense.run(x[prefix:], mask, before=before).rows[-1]

    def is_paged(self, length: int, targets: int) -> bool:
        """Whether the engine serves such a sequence: its mask is causal, and it has all its contextual tokens."""
        history = length - targets if self.target_aware else length
        return self._mask_options.causal and history >= self._mask_options.contextual_seq_len

    def paged(self, x: torch.Tensor, prefix: int | None, targets: int, paging: tuple[int, int]) -> PagedRun:
        """A sequence over pages, with a prefix of this length; None: of its whole history."""
        free = targets if self.target_aware else 0
        # A model that is not target-aware treats targets as history; here they are a suffix if the rules allow one.
        history = x.shape[0] - (targets if self.grows else free)
        return self._paged.run(x, history if prefix is None else prefix, free, *paging)

    def _mask(self, length: int, targets: int) -> torch.Tensor:
        return attention_mask(length, length, targets if self.target_aware else None, self._mask_options)


def _weights(case: VectorCase, prefix: str) -> LayerWeights:
    return LayerWeights(
        input_norm_weight=case.floats(f"{prefix}_input_norm_weight"),
        input_norm_bias=case.floats(f"{prefix}_input_norm_bias"),
        projection_weight=case.floats(f"{prefix}_uvqk_weight"),
        projection_bias=case.floats(f"{prefix}_uvqk_beta"),
        output_norm_weight=case.floats(f"{prefix}_output_norm_weight"),
        output_norm_bias=case.floats(f"{prefix}_output_norm_bias"),
        output_weight=case.floats(f"{prefix}_output_weight"),
        output_bias=None,
    )


def run_stu(case: VectorCase) -> list[Checked]:
    """Checks y of all layers, and the rows after each layer."""
    stu = _Stu(case)
    x, lengths = case.floats("x"), case.lengths()
    require_rows("x", x.shape[0], lengths)
    targets = case.targets(len(lengths), lengths) or [0] * len(lengths)
    parts = list(zip(slices(lengths), targets, strict=True))
    runs = [stu.full(x[own], count) for own, count in parts]
    checked = [compare("y", torch.cat([run.rows[-1] for run in runs]), case.floats("y"))]
    if case.has("per_layer"):
        per_layer = torch.stack([torch.cat(rows) for rows in zip(*(run.rows for run in runs), strict=True)])
        checked.append(compare("per_layer", per_layer, case.floats("per_layer")))
    if all(stu.is_paged(length, count) for length, count in zip(lengths, targets, strict=True)):
        for paging in PAGINGS:
            rows = [stu.paged(x[own], None, count, paging).rows for own, count in parts]
            checked.append(compare(f"y in pages of {paging[0]}", torch.cat(rows), case.floats("y")))
    return checked


def run_cached(case: VectorCase) -> list[Checked]:
    """Checks the prefix and its K,V, the other rows against them, and a full pass over all rows."""
    stu = _Stu(case)
    x, lengths, prefixes = case.floats("x"), case.lengths(), case.lengths("prefix_lengths")
    require_rows("x", x.shape[0], lengths)
    if len(prefixes) != len(lengths) or any(p > n for p, n in zip(prefixes, lengths, strict=True)):
        raise MalformedCaseError(f"prefix_lengths {prefixes} do not fit lengths {lengths}")
    targets = case.targets(len(lengths), lengths) or [0] * len(lengths)
    users = [(x[own], prefix, count) for own, prefix, count in zip(slices(lengths), prefixes, targets, strict=True)]
    full = [stu.full(rows, count).rows[-1] for rows, _, count in users]
    alone = [stu.full(rows[:prefix], 0) for rows, prefix, _ in users]
    rest = [stu.rest(rows, prefix, count, run) for (rows, prefix, count), run in zip(users, alone, strict=True)]

    def flat(heads: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([one.transpose(0, 1).flatten(1) for one in heads])

    layers = range(stu.num_layers)
    rest_of_full = [rows[prefix:] for rows, prefix in zip(full, prefixes, strict=True)]
    keys = torch.stack([flat([run.keys[layer] for run in alone]) for layer in layers])
    values = torch.stack([flat([run.values[layer] for run in alone]) for layer in layers])
    expected_full, expected = case.floats("y_targets_full"), case.floats("y_targets_cached")

    def wanted(parts: list[torch.Tensor], expected: torch.Tensor) -> torch.Tensor:
        """The rows after each prefix that the file contains: all of them, or only the targets."""
        if expected.shape[0] == sum(rows.shape[0] for rows in parts):
            return torch.cat(parts)
        return torch.cat([rows[rows.shape[0] - count :] for rows, count in zip(parts, targets, strict=True)])

    checked = [
        compare("y_full", torch.cat(full), case.floats("y_full")),
        compare("y_prefix", torch.cat([run.rows[-1] for run in alone]), case.floats("y_prefix")),
        compare("k_cache", keys, case.floats("k_cache")),
        compare("v_cache", values, case.floats("v_cache")),
        compare("y_targets_full", wanted(rest_of_full, expected_full), expected_full),
        compare("y_targets_cached", wanted(rest, expected), expected),
    ]
    served = [
        stu.is_paged(rows.shape[0], count)
        and rows.shape[0] - prefix >= count
        and (stu.grows or (stu.target_aware and rows.shape[0] - prefix == count))
        for rows, prefix, count in users
    ]
    if all(served):
        for paging in PAGINGS:
            runs = [stu.paged(rows, prefix, count, paging) for rows, prefix, count in users]
            where = f"in pages of {paging[0]}"
            behind = [run.rows[prefix:] for run, prefix in zip(runs, prefixes, strict=True)]
            checked += [
                compare(f"y_targets_cached {where}", wanted(behind, expected), expected),
                compare(f"k_cache {where}", torch.cat([run.keys for run in runs], 1), case.floats("k_cache")),
                compare(f"v_cache {where}", torch.cat([run.values for run in runs], 1), case.floats("v_cache")),
            ]
    return checked


def run_research(case: VectorCase) -> list[Checked]:
    """Checks layers with SiLU on U, V, Q, K, norms without weights, and a relative bias by position and time.

    If `concat_ua` is set, the output form with the smaller error counts.
    """
    case.require_known(_KNOWN_OF_RESEARCH)
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
