"""Rankers of a team's own, in plain torch: one that is right, and one for each way to be wrong."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from relaygr.ranker import (
    CandidateInputs,
    Computed,
    History,
    HistoryInputs,
    Kv,
    ModelFolder,
    PagedRanker,
    Past,
    PrefixChunk,
    Ranker,
    RankInputs,
    Segment,
    Shape,
)
from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.model.engine import engine_to_check
from relaygr.worker.model.ranker_engine import RankerEngine
from relaygr.worker.model.rankers import write_record

MODULE = "tests.worlds.toy_rankers"
ITEMS, DIM, LAYERS, PLACES = 60, 12, 2, 128


def write_folder(folder: Path, name: str = "Decoder", seed: int = 0, **options: Any) -> Path:
    """A folder that names the class, and its random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    made = torch.Generator().manual_seed(seed)
    sizes = {"items": (ITEMS + 1, DIM), "places": (PLACES, DIM)}
    sizes |= {f"{part}{layer}": (DIM, DIM) for part in "qkv" for layer in range(LAYERS)}
    weights = {each: torch.randn(size, generator=made) / 2 for each, size in sizes.items()}
    save_file(weights, folder / "weights.safetensors")
    (folder / "config.json").write_text(json.dumps({"ranker": f"{MODULE}:{name}", "options": options}))
    return folder


def checked(folder: Path, name: str = "Decoder", rules: PrefixRules | None = None, seed: int = 0) -> Path:
    """A folder with the record that `model check` would write."""
    write_folder(folder, name, seed)
    engine = engine_to_check(folder, "cpu", [MODULE])
    assert isinstance(engine, RankerEngine) and engine.record is not None
    write_record(folder, replace(engine.record, rules=rules or PrefixRules()))
    return folder


class Decoder(Ranker):
    """Causal soft-max attention. The score of an item is its product with the last row."""

    state_dim = DIM
    max_suffix = 16

    def __init__(self, folder: ModelFolder) -> None:
        super().__init__(folder)
        self.weights = {
            name: tensor.to(folder.device, folder.dtype)
            for name, tensor in load_file(folder.path / "weights.safetensors").items()
        }

    def shape(self) -> Shape:
        return Shape(
            layers=LAYERS,
            heads=1,
            key_dim=DIM,
            value_dim=DIM,
            num_items=ITEMS,
            max_history=96,
            max_candidates=32,
            max_suffix=self.max_suffix,
            state_dim=self.state_dim,
            num_actions=3,
        )

    def places(self, start: int, count: int, total: int) -> torch.Tensor:
        return torch.arange(start, start + count)

    def sees(self, rows: int, keys: int) -> torch.Tensor:
        """Whether each row sees each key: bool [rows, keys]."""
        return torch.ones(rows, keys).tril(keys - rows).bool()

    def rows_of(self, history: History, start: int, end: int, first_place: int, total: int) -> torch.Tensor:
        rows = self.weights["items"][history.items[start:end].clamp(0, ITEMS)]
        return rows + self.weights["places"][self.places(first_place, end - start, total)]

    def forward(self, x: torch.Tensor, past: Past) -> tuple[torch.Tensor, list[Kv]]:
        layers = []
        for layer, (past_k, past_v) in enumerate(past):
            q, k, v = (x @ self.weights[f"{part}{layer}"] for part in "qkv")
            keys, values = torch.cat((past_k[0], k)), torch.cat((past_v[0], v))
            scores = (q @ keys.T / DIM**0.5).masked_fill(~self.sees(x.shape[0], keys.shape[0]), -torch.inf)
            layers.append((k[None], v[None]))
            x = x + scores.softmax(-1) @ values
        return x, layers

    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        x, layers = self.forward(self.rows_of(history, start, end, start, len(history)), past)
        return Computed(layers, x)

    def rank(self, suffix: History, candidates: torch.Tensor, past: Past, state: torch.Tensor | None) -> torch.Tensor:
        if len(suffix):
            count = len(suffix)
            x, _ = self.forward(self.rows_of(suffix, 0, count, past.rows, past.rows + count), past)
            state = x[-1]
        if state is None:
            state = torch.ones(DIM)
        return (self.weights["items"][candidates.clamp(0, ITEMS)] @ state)[:, None]


class PagedDecoder(PagedRanker):
    """The same in the paged form: reads and writes the pages itself, and the states in the layer after the others."""

    def __init__(self, folder: ModelFolder) -> None:
        super().__init__(folder)
        self.decoder = Decoder(folder)

    def shape(self) -> Shape:
        return self.decoder.shape()

    def scratch_bytes(self, chunk_rows: int, ranked_rows: int) -> int:
        return 4 * 8 * (chunk_rows + ranked_rows) * (DIM + 96)

    def forward(
        self, kv: PagedKv, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]
    ) -> torch.Tensor | None:
        for chunk in chunks:
            inputs, rows = cast("HistoryInputs", chunk.inputs), chunk.end - chunk.start
            segment = Segment(chunk.pages, chunk.start, rows, 0, stores=True, total_tokens=inputs.tokens)
            computed = self.decoder.prefix(_history(inputs.behaviours), chunk.start, chunk.end, self._past(kv, segment))
            assert computed.states is not None
            slots, states = kv.slots([segment]), computed.states[:, None]
            for layer, (k, v) in enumerate((*computed.layers, (states, torch.zeros_like(states)))):
                is_state = layer == LAYERS
                kv.write(layer, slots, k if is_state else k.transpose(0, 1), v if is_state else v.transpose(0, 1))
        asked = cast("Sequence[CandidateInputs]", requests)
        return torch.cat([self._scores(kv, each) for each in asked]) if asked else None

    def _scores(self, kv: PagedKv, request: CandidateInputs) -> torch.Tensor:
        tokens = request.prefix_tokens
        past = self._past(kv, Segment(request.pages, tokens, 0, 0, stores=False, total_tokens=tokens), LAYERS + 1)
        state = past[LAYERS][0][0, -1] if tokens else None
        candidates = torch.from_numpy(request.candidates)
        return self.decoder.rank(_history(request.suffix), candidates, Past(tokens, LAYERS, past.__getitem__), state)

    def _past(self, kv: PagedKv, segment: Segment, layers: int = LAYERS) -> Past:
        if not segment.context_tokens:
            return Past(0, layers, lambda _: (torch.zeros(1, 0, DIM), torch.zeros(1, 0, DIM)))
        ((span,),) = kv.spans([segment])

        def read(layer: int) -> Kv:
            k, v = kv.read(layer, span, torch.float32)
            return k.clone(), v.clone()

        return Past(segment.context_tokens, layers, read)


def _history(behaviours: Behaviours) -> History:
    items, actions, times_ms = (
        torch.from_numpy(each.astype(np.int64))
        for each in (behaviours.items, behaviours.actions, behaviours.timestamps_ms)
    )
    return History(items, actions, times_ms, torch.empty(0, dtype=torch.int64))


class HasTooFewPagedScores(PagedDecoder):
    def forward(
        self, kv: PagedKv, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]
    ) -> torch.Tensor | None:
        scores = super().forward(kv, chunks, requests)
        return None if scores is None else scores[1:]


class RaisesInTheForward(PagedDecoder):
    def forward(
        self, kv: PagedKv, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]
    ) -> torch.Tensor | None:
        raise ZeroDivisionError("no such kernel")


class TakesNoSuffix(Decoder):
    max_suffix = 0


class SeesLaterRows(Decoder):
    """Attention in both directions within a pass."""

    def sees(self, rows: int, keys: int) -> torch.Tensor:
        return torch.ones(rows, keys).bool()


class CountsFromTheEnd(Decoder):
    def places(self, start: int, count: int, total: int) -> torch.Tensor:
        return total - 1 - torch.arange(start, start + count)


class ReadsTheTime(Decoder):
    """Rows depend on the age of their behaviours."""

    def rows_of(self, history: History, start: int, end: int, first_place: int, total: int) -> torch.Tensor:
        ages_h = (history.query_time_ms - history.times_ms[start:end]) / 3_600_000
        rows = super().rows_of(history, start, end, first_place, total)
        return rows * (1 + torch.log1p(ages_h.clamp(0)))[:, None].to(rows.dtype)


class ComparesCandidates(Decoder):
    def rank(self, suffix: History, candidates: torch.Tensor, past: Past, state: torch.Tensor | None) -> torch.Tensor:
        return super().rank(suffix, candidates, past, state).softmax(0)


class IgnoresTheSuffix(Decoder):
    def rank(self, suffix: History, candidates: torch.Tensor, past: Past, state: torch.Tensor | None) -> torch.Tensor:
        nothing = suffix.items[:0]
        return super().rank(History(nothing, nothing, nothing, nothing), candidates, past, state)


class NeedsFloat32(Decoder):
    """Operations of torch that a device has not in all types raise like this."""

    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        if self.folder.dtype is not torch.float32:
            raise RuntimeError(f"not implemented for {self.folder.dtype}")
        return super().prefix(history, start, end, past)


class IgnoresTheHistory(Decoder):
    """A port that forgot to read what `rank` is given."""

    def rank(self, suffix: History, candidates: torch.Tensor, past: Past, state: torch.Tensor | None) -> torch.Tensor:
        return self.weights["items"][candidates.clamp(0, ITEMS)].sum(1, keepdim=True)


class HasNoRowForUnknownItems(Decoder):
    """A table whose look-up raises for any other id."""

    def rows_of(self, history: History, start: int, end: int, first_place: int, total: int) -> torch.Tensor:
        rows = nn.functional.embedding(history.items[start:end], self.weights["items"])
        return rows + self.weights["places"][self.places(first_place, end - start, total)]


class ReadsFeatures(Decoder):
    """Two features of the user, which change each row."""

    def shape(self) -> Shape:
        return replace(super().shape(), feature_cardinalities=(5, 30))

    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        age, country = history.features.tolist()
        computed = super().prefix(history, start, end, past)
        assert computed.states is not None
        return Computed(computed.layers, computed.states + age + country / 8)


class DrawsLots(Decoder):
    def rank(self, suffix: History, candidates: torch.Tensor, past: Past, state: torch.Tensor | None) -> torch.Tensor:
        scores = super().rank(suffix, candidates, past, state)
        return scores + torch.rand(scores.shape)


class Learns(Decoder):
    """Changes its weights a little with each prefix, so that the same request twice is hardly another one."""

    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        computed = super().prefix(history, start, end, past)
        self.weights["items"] = self.weights["items"] * (1 - 2e-6)
        self.weights["items"][:, 0] += 2e-6
        return computed


class WritesIntoWhatItIsGiven(Decoder):
    """Harmless: what a ranker is given is its own."""

    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        computed = super().prefix(history, start, end, past)
        history.items.zero_()
        for k, v in past:
            k.zero_()
            v.zero_()
        return computed


class IsNotFinite(Decoder):
    def rank(self, suffix: History, candidates: torch.Tensor, past: Past, state: torch.Tensor | None) -> torch.Tensor:
        return super().rank(suffix, candidates, past, state).log()


class HasTooFewScores(Decoder):
    def rank(self, suffix: History, candidates: torch.Tensor, past: Past, state: torch.Tensor | None) -> torch.Tensor:
        return super().rank(suffix, candidates, past, state)[1:]


class HasTooFewRows(Decoder):
    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        computed = super().prefix(history, start, end, past)
        return Computed([(k[:, 1:], v[:, 1:]) for k, v in computed.layers], computed.states)


class LacksALayer(Decoder):
    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        computed = super().prefix(history, start, end, past)
        return Computed(computed.layers[1:], computed.states)


class LacksStates(Decoder):
    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        return Computed(super().prefix(history, start, end, past).layers)


class ReturnsNothing(Decoder):
    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        return None  # type: ignore[return-value]


class HasNoRoomForStates(Decoder):
    state_dim = 2 * DIM + 1


class ListsItsTasks(Decoder):
    def shape(self) -> Shape:
        return replace(super().shape(), tasks=["click"])  # type: ignore[arg-type]


class CannotBeMade(Decoder):
    def __init__(self, folder: ModelFolder) -> None:
        super().__init__(folder)
        raise KeyError("embedding.weight")


class ForgetsItsFolder(Decoder):
    def __init__(self, folder: ModelFolder) -> None:
        self.weights = {}


class IsAModule(Decoder, nn.Module):
    """An `nn.Module` that became a ranker, with a part that computes otherwise in training."""

    def __init__(self, folder: ModelFolder) -> None:
        super().__init__(folder)
        self.head = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
        if not folder.options.get("forgets_eval"):
            self.eval()


class KeepsAModule(Decoder):
    """The module is an attribute, as in docs/rankers.md."""

    def __init__(self, folder: ModelFolder) -> None:
        super().__init__(folder)
        self.net = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.1))})


class ExitsWhenMade(Decoder):
    def __init__(self, folder: ModelFolder) -> None:
        super().__init__(folder)
        sys.exit(2)


class ExitsInRank(Decoder):
    def rank(self, suffix: History, candidates: torch.Tensor, past: Past, state: torch.Tensor | None) -> torch.Tensor:
        sys.exit("no such item")


class Talks(Decoder):
    """Prints while it is made, and in each call."""

    def __init__(self, folder: ModelFolder) -> None:
        super().__init__(folder)
        print("the tables are loaded")  # noqa: T201

    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        print("prefix", start, end)  # noqa: T201
        return super().prefix(history, start, end, past)


class FailsForSomeItems(Decoder):
    """As on messages that no test had foreseen: raises for one item, ends the process for the next, hangs for the next.

    The first item is RELAYGR_TEST_BAD_ITEM.
    """

    def rank(self, suffix: History, candidates: torch.Tensor, past: Past, state: torch.Tensor | None) -> torch.Tensor:
        bad = int(os.environ.get("RELAYGR_TEST_BAD_ITEM", ITEMS + 1))
        if (candidates == bad).any():
            raise ZeroDivisionError("no such item")
        if (candidates == bad + 1).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if (candidates == bad + 2).any():
            time.sleep(3600)
        return super().rank(suffix, candidates, past, state)


NO_RANKER = Path
