"""Small random models and requests, and an engine bound to an arena of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.worker.device import CpuDevice
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.checkpoint import Checkpoint, random_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.interface import Engine, PrefixChunk, RankInputs
from relaygr.worker.model.options import (
    Activated,
    ContextualFeature,
    Family,
    OutputForm,
    PositionOrigin,
    ReadoutNorm,
    RelativeBias,
    Task,
    TaskKind,
    TimeEncoding,
)

VOCABULARY = 40
MAX_PREFIX = 200
ARENA_PAGES = 128


def small_config(**changes: object) -> ModelConfig:
    """A model of two layers and two heads."""
    values: dict[str, object] = {
        "embedding_dim": 16,
        "num_heads": 2,
        "attention_dim": 8,
        "hidden_dim": 6,
        "num_layers": 2,
        "normalizer": None if changes.get("family") is Family.SOFTMAX else 50.0,
        "vocabulary_size": VOCABULARY,
        "num_actions": 4,
        "num_positions": 300,
        "tasks": (Task(name="click"), Task(name="watch", kind=TaskKind.REGRESSION)),
        "readout_hidden": (12,),
        "max_prefix_behaviours": MAX_PREFIX,
        "max_suffix_behaviours": 16,
        "max_candidates": 32,
    }
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any combination of options, in small sizes."""
    affine = draw(st.booleans())
    softmax = draw(st.sampled_from([False, False, True]))
    features = draw(st.integers(0, 3))
    window = draw(st.sampled_from([0, 0, 1, 9]))
    encoding = draw(st.sampled_from([TimeEncoding.NONE, TimeEncoding.NONE, TimeEncoding.SQRT, TimeEncoding.LOG]))
    of_family: dict[str, object] = {"family": Family.SOFTMAX, "mlp_dim": 10}
    if not softmax:
        of_family = {
            "normalizer": draw(st.sampled_from([1.0, 37.0, 1000.0])),
            "activated": draw(st.sampled_from(Activated)),
            "output_form": draw(st.sampled_from(OutputForm)),
            "group_norm": affine and draw(st.booleans()),
        }
    positions = draw(st.sampled_from([0, 5, 300]))
    biases = st.builds(RelativeBias, positions=st.sampled_from([1, 8, 100]), time_buckets=st.sampled_from([0, 9, 128]))
    return small_config(
        **of_family,
        contextual_mask=features > 0 and draw(st.booleans()),
        max_attn_len=window,
        min_full_attn_len=draw(st.sampled_from([0, 4])) if window else 0,
        target_group_size=draw(st.sampled_from([1, 1, 3])),
        relative_bias=draw(st.none() | biases),
        position_origin=draw(st.sampled_from(PositionOrigin)) if positions else PositionOrigin.START,
        time_encoding=encoding,
        num_times=0 if encoding is TimeEncoding.NONE else 20,
        embedding_dim=draw(st.sampled_from([8, 12])),
        num_heads=draw(st.integers(1, 3)),
        attention_dim=draw(st.sampled_from([1, 4, 8])),
        # Not less: a norm over two nearly equal values magnifies float32's rounding beyond any tolerance.
        hidden_dim=draw(st.sampled_from([4, 5, 6])),
        num_layers=draw(st.integers(1, 3)),
        attn_alpha=draw(st.sampled_from([None, 1.0])),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        norm_affine=affine,
        projection_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        contextual_features=tuple(ContextualFeature(name=f"f{index}", cardinality=3) for index in range(features)),
        num_actions=draw(st.sampled_from([0, 4])),
        num_positions=positions,
        readout_norm=draw(st.sampled_from(ReadoutNorm)),
        readout_hidden=draw(st.sampled_from([(), (5,), (7, 3)])),
    )


def random_behaviours(random: np.random.Generator, count: int) -> Behaviours:
    """Some items and action codes are beyond what the model knows."""
    return Behaviours(
        random.integers(0, VOCABULARY + 4, count),
        random.integers(0, 6, count).astype(np.uint16),
        np.arange(count, dtype=np.int64),
    )


@dataclass(frozen=True, slots=True)
class ModelWorld:
    """An engine over an arena of ARENA_PAGES pages."""

    checkpoint: Checkpoint
    engine: Engine
    arena: torch.Tensor

    def pages(self, random: np.random.Generator, tokens: int) -> NDArray[np.int32]:
        """Pages for so many tokens, in any order."""
        return random.permutation(ARENA_PAGES)[: self.engine.geometry.pages_for(tokens)].astype(np.int32)

    def pre_infer(
        self, features: NDArray[np.int64], prefix: Behaviours, pages: NDArray[np.int32], cuts: list[int]
    ) -> int:
        """Computes a prefix in chunks that end at the cuts and at its end; returns its tokens."""
        inputs = self.engine.prefix_inputs(features, prefix)
        ends = sorted({cut for cut in cuts if 0 < cut < inputs.tokens} | {inputs.tokens})
        start = 0
        for end in ends if inputs.tokens else []:
            self.engine.pre_infer(PrefixChunk(inputs, start, end, pages))
            start = end
        return inputs.tokens

    def scores(self, request: RankInputs) -> NDArray[np.float32]:
        """The request ranked alone."""
        return self.engine.rank([request])[0].scores


def make_world(
    config: ModelConfig, seed: int = 0, dtype: KvDtype = KvDtype.FLOAT32, page_tokens: int = 8
) -> ModelWorld:
    """A random model in an engine of its own."""
    checkpoint = random_checkpoint(config, seed)
    engine = build_engine(checkpoint, CpuDevice(), dtype, page_tokens)
    arena = torch.zeros((ARENA_PAGES, engine.geometry.page_bytes), dtype=torch.uint8)
    engine.bind(arena)
    return ModelWorld(checkpoint, engine, arena)
