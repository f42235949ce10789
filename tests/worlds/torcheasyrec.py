"""TorchEasyRec's DlrmHSTU: a small model, its files, and what it scores, told in numpy from the definitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from tests.worlds.distributed import save_distributed
from tests.worlds.vectors import Floats, mask_of, norm, sigmoid, silu, stu_layer, stu_weights

D, HEADS, DQK, DV, LAYERS, HIDDEN, N = 8, 2, 3, 4, 2, 5, 50
ITEMS, MAKERS, USERS, REGIONS = 20, 6, 9, 3
PERIODS = ((3600, 24), (86_400, 7))
_PRE, _POST = "_hstu_transducer._input_preprocessor.", "_hstu_transducer._output_postprocessor."


@dataclass(slots=True)
class TorchEasyRec:
    """A full model has contextual features, actions, a feature of items, ages and a tower; a bare one has none."""

    full: bool
    weights: dict[str, Floats] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    makers: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def pipeline(self) -> str:
        """As training saves it."""
        contextual = _group("contextual", "user_id", "region") if self.full else ""
        candidate = _group("candidate", "item_video_id", *(["item_maker"] if self.full else []))
        encoder = "use_time_encoding: true num_time_buckets: 6" if self.full else ""
        post = (
            "timestamp_layernorm_postprocessor { time_duration_period_units: [3600, 86400] "
            "time_duration_units_per_period: [24, 7] }"
            if self.full
            else "l2norm_postprocessor {}"
        )
        actions = (
            "action_encoder { simple_action_encoder { action_embedding_dim: 2 action_weights: [1, 2] "
            "watchtime_to_action_thresholds: [30] watchtime_to_action_weights: [4] } } "
            f"action_mlp {{ simple_mlp {{ hidden_dim: {HIDDEN} }} }}"
            if self.full
            else ""
        )
        tower = 'mlp { hidden_units: 6 hidden_units: 4 activation: "nn.SiLU" use_ln: true }' if self.full else ""
        return f"""
train_input_path: "odps://project/tables/train"  # a comment
data_config {{ batch_size: 32 label_fields: ["a", 'b'] }}
feature_configs {{
    sequence_id_feature {{ feature_name: "video_id" num_buckets: {ITEMS} embedding_name: "video_emb" }}
}}
feature_configs {{
    sequence_id_feature {{ feature_name: "item_video_id" num_buckets: {ITEMS} embedding_name: "video_emb" }}
}}
feature_configs {{ sequence_id_feature {{ feature_name: "item_maker" num_buckets: {MAKERS} }} }}
feature_configs {{ id_feature {{ feature_name: "user_id" hash_bucket_size: {USERS} }} }}
feature_configs: {{ id_feature: {{ feature_name: "region" num_buckets: {REGIONS} }} }}
model_config {{
    {contextual}
    {_group("uih", "video_id")}
    {candidate}
    dlrm_hstu {{
        hstu {{
            stu {{ embedding_dim: {D} num_heads: {HEADS} hidden_dim: {DV} attention_dim: {DQK} max_attn_len: 6 }}
            attn_num_layers: {LAYERS}
            positional_encoder {{ num_position_buckets: 12 {encoder} }}
            input_preprocessor {{
                contextual_preprocessor {{
                    {actions}
                    content_encoder {{ slice_content_encoder {{}} }}
                    content_mlp {{ simple_mlp {{ hidden_dim: {HIDDEN} }} }}
                }}
            }}
            output_postprocessor {{ {post} }}
        }}
        fusion_mtl_tower {{
            {tower}
            task_configs {{ task_name: "is_click" label_name: "a" losses {{ binary_cross_entropy {{}} }} }}
            task_configs {{ task_name: "watch" label_name: "b" losses {{ l2_loss {{}} }} }}
        }}
        max_seq_len: {N}
        item_embedding_hidden_dim: 7
    }}
}}
"""

    def save(self, folder: Path, ranks: int = 2) -> Path:
        """The folder of a model as training leaves it; returns that of the checkpoint. Tables are half precision."""
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in self.weights.items()}
        for k, layer in enumerate(self.layers):
            for name, array in layer.items():
                tensors[f"_hstu_transducer._stu_module._stu_layers.{k}.{name}"] = torch.from_numpy(array)
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        tables = {name: tensors.pop(name).half() for name in list(tensors) if "embedding_group." in name}
        checkpoint = folder / "model.ckpt-10"
        save_distributed(checkpoint / "model", tables, tensors, ranks)
        save_distributed(checkpoint / "optimizer", {}, {"state.step": torch.ones(1)}, ranks=1)
        (folder / "pipeline.config").write_text(self.pipeline())
        return checkpoint

    def scores(
        self, features: list[int], history: Behaviours, candidates: NDArray[np.int64], query_time_s: int
    ) -> Floats:
        """The predictions [candidates, tasks] of one request."""
        w = self.weights
        video = w[_table("video_emb")]
        of_candidates = video[candidates]
        if self.full:
            of_candidates = np.concatenate((of_candidates, w[_table("item_maker_emb")][self.makers[candidates]]), 1)
        # The slice of the candidates is as wide as the history.
        content = np.concatenate((video[history.items], of_candidates[:, : video.shape[1]]))
        x = self._mlp(f"{_PRE}_content_embedding_mlp._mlp", content)
        if self.full:
            table = w[f"{_PRE}_action_encoder._action_embedding_table"]
            bits = [
                np.concatenate([table[k] * bool(int(action) & (1, 2, 4)[k]) for k in range(3)])
                for action in history.actions
            ]
            bits += [w[f"{_PRE}_action_encoder._target_action_embedding_table"][0]] * candidates.size
            x = x + self._mlp(f"{_PRE}_action_embedding_mlp._mlp", np.stack(bits))
            values = (w[_bag("user_id_emb")][features[0]], w[_bag("region_emb")][features[1]])
            first = [
                value @ w[f"{_PRE}_batched_contextual_linear_weights"][k]
                + w[f"{_PRE}_batched_contextual_linear_bias"][k, 0]
                for k, value in enumerate(values)
            ]
            x = np.concatenate((np.stack(first), x))
        context = 2 if self.full else 0
        x = x * D**0.5 + self._encoded(context, history, candidates.size, query_time_s)
        mask = mask_of(len(x), len(x), candidates.size, contextual=context, window=6)
        for layer in self.layers:
            x, _, _ = stu_layer(x, layer, HEADS, DQK, DV, mask, DQK**-0.5, N)
        rows = self._finished(x[-candidates.size :], query_time_s)
        features_of_tower = rows * self._mlp("_item_embedding_mlp", of_candidates)
        for k in range(2 if self.full else 0):
            name = f"_multitask_module.tower_mlp.mlp.{k}.perceptron."
            y = features_of_tower @ w[f"{name}0.weight"].T + w[f"{name}0.bias"]
            features_of_tower = silu(norm(y, w[f"{name}1.weight"], w[f"{name}1.bias"], 1e-5))
        out = features_of_tower @ w["_multitask_module.linear.weight"].T + w["_multitask_module.linear.bias"]
        return np.stack((sigmoid(out[:, 0]), out[:, 1]), 1)

    def _encoded(self, context: int, history: Behaviours, candidates: int, query_time_s: int) -> Floats:
        places = self.weights["_hstu_transducer._positional_encoder._position_embeddings_weight"]
        end, size = context + len(history), context + len(history) + candidates
        if not self.full:
            return places[[min(i, end, len(places) - 1) for i in range(size)]]
        ages = self.weights["_hstu_transducer._positional_encoder._timestamp_embeddings_weight"]
        stamps = [0] * context + [time // 1000 for time in history.timestamps_ms.tolist()] + [query_time_s] * candidates
        rows = []
        for i, stamp in enumerate(stamps):
            place = i if i < context else min(end - min(i, end) + context, len(places) - 1)
            age = int(min(np.sqrt(max(query_time_s - stamp, 1e-6) / 60.0), len(ages) - 1))
            rows.append(places[place] + ages[age])
        return np.stack(rows)

    def _finished(self, rows: Floats, query_time_s: int) -> Floats:
        w = self.weights
        if not self.full:
            return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))
        circle: list[float] = []
        for seconds, units in PERIODS:
            angle = (query_time_s // seconds) % units / units * 2 * 3.14
            circle += [np.cos(angle), np.sin(angle)]
        joined = np.concatenate((rows, np.tile(circle, (len(rows), 1))), 1)
        rows = joined @ w[f"{_POST}_time_feature_combiner.weight"].T + w[f"{_POST}_time_feature_combiner.bias"]
        return norm(rows, w[f"{_POST}_layer_norm.weight"], w[f"{_POST}_layer_norm.bias"], 1e-5)

    def _mlp(self, name: str, x: Floats) -> Floats:
        w = self.weights
        y = x @ w[f"{name}.0.weight"].T + w[f"{name}.0.bias"]
        y = y * sigmoid(norm(y, w[f"{name}.1.weight"], w[f"{name}.1.bias"], 1e-5))
        y = y @ w[f"{name}.2.weight"].T + w[f"{name}.2.bias"]
        return norm(y, w[f"{name}.3.weight"], w[f"{name}.3.bias"], 1e-5)


def _group(name: str, *features: str) -> str:
    listed = " ".join(f'feature_names: "{feature}"' for feature in features)
    return f'feature_groups {{ group_name: "{name}" {listed} group_type: JAGGED_SEQUENCE }}'


def _table(name: str) -> str:
    width = 4 if name == "video_emb" else 3
    return f"embedding_group.seq_emb_impls.__BASE__.ec_dict.{width}.embeddings.{name}.weight"


def _bag(name: str) -> str:
    return f"embedding_group.emb_impls.__BASE__.ebc.embedding_bags.{name}.weight"


def make_torcheasyrec(full: bool = True) -> TorchEasyRec:
    """Tables of different widths: the item 4, its maker 3, contextual features 9 (wider than a candidate's 7)."""
    random = np.random.default_rng(11)
    made = TorchEasyRec(full, makers=random.integers(0, MAKERS, ITEMS))
    w = made.weights

    def weight(name: str, *shape: int) -> None:
        w[name] = (random.normal(size=shape) * 0.5).astype(np.float32)

    def mlp(name: str, rows: int, inner: int) -> None:
        weight(f"{name}.0.weight", inner, rows)
        weight(f"{name}.2.weight", D, inner)
        for part, size in (("0.bias", inner), ("1.weight", inner), ("1.bias", inner), ("2.bias", D)):
            weight(f"{name}.{part}", size)
        weight(f"{name}.3.weight", D)
        weight(f"{name}.3.bias", D)

    weight(_table("video_emb"), ITEMS, 4)
    mlp(f"{_PRE}_content_embedding_mlp._mlp", 4, HIDDEN)
    mlp("_item_embedding_mlp", 7 if full else 4, 7)
    weight("_hstu_transducer._positional_encoder._position_embeddings_weight", 12, D)
    if full:
        weight(_table("item_maker_emb"), MAKERS, 3)
        weight(_bag("user_id_emb"), USERS, 9)
        weight(_bag("region_emb"), REGIONS, 9)
        mlp(f"{_PRE}_action_embedding_mlp._mlp", 6, HIDDEN)
        weight(f"{_PRE}_action_encoder._action_embedding_table", 3, 2)
        weight(f"{_PRE}_action_encoder._target_action_embedding_table", 1, 6)
        weight(f"{_PRE}_batched_contextual_linear_weights", 2, 9, D)
        weight(f"{_PRE}_batched_contextual_linear_bias", 2, 1, D)
        weight("_hstu_transducer._positional_encoder._timestamp_embeddings_weight", 7, D)
        weight(f"{_POST}_layer_norm.weight", D)
        weight(f"{_POST}_layer_norm.bias", D)
        weight(f"{_POST}_time_feature_combiner.weight", D, D + 4)
        weight(f"{_POST}_time_feature_combiner.bias", D)
        for k, (rows, columns) in enumerate(((D, 6), (6, 4))):
            name = f"_multitask_module.tower_mlp.mlp.{k}.perceptron."
            weight(f"{name}0.weight", columns, rows)
            for part in ("0.bias", "1.weight", "1.bias"):
                weight(f"{name}{part}", columns)
    weight("_multitask_module.linear.weight", 2, 4 if full else D)
    weight("_multitask_module.linear.bias", 2)
    for name in list(w):
        if "embedding_group." in name:
            w[name] = w[name].astype(np.float16).astype(np.float32)
    made.layers = [stu_weights(random, D, HEADS, DQK, DV, group_norm=full) for _ in range(LAYERS)]
    if full:
        w[f"{_PRE}_action_encoder._combined_action_weights"] = np.array([1, 2, 4])
        w[f"{_POST}_period_units"] = np.array([[3600.0, 86_400.0]], np.float32)
        w[f"{_POST}_units_per_period"] = np.array([[24.0, 7.0]], np.float32)
    return made
