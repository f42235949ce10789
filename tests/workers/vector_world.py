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
    x: Floats, w: dict[str, Any], heads: int, dqk: int, dv: int, mask: NDArray[np.bool_], alpha: float, n: float
) -> tuple[Floats, Floats, Floats]:
    """One of Meta's layers: (y, k, v)."""
    z = norm(x, w["_input_norm_weight"], w["_input_norm_bias"]) @ w["_uvqk_weight"].astype(float) + w["_uvqk_beta"]
    u, v, q, k = np.split(z, np.cumsum([heads * dv, heads * dv, heads * dqk]), axis=1)
    u, rows = silu(u), x.shape[0]
    a = attend(q.reshape(rows, heads, dqk), k.reshape(rows, heads, dqk), v.reshape(rows, heads, dv), mask, alpha, n)
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


def make_cached(seed: int = 0) -> Made:
    """Prefixes, and two suffix rows and some targets against their K,V."""
    meta, arrays = make_stu(seed)
    prefixes = [max(0, n - t - 2) for n, t in zip(LENGTHS, TARGETS, strict=True)]
    heads, dqk, dv = meta["num_heads"], meta["attention_dim"], meta["hidden_dim"]
    y_prefix, keys, values, targets_full, rest_rows = [], [[], []], [[], []], [], []
    start = 0
    for length, count, prefix in zip(LENGTHS, TARGETS, prefixes, strict=True):
        rows: Floats = arrays["x"][start : start + prefix].astype(float)
        for index in range(2):
            w = {name.split(".")[1]: a for name, a in arrays.items() if name.startswith(f"w/layer{index}.")}
            causal = np.tril(np.ones((prefix, prefix), dtype=bool))
            rows, k, v = stu_layer(rows, w, heads, dqk, dv, causal, meta["alpha"], meta["max_seq_len"])
            keys[index].append(k)
            values[index].append(v)
        y_prefix.append(rows)
        targets_full.append(arrays["y"][start + length - count : start + length])
        rest_rows.append(arrays["y"][start + prefix : start + length])
        start += length
    arrays["y_full"] = arrays.pop("y")
    del arrays["per_layer"]
    arrays |= {
        "prefix_lengths": np.array(prefixes),
        "y_prefix": np.concatenate(y_prefix).astype(np.float32),
        "k_cache": np.stack([np.concatenate(k) for k in keys]).astype(np.float32),
        "v_cache": np.stack([np.concatenate(v) for v in values]).astype(np.float32),
        "y_targets_full": np.concatenate(targets_full),
        "y_targets_cached": np.concatenate(rest_rows),
    }
    meta["N"] = meta.pop("max_seq_len")
    return meta, arrays


def make_mask(contextual: int = 0, window: int = 0, exempt: int = 0) -> Made:
    """Masks of full-length users, so that what padding looks like does not matter."""
    size, targets = 12, (4, 0, 1)
    masks = [mask_of(size, size, t, contextual=contextual, window=window, exempt=exempt) for t in targets]
    meta = {"N": size, "contextual_seq_len": contextual, "max_attn_len": window, "min_full_attn_seq_len": exempt}
    arrays = {"mask": np.stack(masks), "lengths": np.full(3, size), "num_targets": np.array(targets)}
    return meta, arrays


def make_pos(contextual: int = 0, fn: str = "sqrt", with_targets: bool = True) -> Made:
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
            units = max(float(stamps[start + length - 1] - stamps[start + i]), 1e-6) / 60.0
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
    return {"N": size, "contextual": contextual, "fn": fn, "seconds_per_unit": 60.0}, arrays


def make_nv(group: int = 1, contextuals: tuple[int, ...] = (0,), scaling: int = -1) -> Made:
    """NVIDIA's attention."""
    random = np.random.default_rng(2)
    lengths, targets, size = (12, 12, 12), (6, 0, 3), 12
    q, k = (random.normal(size=(36, 2, 4)).astype(np.float32) for _ in range(2))
    v = random.normal(size=(36, 2, 6)).astype(np.float32)
    own = contextuals * 3 if len(contextuals) == 1 else contextuals
    masks = [mask_of(size, n, t, contextual=c, group=group) for n, t, c in zip(lengths, targets, own, strict=True)]
    n = size if scaling == -1 else scaling
    out = [attend(q[i : i + 12], k[i : i + 12], v[i : i + 12], masks[i // 12], 0.5, n) for i in (0, 12, 24)]
    meta = {"N": size, "alpha": 0.5, "scaling_seqlen": scaling, "target_group_size": group}
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "out": np.concatenate(out).astype(np.float32),
        "mask": np.stack(masks),
        "lengths": np.array(lengths),
        "num_targets": np.array(targets),
        "num_contextuals": np.array(contextuals[0] if len(contextuals) == 1 else contextuals),
    }
    return meta, arrays


def research_rows(
    x: Floats, stamps: NDArray[np.int64], layers: list[dict[str, Floats]], heads: int, size: int, concat_ua: bool
) -> Floats:
    """Rows after all research layers; stamps are padded to `size`."""
    rows, length = x.astype(float), x.shape[0]
    for w in layers:
        times, positions = w["_rel_attn_bias._ts_w"], w["_rel_attn_bias._pos_w"]
        bias = np.zeros((length, length))
        for i in range(length):
            following = stamps[min(i + 1, size - 1)]
            for j in range(length):
                apart = np.float32(max(abs(int(following - stamps[j])), 1))
                bucket = min(int(np.log(apart) / np.float32(0.301)), len(times) - 1)
                bias[i, j] = positions[size - 1 + j - i] + times[bucket]
        u, v, q, k = np.split(silu(norm(rows) @ w["_uvqk"].astype(float)), 4, axis=1)
        mask = np.tril(np.ones((length, length), dtype=bool))
        heads_of = [part.reshape(length, heads, -1) for part in (q, k, v)]
        a = norm(attend(*heads_of, mask, 1.0, size, bias).reshape(length, -1))
        read = np.concatenate((u, a, u * a), 1) if concat_ua else u * a
        rows = rows + read @ w["_o.weight"].T + w["_o.bias"]
    return rows


def make_research(concat_ua: bool = False) -> Made:
    """Two research layers with position and time bias."""
    random = np.random.default_rng(3)
    lengths, size, d, heads, dim, buckets = (10, 4, 1), 10, 6, 2, 4, 20
    x = random.normal(size=(15, d)).astype(np.float32)
    stamps = np.zeros((3, size), dtype=np.int64)
    for user, length in enumerate(lengths):
        stamps[user, :length] = np.sort(random.integers(0, 10**6, length))
    layers = [
        {
            "_uvqk": random.normal(size=(d, 4 * heads * dim)) * 0.4,
            "_rel_attn_bias._ts_w": random.normal(size=buckets + 1),
            "_rel_attn_bias._pos_w": random.normal(size=2 * size - 1),
            "_o.weight": random.normal(size=(d, heads * dim * (3 if concat_ua else 1))) * 0.4,
            "_o.bias": random.normal(size=d),
        }
        for _ in range(2)
    ]
    layers = [{name: array.astype(np.float32) for name, array in layer.items()} for layer in layers]
    out, start = [], 0
    for user, length in enumerate(lengths):
        rows = research_rows(x[start : start + length], stamps[user], layers, heads, size, concat_ua)
        out.append(rows)
        start += length
    meta = {"N": size, "heads": heads, "dqk": dim, "dv": dim, "eps": 1e-6, "buckets": buckets, "log_base": 0.301}
    arrays = {"x": x, "lengths": np.array(lengths), "timestamps": stamps, "y": np.concatenate(out).astype(np.float32)}
    arrays |= {f"w/_attention_layers.{k}.{name}": array for k, w in enumerate(layers) for name, array in w.items()}
    return meta | {"concat_ua": concat_ua}, arrays


def make_dlrm(post: str = "layernorm", features: int = 1, contextual: tuple[str, ...] = ("user_id", "region")) -> Made:
    """Meta's whole model over two users, the first of them with too few tokens for `user_id` to count."""
    random = np.random.default_rng(4)
    d, heads, dqk, dv, hidden, n, positions, buckets = 6, 2, 3, 4, 5, 40, 7, 4
    histories, candidates = (1, 9), (2, 3)
    pre, after = "_hstu_transducer._input_preprocessor.", "_hstu_transducer._output_postprocessor."
    w: dict[str, Any] = {}

    def weight(name: str, *shape: int) -> None:
        w[name] = (random.normal(size=shape) * 0.5).astype(np.float32)

    def mlp_weights(name: str, rows: int, inner: int, columns: int, outer_norm: bool = True) -> None:
        weight(f"{name}.0.weight", inner, rows)
        weight(f"{name}.2.weight", columns, inner)
        for part, size in (("0.bias", inner), ("1.weight", inner), ("1.bias", inner), ("2.bias", columns)):
            weight(f"{name}.{part}", size)
        if outer_norm:
            weight(f"{name}.3.weight", columns)
            weight(f"{name}.3.bias", columns)

    mlp_weights("_multitask_module._prediction_module", d, hidden, 2, outer_norm=False)
    mlp_weights("_item_embedding_mlp", d * features, hidden, d)
    mlp_weights(f"{pre}_content_embedding_mlp", d, hidden, d)
    mlp_weights(f"{pre}_additional_embedding_mlp", d * (features - 1), hidden, d)
    mlp_weights(f"{pre}_action_embedding_mlp", 3 * 2, hidden, d)
    weight(f"{pre}_action_encoder._action_embedding_table", 3, 2)
    weight(f"{pre}_action_encoder._target_action_embedding_table", 1, 6)
    if contextual:
        weight(f"{pre}_batched_contextual_linear_weights", len(contextual), d, d)
        weight(f"{pre}_batched_contextual_linear_bias", len(contextual), d)
    weight("_hstu_transducer._positional_encoder._position_embeddings_weight", positions, d)
    weight("_hstu_transducer._positional_encoder._timestamp_embeddings_weight", buckets, d)
    weight(f"{after}_layer_norm.weight", d)
    weight(f"{after}_layer_norm.bias", d)
    if post != "layernorm":
        weight(f"{after}_time_feature_combiner.weight", d, d + 4)
        weight(f"{after}_time_feature_combiner.bias", d)
    layers = [stu_weights(random, d, heads, dqk, dv, False) for _ in range(2)]
    for k, layer in enumerate(layers):
        w |= {f"_hstu_transducer._stu_module._stu_layers.{k}.{name}": array for name, array in layer.items()}

    def mlp(name: str, x: Floats) -> Floats:
        y = x @ w[f"{name}.0.weight"].T + w[f"{name}.0.bias"]
        y = y * sigmoid(norm(y, w[f"{name}.1.weight"], w[f"{name}.1.bias"], 1e-5))
        y = y @ w[f"{name}.2.weight"].T + w[f"{name}.2.bias"]
        return norm(y, w[f"{name}.3.weight"], w[f"{name}.3.bias"], 1e-5) if f"{name}.3.weight" in w else y

    total, asked = sum(histories), sum(candidates)
    arrays: dict[str, Any] = {"uih_lengths": np.array(histories), "num_candidates": np.array(candidates)}
    names = ["item", "maker", "shop"][:features]
    for name in names:
        arrays[f"in/{name}"] = random.normal(size=(total, d)).astype(np.float32)
        arrays[f"in/c_{name}"] = random.normal(size=(asked, d)).astype(np.float32)
    for name in contextual:
        arrays[f"in/{name}"] = random.normal(size=(2, d)).astype(np.float32)
    arrays["payload/time"] = np.sort(random.integers(0, 10_000, total))
    arrays["payload/c_time"] = np.repeat([90_000, 200_000], candidates)
    arrays["payload/action"] = random.integers(0, 8, total)

    users, items, preds, at, at_c = [], [], [], 0, 0
    for user, (history, count) in enumerate(zip(histories, candidates, strict=True)):
        h, c = slice(at, at + history), slice(at_c, at_c + count)
        at, at_c = at + history, at_c + count
        feats = [np.concatenate((arrays[f"in/{name}"][h], arrays[f"in/c_{name}"][c])) for name in names]
        item_rows = mlp("_item_embedding_mlp", np.concatenate(feats, 1)[history:])
        x = mlp(f"{pre}_content_embedding_mlp", feats[0])
        if features > 1:
            x = x + mlp(f"{pre}_additional_embedding_mlp", np.concatenate(feats[1:], 1))
        table = w[f"{pre}_action_encoder._action_embedding_table"]
        bits = [
            np.concatenate([table[b] * bool(action & (1, 2, 4)[b]) for b in range(3)])
            for action in arrays["payload/action"][h]
        ]
        of_targets = [w[f"{pre}_action_encoder._target_action_embedding_table"][0]] * count
        x = x + mlp(f"{pre}_action_embedding_mlp", np.stack(bits + of_targets))
        first = []
        for k, name in enumerate(contextual):
            row = arrays[f"in/{name}"][user] * (name != "user_id" or history + count >= 4)
            weights = w[f"{pre}_batched_contextual_linear_weights"][k]
            first.append(row @ weights + w[f"{pre}_batched_contextual_linear_bias"][k])
        x = np.concatenate((np.array(first).reshape(-1, d), x))
        stamps = np.concatenate(
            (np.zeros(len(first), np.int64), arrays["payload/time"][h], arrays["payload/c_time"][c])
        )
        end = len(first) + history
        for i in range(x.shape[0]):
            place = i if i < len(first) else min(end - min(i, end) + len(first), positions - 1)
            bucket = min(int(np.sqrt(max(float(stamps[-1] - stamps[i]), 1e-6) / 60.0)), buckets - 1)
            encoder = "_hstu_transducer._positional_encoder."
            x[i] = x[i] * d**0.5 + w[f"{encoder}_position_embeddings_weight"][place]
            x[i] += w[f"{encoder}_timestamp_embeddings_weight"][bucket]
        mask = mask_of(x.shape[0], x.shape[0], count)
        for layer in layers:
            x, _, _ = stu_layer(x, layer, heads, dqk, dv, mask, dqk**-0.5, n)
        rows = x[-count:]
        if post != "layernorm":
            asked_at = arrays["payload/c_time"][c].astype(float)
            circle = []
            for seconds, units in ((3600, 24), (86_400, 7)):
                angle = (asked_at // seconds) % units / units * 2 * 3.14
                circle += [np.cos(angle), np.sin(angle)]
            rows = np.concatenate((rows, np.stack(circle, 1)), 1) @ w[f"{after}_time_feature_combiner.weight"].T
            rows = rows + w[f"{after}_time_feature_combiner.bias"]
        rows = norm(rows, w[f"{after}_layer_norm.weight"], w[f"{after}_layer_norm.bias"], 1e-5)
        logits = mlp("_multitask_module._prediction_module", rows * item_rows)
        users.append(rows)
        items.append(item_rows)
        preds.append(np.stack((sigmoid(logits[:, 0]), logits[:, 1])))
    arrays["candidates_user_embeddings"] = np.concatenate(users).astype(np.float32)
    arrays["candidates_item_embeddings"] = np.concatenate(items).astype(np.float32)
    arrays["preds"] = np.concatenate(preds, 1).astype(np.float32)
    arrays |= {f"w/{name}": array for name, array in w.items()}
    arrays[f"w/buffer/{pre}_action_encoder._combined_action_weights"] = np.array([1, 2, 4])
    if post != "layernorm":
        arrays[f"w/buffer/{after}_period_units"] = np.array([[3600.0, 86_400.0]], np.float32)
        arrays[f"w/buffer/{after}_units_per_period"] = np.array([[24.0, 7.0]], np.float32)
    meta = {
        "N": n,
        "contextual": list(contextual),
        "dim": d,
        "heads": heads,
        "layers": 2,
        "norm_eps": 1e-6,
        "post": post,
        "post_ln_eps": 1e-5,
        "stu_contextual_seq_len": 0,
        "swish_ln_eps": "module default",
        "tasks": ["click:binary", "watch:regression"],
    }
    return meta, arrays
