"""`stu_` and `cached_`: Meta's layers, dense and over pages, whole and against a cache."""

from __future__ import annotations

import torch

from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.hstu import HstuLayer, LayerOptions, LayerWeights
from relaygr.worker.model.options import Activated, OutputForm
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
from relaygr.worker.model.vectors.runs import PAGINGS, DenseRun, DenseStack, PagedLayers, PagedRun

_LAYER_OPTIONS = frozenset({"embedding_dim", "num_heads", "attention_dim", "hidden_dim", "num_layers", "norm_eps"})
_KNOWN = _LAYER_OPTIONS | MASK_OPTIONS | {"alpha", "attn_alpha", "use_group_norm", "target_aware", "N", "max_seq_len"}


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
