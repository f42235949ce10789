"""The measured models: shapes of published benchmarks with random weights, and their numbers of operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.options import Activated, OutputForm


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a stack of HSTU layers. Dimensions are per head."""

    embedding_dim: int
    num_layers: int
    num_heads: int
    attention_dim: int
    hidden_dim: int
    activated: Activated = Activated.U
    output_form: OutputForm = OutputForm.U_A_UNORM

    def config(self, longest_prefix: int, most_candidates: int) -> ModelConfig:
        """A model of this shape."""
        return ModelConfig(
            embedding_dim=self.embedding_dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            attention_dim=self.attention_dim,
            hidden_dim=self.hidden_dim,
            activated=self.activated,
            output_form=self.output_form,
            normalizer=float(longest_prefix),
            vocabulary_size=10_000,
            num_actions=8,
            num_positions=longest_prefix + 128,
            max_prefix_behaviours=longest_prefix,
            max_candidates=most_candidates,
        )


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(32, 1, 2, 16, 16),
    "small": Shape(256, 4, 4, 64, 64),
    "dlrm-v3": Shape(512, 5, 4, 128, 128),
    "nvidia": Shape(1024, 8, 4, 256, 256, Activated.UVQK, OutputForm.UNORM),
}
"""`dlrm-v3`: Meta's model, 10 KiB of bf16 K,V a token; `nvidia`: NVIDIA's HSTU benchmark, 32 KiB a token; `tiny`: for
kernels that are interpreted.
"""


def rows_flops(config: ModelConfig, rows: int) -> float:
    """Floating-point operations of the two projections of `rows` rows in all layers."""
    per_row = config.embedding_dim * (config.projection_width + config.output_width)
    return 2.0 * config.num_layers * rows * per_row


def attention_flops(config: ModelConfig, visible_pairs: float) -> float:
    """Operations of scores and weighted sums over (row, key) pairs, in all layers and heads. SiLU is not counted."""
    return 2.0 * config.num_layers * config.num_heads * (config.attention_dim + config.hidden_dim) * visible_pairs


def append_flops(config: ModelConfig, cached: int, new: int) -> float:
    """Operations of `new` prefix tokens after `cached` ones: row i sees the cached tokens and i + 1 new tokens."""
    return rows_flops(config, new) + attention_flops(config, new * cached + new * (new + 1) / 2)


def rank_flops(config: ModelConfig, prefix: int, scored: int) -> float:
    """Operations of ranking `scored` rows on a cached prefix. Each row counts as if it sees the prefix and itself."""
    return rows_flops(config, scored) + attention_flops(config, scored * (prefix + 1.0))
