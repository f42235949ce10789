"""Whole models as test vectors: the research layers and Meta's DLRM-v3, written in numpy from the definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.worlds.vectors import Floats, Made, attend, mask_of, norm, sigmoid, silu, stu_layer, stu_weights


def research_rows(
    x: Floats,
    stamps: NDArray[np.int64],
    layers: list[dict[str, Floats]],
    heads: int,
    size: int,
    concat_ua: bool,
    middle_norm: bool = True,
) -> Floats:
    """Rows after all research layers; stamps are padded to `size`. middle_norm: of [U, A, U * norm(A)]."""
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
        heads_of = [part.reshape(length, heads, part.shape[1] // heads) for part in (q, k, v)]
        a = attend(*heads_of, mask, 1.0, size, bias).reshape(u.shape)
        gated = u * norm(a)
        read = np.concatenate((u, norm(a) if middle_norm else a, gated), 1) if concat_ua else gated
        rows = rows + read @ w["_o.weight"].T + w["_o.bias"]
    return rows


def make_research(concat_ua: bool = False, buckets: int = 20, middle_norm: bool = True) -> Made:
    """Two research layers with position and time bias."""
    random = np.random.default_rng(3)
    lengths, size, d, heads, dim = (10, 4, 1, 0), 10, 6, 2, 4
    x = random.normal(size=(15, d)).astype(np.float32)
    stamps = np.zeros((len(lengths), size), dtype=np.int64)
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
        rows = research_rows(x[start : start + length], stamps[user], layers, heads, size, concat_ua, middle_norm)
        out.append(rows)
        start += length
    meta = {"N": size, "heads": heads, "dqk": dim, "dv": dim, "eps": 1e-6, "buckets": buckets, "log_base": 0.301}
    arrays = {"x": x, "lengths": np.array(lengths), "timestamps": stamps, "y": np.concatenate(out).astype(np.float32)}
    arrays |= {f"w/_attention_layers.{k}.{name}": array for k, w in enumerate(layers) for name, array in w.items()}
    return meta | {"concat_ua": concat_ua}, arrays


def make_dlrm(
    post: str = "layernorm",
    features: int = 1,
    contextual: tuple[str, ...] = ("user_id", "region"),
    several: int = 1,
    masked: bool = False,
    group_norm: bool = False,
    since: int = 0,
    spread: int = 0,
    **options: Any,
) -> Made:
    """Meta's whole model over three users, the first of them with too few tokens for `user_id` to count.

    several: tokens of the last contextual feature, of which the second user lacks one. since: when time begins.
    spread: seconds between a user's candidates. options: others, as in the file.
    """
    random = np.random.default_rng(4)
    d, heads, dqk, dv, hidden, n, positions, buckets = 6, 2, 3, 4, 5, 40, 7, 4
    wide = 7  # Of a table, before the MLPs make d of it.
    histories, candidates = (1, 9, 0), (2, 3, 4)
    sizes = dict.fromkeys(contextual, 1)
    if contextual:
        sizes[contextual[-1]] = several
    context = sum(sizes.values())
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
    mlp_weights("_item_embedding_mlp", wide * features, hidden, d)
    mlp_weights(f"{pre}_content_embedding_mlp", wide, hidden, d)
    mlp_weights(f"{pre}_additional_embedding_mlp", wide * (features - 1), hidden, d)
    mlp_weights(f"{pre}_action_embedding_mlp", 3 * 2, hidden, d)
    weight(f"{pre}_action_encoder._action_embedding_table", 3, 2)
    weight(f"{pre}_action_encoder._target_action_embedding_table", 1, 6)
    if contextual:
        weight(f"{pre}_batched_contextual_linear_weights", context, wide, d)
        weight(f"{pre}_batched_contextual_linear_bias", context, d)
    weight("_hstu_transducer._positional_encoder._position_embeddings_weight", positions, d)
    weight("_hstu_transducer._positional_encoder._timestamp_embeddings_weight", buckets, d)
    weight(f"{after}_layer_norm.weight", d)
    weight(f"{after}_layer_norm.bias", d)
    if post != "layernorm":
        weight(f"{after}_time_feature_combiner.weight", d, d + 4)
        weight(f"{after}_time_feature_combiner.bias", d)
    layers = [stu_weights(random, d, heads, dqk, dv, group_norm) for _ in range(2)]
    for k, layer in enumerate(layers):
        w |= {f"_hstu_transducer._stu_module._stu_layers.{k}.{name}": array for name, array in layer.items()}

    def mlp(name: str, x: Floats) -> Floats:
        y = x @ w[f"{name}.0.weight"].T + w[f"{name}.0.bias"]
        y = y * sigmoid(norm(y, w[f"{name}.1.weight"], w[f"{name}.1.bias"], options.get("swish_ln_eps", 1e-5)))
        y = y @ w[f"{name}.2.weight"].T + w[f"{name}.2.bias"]
        return norm(y, w[f"{name}.3.weight"], w[f"{name}.3.bias"], 1e-5) if f"{name}.3.weight" in w else y

    total, asked = sum(histories), sum(candidates)
    arrays: dict[str, Any] = {"uih_lengths": np.array(histories), "num_candidates": np.array(candidates)}
    names = ["item", "maker", "shop"][:features]
    for name in names:
        arrays[f"in/{name}"] = random.normal(size=(total, wide)).astype(np.float32)
        arrays[f"in/c_{name}"] = random.normal(size=(asked, wide)).astype(np.float32)
    given = {name: [size] * 3 if size == 1 else [size, size - 1, size] for name, size in sizes.items()}
    for name, counts in given.items():
        arrays[f"in/{name}"] = random.normal(size=(sum(counts), wide)).astype(np.float32)
        if sizes[name] > 1:
            arrays[f"in/{name}_lengths"] = np.array(counts)
    arrays["payload/time"] = np.sort(random.integers(0, 10_000, total)) + since
    apart = np.concatenate([np.arange(count) * spread for count in candidates])
    arrays["payload/c_time"] = np.repeat([90_000, 200_000, 300_000], candidates) + since + apart
    # The last bit is an action that is unknown to the model.
    arrays["payload/action"] = random.integers(0, 16, total)

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
        values: list[Floats] = []
        for name, size in sizes.items():
            before, own = sum(given[name][:user]), given[name][user]
            rows = arrays[f"in/{name}"][before : before + own]
            rows = np.concatenate((rows, np.zeros((size - own, wide))))
            values += list(rows * (name != "user_id" or history + count >= 4))
        first = [
            value @ w[f"{pre}_batched_contextual_linear_weights"][k] + w[f"{pre}_batched_contextual_linear_bias"][k]
            for k, value in enumerate(values)
        ]
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
        window, exempt = (options.get(name, 0) for name in ("max_attn_len", "min_full_attn_seq_len"))
        mask = mask_of(x.shape[0], x.shape[0], count, contextual=context if masked else 0, window=window, exempt=exempt)
        for layer in layers:
            x, _, _ = stu_layer(x, layer, heads, dqk, dv, mask, options.get("attn_alpha", dqk**-0.5), n)
        rows = x[-count:]
        if post != "layernorm":
            # In float32, as the original: today, it counts in steps of two minutes.
            asked_at = arrays["payload/c_time"][c].astype(np.float32)
            circle = []
            for seconds, units in ((3600, 24), (86_400, 7)):
                angle = (asked_at // np.float32(seconds)).astype(float) % units / units * 2 * 3.14
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
        "stu_contextual_seq_len": context if masked else 0,
        "swish_ln_eps": "module default",
        "tasks": ["click:binary", "watch:regression"],
    }
    return meta | options, arrays
