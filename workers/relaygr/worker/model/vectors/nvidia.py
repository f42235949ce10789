"""`nv_`: NVIDIA's attention, by the dense definition and by the back end that serves it, chunk by chunk."""

from __future__ import annotations

import numpy as np
import torch

from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.model.attention.choose import attention_for
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.vectors.cases import Checked, MalformedCaseError, VectorCase, compare, require_rows, slices
from relaygr.worker.model.vectors.masks import MaskOptions, compare_masks, grouped_mask, in_tiles
from relaygr.worker.model.vectors.runs import PAGINGS, dense_attention

_KNOWN = frozenset(
    {"N", "alpha", "scaling_seqlen", "target_group_size", "max_attn_len", "min_full_attn_seq_len", "causal"}
)
_Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run_nv(case: VectorCase) -> list[Checked]:
    """Checks the result of attention, and its mask."""
    case.require_known(_KNOWN)
    lengths = case.lengths()
    targets = case.targets(len(lengths), lengths)
    q, k, v = case.floats("q"), case.floats("k"), case.floats("v")
    require_rows("q", q.shape[0], lengths)
    contextuals = _contextuals(case, len(lengths))
    size, group_size, alpha = case.whole("N"), case.whole("target_group_size", 1), case.number("alpha")
    scaling = case.number("scaling_seqlen", -1)
    normalizer = float(size) if scaling == -1 else scaling
    out, masks, tiled = [], [], []
    paged: dict[int, list[torch.Tensor]] = {page_tokens: [] for page_tokens, _ in PAGINGS}
    for user, own in enumerate(slices(lengths)):
        length = own.stop - own.start
        options = MaskOptions(
            contextual_seq_len=contextuals[user],
            max_attn_len=case.whole("max_attn_len", 0),
            min_full_attn_seq_len=case.whole("min_full_attn_seq_len", 0),
            causal=case.flag("causal", True),
        )
        count = None if targets is None else targets[user]
        mask = grouped_mask(size, length, count, group_size, options)
        masks.append(mask)
        own_q, own_k, own_v = (part[own].transpose(0, 1) for part in (q, k, v))
        out.append(dense_attention(own_q, own_k, own_v, mask[:length, :length], alpha, normalizer).transpose(0, 1))
        history = length - (count or 0)
        # NVIDIA's window counts from the place of each target; the engine's targets have no places of their own.
        if options.causal and not options.max_attn_len and history >= contextuals[user]:
            tiled.append(in_tiles(mask, history, count, options, group_size))
            spec = _spec(q, v, alpha, normalizer, contextuals[user], group_size)
            for page_tokens, chunk_tokens in PAGINGS:
                rows = _paged(spec, (q[own], k[own], v[own]), history, page_tokens, chunk_tokens)
                paged[page_tokens].append(rows)
    expected = case.floats("out")
    checked = [compare("out", torch.cat(out), expected)]
    checked += [
        compare(f"out in pages of {page_tokens}", torch.cat(parts), expected)
        for page_tokens, parts in paged.items()
        if len(parts) == len(lengths)
    ]
    if case.has("mask"):
        seen = case.integers("mask").bool()
        checked.append(compare_masks("mask", masks, seen))
        if len(tiled) == len(lengths):
            checked.append(compare_masks("mask in tiles", tiled, seen))
    return checked


def _contextuals(case: VectorCase, users: int) -> list[int]:
    """Contextual tokens of each user. One number applies to all users; an empty array means none."""
    counts = (case.lengths("num_contextuals") if case.has("num_contextuals") else []) or [0]
    if len(counts) == 1:
        counts *= users
    if len(counts) != users:
        raise MalformedCaseError(f"num_contextuals has {len(counts)} entries for {users} users")
    return counts


def _spec(
    q: torch.Tensor, v: torch.Tensor, alpha: float, normalizer: float, contextual: int, group_size: int
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=q.shape[1],
        attention_dim=q.shape[2],
        hidden_dim=v.shape[2],
        alpha=alpha,
        normalizer=normalizer,
        contextual_tokens=contextual,
        target_group_size=group_size,
    )


def _paged(spec: AttentionSpec, qkv: _Qkv, history: int, page_tokens: int, chunk_tokens: int) -> torch.Tensor:
    """[tokens, heads, hidden_dim]: the history in chunks into pages, then the targets against the pages."""
    geometry = KvGeometry(1, spec.num_heads, spec.attention_dim, spec.hidden_dim, page_tokens, KvDtype.FLOAT32)
    count = geometry.pages_for(history)
    kv = PagedKv(torch.zeros((count + 1, geometry.page_bytes), dtype=torch.uint8), geometry)
    pages = np.arange(count, 0, -1, dtype=np.int32)
    attention = attention_for(spec, None).attention
    step = max(1, history) if spec.contextual_tokens else chunk_tokens
    segments = [
        Segment(pages, start, min(step, history - start), 0, True, history) for start in range(0, history, step)
    ]
    length = qkv[0].shape[0]
    if length > history:
        segments.append(Segment(pages, history, 0, length - history, False, history))
    parts = [qkv[2][:0].flatten(1)]
    for segment in segments:
        rows = slice(segment.context_tokens, segment.context_tokens + segment.rows)
        q, k, v = (part[rows] for part in qkv)
        parts.append(attention.begin(kv, [segment]).attend(0, q, k, v))
    return torch.cat(parts).view(length, spec.num_heads, spec.hidden_dim)
