"""The kinds of test vectors that we know, and how each is run through our layers (`KINDS`).

`stu_`, `cached_`: Meta's layer, whole and against a cache; where the mask is the engine's own, through the paged
path too, in pages and chunks of several sizes. `mask_`, `pos_`: masks and positions alone. `nv_`: NVIDIA's
attention. `research_`: the ICML'24 layer with its relative bias. `dlrm_`: Meta's whole ranking model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workers.kv import KvDtype, KvGeometry
from workers.model.attention.choose import attention_for
from workers.model.attention.paged_kv import PagedKv
from workers.model.attention.segments import Segment
from workers.model.attention.spec import AttentionSpec
from workers.model.config import Activated, OutputForm
from workers.model.dense import DenseRun, DenseStack, dense_attention
from workers.model.dlrm import DlrmInputs, DlrmModel, DlrmOptions
from workers.model.encodings import (
    TimeBuckets,
    positions_from_end,
    relative_position_bias,
    relative_time_bias,
    time_rows,
)
from workers.model.hstu import HstuLayer, LayerOptions, LayerWeights
from workers.model.masks import MaskOptions, attention_mask, grouped_mask
from workers.model.stack import Stack
from workers.model.vectors import (
    Case,
    CaseRunner,
    Checked,
    MalformedCaseError,
    NotUnderstoodError,
    compare,
    compare_exactly,
    slices,
)

_MASK_OPTIONS = frozenset({"contextual_seq_len", "max_attn_len", "min_full_attn_seq_len", "causal"})
_LAYER_OPTIONS = frozenset({"embedding_dim", "num_heads", "attention_dim", "hidden_dim", "num_layers", "norm_eps"})
_STU_OPTIONS = (
    _LAYER_OPTIONS | _MASK_OPTIONS | {"alpha", "attn_alpha", "use_group_norm", "target_aware", "N", "max_seq_len"}
)
_PAGED = ((4, 3), (64, 512))
"""(page_tokens, chunk tokens) that paged runs go through: one that cuts everything, one that cuts nothing small."""


def _mask_options(case: Case) -> MaskOptions:
    return MaskOptions(
        contextual_seq_len=case.whole("contextual_seq_len", 0),
        max_attn_len=case.whole("max_attn_len", 0),
        min_full_attn_seq_len=case.whole("min_full_attn_seq_len", 0),
        causal=case.flag("causal", True),
    )


def _normalizer(case: Case) -> float:
    return case.number("max_seq_len") if case.option("max_seq_len", 0) else case.number("N")


def _stu_options(case: Case) -> LayerOptions:
    return LayerOptions(
        num_heads=case.whole("num_heads"),
        attention_dim=case.whole("attention_dim"),
        hidden_dim=case.whole("hidden_dim"),
        norm_eps=case.number("norm_eps", 1e-6),
        activated=Activated.U,
        output_form=OutputForm.U_A_UNORM,
        group_norm=case.flag("use_group_norm", False),
    )


def stu_weights(case: Case, prefix: str) -> LayerWeights:
    """The weights of one of Meta's layers, whose names begin with `prefix`."""
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


def _alpha(case: Case, options: LayerOptions) -> float:
    """`attn_alpha` where it is set; `alpha` only repeats it or the default."""
    return case.number("attn_alpha", case.number("alpha", options.attention_dim**-0.5))


class _Stu:
    """Meta's stack of one case, dense and paged."""

    def __init__(self, case: Case) -> None:
        self.options = _stu_options(case)
        self.mask_options = _mask_options(case)
        self.target_aware = case.flag("target_aware", True)
        layers = [
            HstuLayer(self.options, stu_weights(case, f"w/layer{index}.")) for index in range(case.whole("num_layers"))
        ]
        self._layers = layers
        self._alpha, self._normalizer = _alpha(case, self.options), _normalizer(case)
        self.dense = DenseStack(layers, self._alpha, self._normalizer)

    def mask(self, length: int, num_targets: int) -> torch.Tensor:
        return attention_mask(length, length, num_targets if self.target_aware else None, self.mask_options)

    def full(self, x: torch.Tensor, num_targets: int) -> DenseRun:
        return self.dense.run(x, self.mask(x.shape[0], num_targets))

    def has_paged_path(self, suffix_rows: int) -> bool:
        """Whether the engine may compute it, with so many history rows behind the prefix."""
        o = self.mask_options
        grows = not (o.contextual_seq_len or o.min_full_attn_seq_len)
        return self.target_aware and o.causal and (grows or not suffix_rows)

    def paged(
        self, x: torch.Tensor, prefix: int, num_targets: int, page_tokens: int, chunk_tokens: int
    ) -> torch.Tensor:
        """Rows [tokens, D] after the last layer: the prefix in chunks into pages, then the rest against them."""
        o, m = self.options, self.mask_options
        geometry = KvGeometry(
            len(self._layers), o.num_heads, o.attention_dim, o.hidden_dim, page_tokens, KvDtype.FLOAT32
        )
        count = geometry.pages_for(prefix)
        kv = PagedKv(torch.zeros((count + 1, geometry.page_bytes), dtype=torch.uint8), geometry)
        pages = np.arange(count, 0, -1, dtype=np.int32)  # In descending order: the table counts, not the neighbourhood.
        spec = AttentionSpec(
            num_heads=o.num_heads,
            attention_dim=o.attention_dim,
            hidden_dim=o.hidden_dim,
            alpha=self._alpha,
            normalizer=self._normalizer,
            contextual_tokens=m.contextual_seq_len,
            max_attn_len=m.max_attn_len,
            min_full_attn_len=m.min_full_attn_seq_len,
        )
        attention, stack = attention_for(spec, None).attention, Stack(self._layers, KvDtype.FLOAT32)
        step = prefix if m.contextual_seq_len else chunk_tokens
        segments = [
            Segment(pages, start, min(start + step, prefix) - start, 0, True, prefix)
            for start in range(0, prefix, max(1, step))
        ]
        suffix = x.shape[0] - prefix - num_targets
        segments.append(Segment(pages, prefix, suffix, num_targets, False, prefix + suffix))
        rows, first = [], 0
        for segment in segments:
            if segment.rows:
                rows.append(stack(x[first : first + segment.rows], attention.begin(kv, [segment])))
            first += segment.rows
        return torch.cat(rows) if rows else x


def run_stu(case: Case) -> list[Checked]:
    """x through all layers: y, and the rows after each layer."""
    case.require_known(_STU_OPTIONS)
    stu = _Stu(case)
    x, lengths = case.floats("x"), case.lengths()
    _require_rows("x", x.shape[0], lengths)
    targets = case.targets(len(lengths), lengths) or [0] * len(lengths)
    parts = list(zip(slices(lengths), targets, strict=True))
    runs = [stu.full(x[own], count) for own, count in parts]
    checked = [compare("y", torch.cat([run.rows[-1] for run in runs]), case.floats("y"))]
    if case.has("per_layer"):
        per_layer = torch.stack([torch.cat(rows) for rows in zip(*(run.rows for run in runs), strict=True)])
        checked.append(compare("per_layer", per_layer, case.floats("per_layer")))
    if stu.has_paged_path(0):
        for page_tokens, chunk_tokens in _PAGED:
            rows = [
                stu.paged(x[own], own.stop - own.start - count, count, page_tokens, chunk_tokens)
                for own, count in parts
            ]
            checked.append(compare(f"y in pages of {page_tokens}", torch.cat(rows), case.floats("y")))
    return checked


def run_cached(case: Case) -> list[Checked]:
    """The prefix alone, its K,V, and the rest against them; and everything in one piece."""
    case.require_known(_STU_OPTIONS)
    stu = _Stu(case)
    x, lengths, prefixes = case.floats("x"), case.lengths(), case.lengths("prefix_lengths")
    _require_rows("x", x.shape[0], lengths)
    if len(prefixes) != len(lengths) or any(p > n for p, n in zip(prefixes, lengths, strict=True)):
        raise MalformedCaseError(f"prefix_lengths {prefixes} do not fit lengths {lengths}")
    targets = case.targets(len(lengths), lengths) or [0] * len(lengths)
    full: list[torch.Tensor] = []
    alone: list[DenseRun] = []
    rest: list[torch.Tensor] = []
    paged: dict[int, list[torch.Tensor]] = {page_tokens: [] for page_tokens, _ in _PAGED}
    for own, prefix, count in zip(slices(lengths), prefixes, targets, strict=True):
        length = own.stop - own.start
        rows = x[own]
        full.append(stu.full(rows, count).rows[-1])
        before = stu.dense.run(rows[:prefix], stu.mask(prefix, 0))
        alone.append(before)
        rest.append(stu.dense.run(rows[prefix:], stu.mask(length, count)[prefix:], before=before).rows[-1])
        if length - prefix >= count and stu.has_paged_path(length - prefix - count):
            for page_tokens, chunk_tokens in _PAGED:
                paged[page_tokens].append(stu.paged(rows, prefix, count, page_tokens, chunk_tokens)[prefix:])

    def flat(heads: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([one.transpose(0, 1).flatten(1) for one in heads])

    layers = range(case.whole("num_layers"))
    expected_full = case.floats("y_full")
    targets_full = [rows[rows.shape[0] - count :] for rows, count in zip(full, targets, strict=True)]
    checked = [
        compare("y_full", torch.cat(full), expected_full),
        compare("y_prefix", torch.cat([run.rows[-1] for run in alone]), case.floats("y_prefix")),
        compare("k_cache", torch.stack([flat([run.keys[i] for run in alone]) for i in layers]), case.floats("k_cache")),
        compare(
            "v_cache", torch.stack([flat([run.values[i] for run in alone]) for i in layers]), case.floats("v_cache")
        ),
        compare("y_targets_full", torch.cat(targets_full), case.floats("y_targets_full")),
    ]
    expected = case.floats("y_targets_cached")
    whole_rest = expected.shape[0] == sum(rows.shape[0] for rows in rest)

    def wanted(parts: list[torch.Tensor]) -> torch.Tensor:
        if whole_rest:
            return torch.cat(parts)
        return torch.cat([rows[rows.shape[0] - count :] for rows, count in zip(parts, targets, strict=True)])

    checked.append(compare("y_targets_cached", wanted(rest), expected))
    checked += [
        compare(f"y_targets_cached in pages of {page_tokens}", wanted(parts), expected)
        for page_tokens, parts in paged.items()
        if len(parts) == len(lengths)
    ]
    return checked


def run_mask(case: Case) -> list[Checked]:
    """The masks of all users, padding included."""
    case.require_known(_MASK_OPTIONS | {"N", "target_aware"})
    lengths, expected = case.lengths(), case.integers("mask").bool()
    options = _mask_options(case)
    targets = case.targets(len(lengths), lengths) if case.flag("target_aware", True) else None
    size = case.whole("N")
    ours = torch.stack(
        [
            attention_mask(size, length, None if targets is None else targets[user], options)
            for user, length in enumerate(lengths)
        ]
    )
    # Without targets one mask may stand for all users.
    if expected.shape[0] == 1 and bool((ours == ours[:1]).all()):
        ours = ours[:1]
    return [compare_exactly("mask", ours, expected)]


def run_pos(case: Case) -> list[Checked]:
    """Positions from the end, and embeddings with positions and times added."""
    case.require_known(frozenset({"N", "contextual", "fn", "seconds_per_unit"}))
    lengths = case.lengths()
    targets = case.targets(len(lengths), lengths)
    emb, pos, times = case.floats("emb"), case.floats("pos"), case.floats("ts_w")
    timestamps = torch.from_numpy(np.ascontiguousarray(case.array("timestamps")))
    _require_rows("emb", emb.shape[0], lengths)
    _require_rows("timestamps", timestamps.shape[0], lengths)
    try:
        fn = TimeBuckets(str(case.option("fn", "sqrt")))
    except ValueError as error:
        raise NotUnderstoodError(f"option fn={case.option('fn')!r} is not known") from error
    contextual, size = case.whole("contextual", 0), case.whole("N")
    seconds = case.number("seconds_per_unit", 60.0)
    indices, out = [], []
    for user, own in enumerate(slices(lengths)):
        length = own.stop - own.start
        places = positions_from_end(size, length, None if targets is None else targets[user], contextual, pos.shape[0])
        indices.append(places)
        added = pos[places[:length]] + times[time_rows(timestamps[own], seconds, fn, times.shape[0])]
        out.append(emb[own] + added)
    checked = [compare("out", torch.cat(out), case.floats("out"))]
    if case.has("pos_index"):
        ours, expected = torch.stack(indices), case.integers("pos_index")
        if targets is None and ours.shape == expected.shape:
            # Without targets, padding stands after the end and has no place.
            padding = torch.arange(size)[None, :] >= torch.tensor(lengths)[:, None]
            ours, expected = ours.masked_fill(padding, 0), expected.masked_fill(padding, 0)
        checked.append(compare_exactly("pos_index", ours, expected))
    return checked


def run_nv(case: Case) -> list[Checked]:
    """NVIDIA's attention: out, and its mask."""
    known = {"N", "alpha", "scaling_seqlen", "target_group_size", "max_attn_len", "min_full_attn_seq_len", "causal"}
    case.require_known(frozenset(known))
    lengths = case.lengths()
    targets = case.targets(len(lengths), lengths)
    q, k, v = case.floats("q"), case.floats("k"), case.floats("v")
    _require_rows("q", q.shape[0], lengths)
    contextuals = case.lengths("num_contextuals") if case.has("num_contextuals") else [0]
    if len(contextuals) == 1:
        contextuals *= len(lengths)
    if len(contextuals) != len(lengths):
        raise MalformedCaseError(f"num_contextuals has {len(contextuals)} entries for {len(lengths)} users")
    size = case.whole("N")
    scaling = case.number("scaling_seqlen", -1)
    normalizer = float(size) if scaling == -1 else scaling
    group_size = case.whole("target_group_size", 1)
    out, masks = [], []
    for user, own in enumerate(slices(lengths)):
        length = own.stop - own.start
        options = MaskOptions(
            contextual_seq_len=contextuals[user],
            max_attn_len=case.whole("max_attn_len", 0),
            min_full_attn_seq_len=case.whole("min_full_attn_seq_len", 0),
            causal=case.flag("causal", True),
        )
        mask = grouped_mask(size, length, None if targets is None else targets[user], group_size, options)
        masks.append(mask)
        own_q, own_k, own_v = (part[own].transpose(0, 1) for part in (q, k, v))
        seen = mask[:length, :length]
        out.append(dense_attention(own_q, own_k, own_v, seen, case.number("alpha"), normalizer).transpose(0, 1))
    checked = [compare("out", torch.cat(out), case.floats("out"))]
    if case.has("mask"):
        ours, expected = torch.stack(masks), case.integers("mask").bool()
        if expected.shape[0] == 1 and bool((ours == ours[:1]).all()):
            ours = ours[:1]
        checked.append(compare_exactly("mask", ours, expected))
    return checked


def run_research(case: Case) -> list[Checked]:
    """The research layer: SiLU on all, norms without weights, relative bias of position and time."""
    case.require_known(frozenset({"N", "heads", "dqk", "dv", "eps", "buckets", "log_base", "concat_ua"}))
    options = LayerOptions(
        num_heads=case.whole("heads"),
        attention_dim=case.whole("dqk"),
        hidden_dim=case.whole("dv"),
        norm_eps=case.number("eps"),
        activated=Activated.UVQK,
        output_form=OutputForm.U_NA_UNORM if case.flag("concat_ua", False) else OutputForm.UNORM,
        group_norm=False,
    )
    size = case.whole("N")
    layers: list[HstuLayer] = []
    position_biases: list[torch.Tensor] = []
    time_weights: list[torch.Tensor | None] = []
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
        bias = f"{prefix}_rel_attn_bias."
        position_weights = case.optional_floats(f"{bias}_pos_w")
        time_weights.append(case.optional_floats(f"{bias}_ts_w"))
        for name, weights, rows in (("_pos_w", position_weights, 2 * size - 1), ("_ts_w", time_weights[-1], None)):
            wanted = rows if rows is not None else case.whole("buckets") + 1
            if weights is not None and weights.numel() != wanted:
                raise MalformedCaseError(f"{bias}{name} has {weights.numel()} entries, expected {wanted}")
        position_biases.append(
            torch.zeros(size, size) if position_weights is None else relative_position_bias(position_weights, size)
        )
    if not layers:
        raise MalformedCaseError("w/_attention_layers.0._uvqk is missing")
    stack = DenseStack(layers, 1.0, float(size))
    x, lengths, timestamps = case.floats("x"), case.lengths(), case.integers("timestamps")
    _require_rows("x", x.shape[0], lengths)
    log_base = case.number("log_base")
    out = []
    for user, own in enumerate(slices(lengths)):
        length = own.stop - own.start
        biases = [
            (position if weights is None else position + relative_time_bias(weights, timestamps[user], log_base))[
                :length, :length
            ]
            for position, weights in zip(position_biases, time_weights, strict=True)
        ]
        mask = attention_mask(length, length, None, MaskOptions())
        out.append(stack.run(x[own], mask, biases).rows[-1])
    return [compare("y", torch.cat(out), case.floats("y"))]


def run_dlrm(case: Case) -> list[Checked]:
    """Meta's whole ranking model, from embeddings to predictions."""
    known = {"contextual", "tasks", "post", "N", "dim", "heads", "layers", "norm_eps", "post_ln_eps", "swish_ln_eps"}
    case.require_known(frozenset(known | {"stu_contextual_seq_len"}))
    post = str(case.option("post"))
    if post not in ("layernorm", "timestamp+layernorm"):
        raise NotUnderstoodError(f"option post={post!r} is not known")
    tasks = [str(task) for task in case.option("tasks")]
    kinds = [task.rpartition(":")[2] for task in tasks]
    if not set(kinds) <= {"binary", "regression"}:
        raise NotUnderstoodError(f"option tasks={tasks!r} has a kind that is not known")
    eps = case.option("swish_ln_eps", "module default")
    options = DlrmOptions(
        num_heads=case.whole("heads"),
        num_layers=case.whole("layers"),
        normalizer=case.number("N"),
        norm_eps=case.number("norm_eps"),
        readout_norm_eps=case.number("post_ln_eps"),
        mlp_norm_eps=1e-5 if eps == "module default" else case.number("swish_ln_eps"),
        uses_query_time=post == "timestamp+layernorm",
        binary=tuple(kind == "binary" for kind in kinds),
        contextual=tuple(str(name) for name in case.option("contextual", [])),
        contextual_mask_len=case.whole("stu_contextual_seq_len", 0),
    )
    weights = {name.removeprefix("w/buffer/").removeprefix("w/"): case.floats(name) for name in case.names("w/")}
    model = DlrmModel(options, weights)
    histories, candidates = case.lengths("uih_lengths"), case.lengths("num_candidates")
    items = [name.removeprefix("in/") for name in case.names("in/") if case.has(f"in/c_{name.removeprefix('in/')}")]
    if not items:
        raise MalformedCaseError("in/item or in/c_item is missing")
    _require_rows("in/item", case.floats(f"in/{items[0]}").shape[0], histories)
    for name in options.contextual:
        if case.floats(f"in/{name}").shape[0] != len(histories):
            raise NotUnderstoodError(f"contextual feature {name} has more or fewer than one token a user")
    user_rows, item_rows, scores = [], [], []
    users = zip(slices(histories), slices(candidates), strict=True)
    for user, (history, own) in enumerate(users):
        result = model(
            DlrmInputs(
                items=[torch.cat((case.floats(f"in/{n}")[history], case.floats(f"in/c_{n}")[own])) for n in items],
                contextual=[case.floats(f"in/{name}")[user : user + 1] for name in options.contextual],
                times=torch.cat((case.integers("payload/time")[history], case.integers("payload/c_time")[own])),
                actions=case.integers("payload/action")[history],
                num_candidates=own.stop - own.start,
            )
        )
        user_rows.append(result.user_rows)
        item_rows.append(result.item_rows)
        scores.append(result.scores)
    return [
        compare("candidates_user_embeddings", torch.cat(user_rows), case.floats("candidates_user_embeddings")),
        compare("candidates_item_embeddings", torch.cat(item_rows), case.floats("candidates_item_embeddings")),
        compare("preds", torch.cat(scores).T, case.floats("preds")),
    ]


KINDS: dict[str, CaseRunner] = {
    "stu_": run_stu,
    "cached_": run_cached,
    "mask_": run_mask,
    "pos_": run_pos,
    "nv_": run_nv,
    "research_": run_research,
    "dlrm_": run_dlrm,
}


def _require_rows(name: str, rows: int, lengths: list[int]) -> None:
    if rows != sum(lengths):
        raise MalformedCaseError(f"{name} has {rows} rows, lengths add up to {sum(lengths)}")
