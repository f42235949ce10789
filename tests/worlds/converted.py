"""State dicts as other people's code saves them, and what their models score, told in numpy from the definitions.

Nothing here calls the code under test but to load a converted model (`ConvertedWorld`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.worker.device import CpuDevice
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.checkpoint import Checkpoint, compute_revision
from relaygr.worker.model.convert.conversion import Converted
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.interface import Engine, PrefixChunk
from tests.worlds.vectors import Floats, Made, attend, mask_of, norm, silu

_INT64 = np.dtype(np.int64)
Tensors = dict[str, torch.Tensor]


def tensors(arrays: dict[str, NDArray[Any]]) -> Tensors:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


@dataclass(frozen=True, slots=True)
class ConvertedWorld:
    """A converted model in an engine of small pages."""

    engine: Engine
    chunk_tokens: int

    def scores(
        self,
        features: list[int],
        history: Behaviours,
        candidates: NDArray[np.int64],
        query_time_ms: int = 0,
        suffix: int = 0,
    ) -> NDArray[np.float32]:
        """The last `suffix` behaviours come with the request, the others before it."""
        count = len(history) - suffix
        prefix, rest = history[:count], history[count:]
        shown = self.engine.shown_features(np.array(features, _INT64), len(history), candidates.size)
        inputs = self.engine.prefix_inputs(shown, prefix, query_time_ms)
        pages = np.arange(self.engine.geometry.pages_for(inputs.tokens), dtype=np.int32)[::-1].copy()
        for start in range(0, inputs.tokens, self.chunk_tokens):
            end = min(start + self.chunk_tokens, inputs.tokens)
            self.engine.pre_infer(PrefixChunk(inputs, start, end, pages))
        request = self.engine.rank_inputs(
            inputs.tokens, pages, rest, candidates, query_time_ms, prefix_timestamps_ms=prefix.timestamps_ms
        )
        return self.engine.rank([request])[0].scores


def load(converted: Converted, page_tokens: int, chunk_tokens: int) -> ConvertedWorld:
    """The converted model, as a worker would load it."""
    assert converted.report.is_complete, converted.report
    revision = compute_revision(converted.config, converted.tensors)
    checkpoint = Checkpoint(converted.config, converted.tensors, revision)
    engine = build_engine(checkpoint, CpuDevice(), KvDtype.FLOAT32, page_tokens)
    engine.bind(torch.zeros((64, engine.geometry.page_bytes), dtype=torch.uint8))
    return ConvertedWorld(engine, chunk_tokens)


def dlrm_state_dict(made: Made) -> Tensors:
    """Meta's state dict of a case: every token of the case is an item or a feature value of its own."""
    options, arrays = made
    found = {name.removeprefix("w/buffer/").removeprefix("w/"): a for name, a in arrays.items() if name[:2] == "w/"}
    tables = {name: arrays[f"in/{name}"] for name in options["contextual"]}
    for name in item_features(made):
        tables[name] = np.concatenate((arrays[f"in/{name}"], arrays[f"in/c_{name}"]))
    found |= {f"_embedding_collection.embeddings.{name}.weight": table for name, table in tables.items()}
    return tensors(found)


def item_features(made: Made) -> list[str]:
    """The item, and its features."""
    names = [name.removeprefix("in/c_") for name in made[1] if name.startswith("in/c_")]
    return sorted(names, key=lambda name: name != "item")


@dataclass(frozen=True, slots=True)
class Nvidia:
    """NVIDIA's ranking model: sizes and weights by our own short names."""

    weights: dict[str, Floats]
    layers: list[dict[str, Floats]]
    heads: int
    dqk: int
    dv: int
    n: float
    eps: float = 1e-5

    def embed(self, features: list[int], history: Behaviours, candidates: NDArray[np.int64]) -> Floats:
        """Contextual tokens, item and action of each behaviour, candidates: scaled, with positions."""
        w = self.weights
        items, actions, region = w["items"], w["actions"], w["region"]
        if "item_mlp.0" in w:
            items, actions = (self._mlp("item_mlp", table) for table in (items, actions))
            region = self._mlp("contextual_mlp", region)
        rows = [region[value] for value in features]
        for item, action in zip(history.items, history.actions, strict=True):
            rows += [items[item], actions[action]]
        end = len(rows)
        rows += [items[item] for item in candidates]
        d, places = items.shape[1], w["positions"]
        placed = [row * d**0.5 + places[min(i, end, len(places) - 1)] for i, row in enumerate(rows)]
        return np.stack(placed)

    def scores(self, features: list[int], history: Behaviours, candidates: NDArray[np.int64]) -> Floats:
        x = self.embed(features, history, candidates)
        mask = mask_of(len(x), len(x), candidates.size)
        for w in self.layers:
            z = silu(norm(x, w["g1"], w["b1"], self.eps) @ w["uvqk"] + w["beta"])
            u, v, q, k = np.split(z, np.cumsum([self.heads * self.dv] * 2 + [self.heads * self.dqk]), axis=1)
            q, k, v = (part.reshape(len(x), self.heads, -1) for part in (q, k, v))
            a = attend(q, k, v, mask, self.dqk**-0.5, self.n).reshape(len(x), -1)
            x = x + (u * norm(a, w["g2"], w["b2"], self.eps)) @ w["proj"]
        rows = x[-candidates.size :]
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        hidden = np.maximum(rows @ self.weights["head.0"] + self.weights["head.0.bias"], 0)
        logits = hidden @ self.weights["head.1"] + self.weights["head.1.bias"]
        return np.asarray(1 / (1 + np.exp(-logits)))

    def _mlp(self, name: str, x: Floats) -> Floats:
        w = self.weights
        return np.asarray(
            np.maximum(x @ w[f"{name}.0"] + w[f"{name}.0.bias"], 0) @ w[f"{name}.1"] + w[f"{name}.1.bias"]
        )

    def state_dict(self, layout: str) -> Tensors:
        """As the `fused`, `native` or `inference` layer saves it."""
        w = self.weights
        found: dict[str, Any] = {
            "_hstu_block._preprocessor._positional_encoder._position_embeddings_weight": w["positions"]
        }
        for ours, theirs in (("item_mlp", "_item_mlp"), ("contextual_mlp", "_contextual_mlp")):
            if f"{ours}.0" in w:
                found |= self._linears(f"_hstu_block._preprocessor.{theirs}._mlp", ours)
        found |= self._linears("_mlp._mlp", "head")
        for k, layer in enumerate(self.layers):
            found |= {f"_hstu_block._attention_layers.{k}.{name}": a for name, a in self._layer(layer, layout).items()}
        return tensors({name: np.asarray(array, np.float32) for name, array in found.items()})

    def _linears(self, theirs: str, ours: str) -> dict[str, Floats]:
        w = self.weights
        return {
            f"{theirs}.{place}.{kind}": array
            for index, place in ((0, 0), (1, 2))
            for kind, array in (("weight", w[f"{ours}.{index}"].T), ("bias", w[f"{ours}.{index}.bias"]))
        }

    def _layer(self, w: dict[str, Floats], layout: str) -> dict[str, Floats]:
        found = {"_input_layernorm_weight": w["g1"], "_input_layernorm_bias": w["b1"]}
        if layout == "fused":
            return found | {
                "_linear_uvqk_weight": w["uvqk"],
                "_linear_uvqk_bias": w["beta"],
                "_linear_proj_weight": w["proj"],
                "_output_layernorm_weight": w["g2"],
                "_output_layernorm_bias": w["b2"],
            }
        out_norm = "_output_ln_dropout_mul." if layout == "native" else "_output_layernorm_"
        uvqk, beta = (
            (w["uvqk"], w["beta"]) if layout == "inference" else (self._per_head(w["uvqk"]), self._per_head(w["beta"]))
        )
        return found | {
            "_linear_uvqk.weight": uvqk.T,
            "_linear_uvqk.bias": beta,
            "_linear_proj.weight": w["proj"].T,
            f"{out_norm}weight": w["g2"],
            f"{out_norm}bias": w["b2"],
        }

    def _per_head(self, columns: Floats) -> Floats:
        """[..., U V Q K] to [..., U V Q K of head 0, U V Q K of head 1, ...], told column by column."""
        widths = (self.dv, self.dv, self.dqk, self.dqk)
        starts = np.cumsum([0] + [self.heads * width for width in widths])
        order = [
            starts[block] + head * widths[block] + at
            for head in range(self.heads)
            for block in range(4)
            for at in range(widths[block])
        ]
        return columns[..., order]


def make_nvidia(with_mlps: bool = False) -> Nvidia:
    """Two layers; a table's row is 8 wide, or 5 before its MLP."""
    random = np.random.default_rng(7)
    d, heads, dqk, dv, hidden = 8, 2, 3, 4, 6

    def weight(*shape: int) -> Floats:
        return (random.normal(size=shape) * 0.4).astype(np.float32)

    width = 5 if with_mlps else d
    w: dict[str, Floats] = {"items": weight(20, width), "actions": weight(4, width), "region": weight(3, width)}
    w["positions"] = weight(15, d)
    names = ["head", *(("item_mlp", "contextual_mlp") if with_mlps else ())]
    for name in names:
        sizes = (d, hidden, 2) if name == "head" else (width, d, d)
        for index in range(2):
            w[f"{name}.{index}"] = weight(sizes[index], sizes[index + 1])
            w[f"{name}.{index}.bias"] = weight(sizes[index + 1])
    layers = [
        {
            "g1": weight(d),
            "b1": weight(d),
            "uvqk": weight(d, heads * 2 * (dqk + dv)),
            "beta": weight(heads * 2 * (dqk + dv)),
            "g2": weight(heads * dv),
            "b2": weight(heads * dv),
            "proj": weight(heads * dv, d),
        }
        for _ in range(2)
    ]
    return Nvidia(w, layers, heads, dqk, dv, 40.0)
