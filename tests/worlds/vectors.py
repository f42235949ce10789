"""Test vectors of our own: every kind computed a second time, in numpy, row by row from the definitions.

Nothing here calls the code under test. Each `make_*` gives (options, arrays) of one case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Made = tuple[dict[str, Any], dict[str, NDArray[Any]]]

LENGTHS = (9, 2, 14, 0, 5)
TARGETS = (3, 1, 4, 0, 2)


def write(path: Path, cases: dict[str, Made]) -> Path:
    """A file of cases."""
    import json

    arrays = {f"{name}/{key}": array for name, (_, found) in cases.items() for key, array in found.items()}
    meta = json.dumps({name: options for name, (options, _) in cases.items()})
    np.savez(path, **arrays, **{"meta.json": np.array(meta)})  # type: ignore[arg-type]
    return path


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def norm(x: Floats, weight: Floats | float = 1.0, bias: Floats | float = 0.0, eps: float = 1e-6) -> Floats:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


def sees(
    i: int,
    j: int,
    length: int,
    targets: int | None,
    contextual: int = 0,
    window: int = 0,
    exempt: int = 0,
    group: int | None = None,
) -> bool:
    """Whether row i sees column j, told from the table of the mask. `group`: NVIDIA's target groups."""
    history_end = length - (targets or 0)

    def place(token: int) -> int:
        if group is None and targets is not None and token > history_end:
            token = history_end
        return max(0, token - contextual + 1) if contextual else token

    if contextual and i < contextual:
        return j < history_end
    if targets is not None and i >= history_end and j >= history_end:
        if group is None:
            return i == j
        if (i - history_end) // group != (j - history_end) // group:
            return False
    if j > i:
        return False
    if i == j or not window:
        return True
    near_the_end = bool(exempt) and place(i) >= place(history_end) - exempt
    return near_the_end or place(i) - place(j) <= window


def mask_of(size: int, length: int, targets: int | None, **options: Any) -> NDArray[np.bool_]:
    visible = [[sees(i, j, length, targets, **options) for j in range(size)] for i in range(size)]
    return np.array(visible, dtype=bool).reshape(size, size)


def attend(q: Floats, k: Floats, v: Floats, mask: NDArray[np.bool_], alpha: float, n: float, bias: Any = 0.0) -> Floats:
    """q, k, v [tokens, heads, dim] -> [rows, heads, dim]."""
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    for head in range(q.shape[1]):
        weights = silu(alpha * q[:, head] @ k[:, head].T + bias) / n * mask
        out[:, head] = weights @ v[:, head]
    return out


def stu_weights(random: np.random.Generator, d: int, heads: int, dqk: int, dv: int, group_norm: bool) -> dict[str, Any]:
    width = heads if group_norm else heads * dv
    shapes = {
        "_uvqk_weight": (d, 2 * heads * (dqk + dv)),
        "_uvqk_beta": (2 * heads * (dqk + dv),),
        "_input_norm_weight": (d,),
        "_input_norm_bias": (d,),
        "_output_weight": (3 * heads * dv, d),
        "_output_norm_weight": (width,),
        "_output_norm_bias": (width,),
    }
    return {name: (random.normal(size=shape) * 0.4).astype(np.float32) for name, shape in shapes.items()}


def stu_layer(
    x: Floats,
    w: dict[str, Any],
    heads: int,
    dqk: int,
    dv: int,
    mask: NDArray[np.bool_],
    alpha: float,
    n: float,
    before: tuple[Floats, Floats] | None = None,
) -> tuple[Floats, Floats, Floats]:
    """One of Meta's layers: (y, k, v). before: K, V of earlier rows, which come first among the keys."""
    z = norm(x, w["_input_norm_weight"], w["_input_norm_bias"]) @ w["_uvqk_weight"].astype(float) + w["_uvqk_beta"]
    u, v, q, k = np.split(z, np.cumsum([heads * dv, heads * dv, heads * dqk]), axis=1)
    u, rows = silu(u), x.shape[0]
    seen_k, seen_v = (k, v) if before is None else (np.concatenate(pair) for pair in zip(before, (k, v), strict=True))
    keys, values = seen_k.reshape(-1, heads, dqk), seen_v.reshape(-1, heads, dv)
    a = attend(q.reshape(rows, heads, dqk), keys, values, mask, alpha, n)
    weight, bias = w["_output_norm_weight"], w["_output_norm_bias"]
    if weight.shape[0] == heads:
        normal = norm(a, weight[:, None], bias[:, None]).reshape(rows, heads * dv)
    else:
        normal = norm(a.reshape(rows, heads * dv), weight, bias)
    a = a.reshape(rows, heads * dv)
    return x + np.concatenate((u, a, u * normal), 1) @ w["_output_weight"], k, v


def make_stu(seed: int = 0, group_norm: bool = False, target_aware: bool = True, **options: Any) -> Made:
    """A stack of two layers; options as in the file."""
    random = np.random.default_rng(seed)
    d, heads, dqk, dv, layers, n = 8, 2, 4, 6, 2, 30
    weights = [stu_weights(random, d, heads, dqk, dv, group_norm) for _ in range(layers)]
    x = random.normal(size=(sum(LENGTHS), d)).astype(np.float32)
    alpha = options.get("attn_alpha") or dqk**-0.5
    contextual = options.get("contextual_seq_len", 0)
    lengths = [max(length, contextual + targets) for length, targets in zip(LENGTHS, TARGETS, strict=True)]
    x = random.normal(size=(sum(lengths), d)).astype(np.float32)
    per_layer: list[list[Floats]] = [[] for _ in range(layers)]
    start = 0
    for length, targets in zip(lengths, TARGETS, strict=True):
        mask = mask_of(
            length,
            length,
            targets if target_aware else None,
            contextual=contextual,
            window=options.get("max_attn_len", 0),
            exempt=options.get("min_full_attn_seq_len", 0),
        )
        rows: Floats = x[start : start + length].astype(float)
        for index, w in enumerate(weights):
            rows, _, _ = stu_layer(rows, w, heads, dqk, dv, mask, alpha, n)
            per_layer[index].append(rows)
        start += length
    stacked = np.stack([np.concatenate(rows) for rows in per_layer]).astype(np.float32)
    meta = {
        "embedding_dim": d,
        "num_heads": heads,
        "attention_dim": dqk,
        "hidden_dim": dv,
        "num_layers": layers,
        "norm_eps": 1e-6,
        "alpha": alpha,
        "max_seq_len": n,
        "history": [1, 2],
        "use_group_norm": group_norm,
        "target_aware": target_aware,
        **options,
    }
    arrays = {
        "x": x,
        "lengths": np.array(lengths),
        "num_targets": np.array(TARGETS),
        "y": stacked[-1],
        "per_layer": stacked,
    }
    arrays |= {f"w/layer{k}.{name}": array for k, w in enumerate(weights) for name, array in w.items()}
    return meta, arrays


def make_cached(seed: int = 0, suffix: int = 2, **options: Any) -> Made:
    """Prefixes, and so many suffix rows and some targets against their K,V."""
    meta, arrays = make_stu(seed, **options)
    lengths = arrays["lengths"].tolist()
    prefixes = [max(0, n - t - suffix) for n, t in zip(lengths, TARGETS, strict=True)]
    heads, dqk, dv = meta["num_heads"], meta["attention_dim"], meta["hidden_dim"]
    y_prefix, keys, values, targets_full, rest_rows = [], [[], []], [[], []], [], []
    start = 0
    masked = {
        "contextual": options.get("contextual_seq_len", 0),
        "window": options.get("max_attn_len", 0),
        "exempt": options.get("min_full_attn_seq_len", 0),
    }
    for length, count, prefix in zip(lengths, TARGETS, prefixes, strict=True):
        rows: Floats = arrays["x"][start : start + prefix].astype(float)
        rest: Floats = arrays["x"][start + prefix : start + length].astype(float)
        alone = mask_of(prefix, prefix, 0, **masked)
        whole = mask_of(length, length, count if options.get("target_aware", True) else None, **masked)
        for index in range(2):
            w = {name.split(".")[1]: a for name, a in arrays.items() if name.startswith(f"w/layer{index}.")}
            sizes = (w, heads, dqk, dv)
            rows, k, v = stu_layer(rows, *sizes, alone, meta["alpha"], meta["max_seq_len"])
            rest, _, _ = stu_layer(rest, *sizes, whole[prefix:], meta["alpha"], meta["max_seq_len"], (k, v))
            keys[index].append(k)
            values[index].append(v)
        y_prefix.append(rows)
        targets_full.append(arrays["y"][start + length - count : start + length])
        rest_rows.append(rest)
        start += length
    arrays["y_full"] = arrays.pop("y")
    del arrays["per_layer"]
    arrays |= {
        "prefix_lengths": np.array(prefixes),
        "y_prefix": np.concatenate(y_prefix).astype(np.float32),
        "k_cache": np.stack([np.concatenate(k) for k in keys]).astype(np.float32),
        "v_cache": np.stack([np.concatenate(v) for v in values]).astype(np.float32),
        "y_targets_full": np.concatenate(targets_full),
        "y_targets_cached": np.concatenate(rest_rows).astype(np.float32),
    }
    meta["N"] = meta.pop("max_seq_len")
    return meta, arrays


def make_mask(contextual: int = 0, window: int = 0, exempt: int = 0, target_aware: bool = True) -> Made:
    """Masks of users of several lengths."""
    size, lengths, targets = 12, (12, 12, 9, 7), (4, 0, 1, 2)
    # With targets, what lies beyond a sequence is as many more of them.
    users = [
        (size, size - length + count) if target_aware else (length, None)
        for length, count in zip(lengths, targets, strict=True)
    ]
    masks = [mask_of(size, *user, contextual=contextual, window=window, exempt=exempt) for user in users]
    meta = {
        "N": size,
        "contextual_seq_len": contextual,
        "max_attn_len": window,
        "min_full_attn_seq_len": exempt,
        "target_aware": target_aware,
    }
    arrays = {"mask": np.stack(masks), "lengths": np.array(lengths), "num_targets": np.array(targets)}
    return meta, arrays


def make_pos(contextual: int = 0, fn: str = "sqrt", with_targets: bool = True, unit: float = 60.0) -> Made:
    """Positions from the end and time buckets."""
    random = np.random.default_rng(1)
    size, rows, d = 14, 9, 4
    pos, times = (random.normal(size=(count, d)).astype(np.float32) for count in (rows, 6))
    emb = random.normal(size=(sum(LENGTHS), d)).astype(np.float32)
    stamps = np.sort(random.integers(0, 200_000, sum(LENGTHS)))
    index = np.zeros((len(LENGTHS), size), dtype=np.int64)
    out = emb.astype(float)
    start = 0
    for user, (length, targets) in enumerate(zip(LENGTHS, TARGETS, strict=True)):
        end = length - (targets if with_targets else 0)
        for i in range(size):
            shown = min(i, end) if with_targets else i
            index[user, i] = i if i < contextual else min(end - shown + contextual, rows - 1)
        for i in range(length):
            units = max(float(stamps[start + length - 1] - stamps[start + i]), 1e-6) / unit
            grown = np.sqrt(units) if fn == "sqrt" else max(np.log(units), 0.0)
            out[start + i] += pos[index[user, i]] + times[min(int(grown), 5)]
        start += length
    arrays = {
        "emb": emb,
        "pos": pos,
        "ts_w": times,
        "timestamps": stamps,
        "lengths": np.array(LENGTHS),
        "num_targets": np.array(TARGETS if with_targets else (), dtype=np.int64),
        "pos_index": index,
        "out": out.astype(np.float32),
    }
    return {"N": size, "contextual": contextual, "fn": fn, "seconds_per_unit": unit}, arrays


def make_nv(group: int = 1, contextuals: tuple[int, ...] = (0,), scaling: int = -1, with_targets: bool = True) -> Made:
    """NVIDIA's attention."""
    random = np.random.default_rng(2)
    lengths, size = (12, 12, 12) if with_targets else (12, 7, 9), 12
    targets = (6, 0, 3) if with_targets else (None, None, None)
    tokens = sum(lengths)
    q, k = (random.normal(size=(tokens, 2, 4)).astype(np.float32) for _ in range(2))
    v = random.normal(size=(tokens, 2, 6)).astype(np.float32)
    own = contextuals * 3 if len(contextuals) <= 1 else contextuals
    own = own or (0,) * 3
    masks = [mask_of(size, n, t, contextual=c, group=group) for n, t, c in zip(lengths, targets, own, strict=True)]
    n = size if scaling == -1 else scaling
    parts = [slice(end - length, end) for length, end in zip(lengths, np.cumsum(lengths), strict=True)]
    out = [
        attend(q[rows], k[rows], v[rows], mask[:length, :length], 0.5, n)
        for rows, mask, length in zip(parts, masks, lengths, strict=True)
    ]
    meta = {"N": size, "alpha": 0.5, "scaling_seqlen": scaling, "target_group_size": group}
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "out": np.concatenate(out).astype(np.float32),
        "mask": np.stack(masks),
        "lengths": np.array(lengths),
        "num_targets": np.array(targets if with_targets else (), dtype=np.int64),
        "num_contextuals": np.array(contextuals[0] if len(contextuals) == 1 else contextuals, dtype=np.int64),
    }
    return meta, arrays
