"""What a model's folder says of the model, without running it: of our own layers, or of a team's ranker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relaygr.ranker import Shape
from relaygr.worker.kv import KvDtype, KvGeometry, PrefixLayout
from relaygr.worker.model.config import ModelConfig, PrefixRules, is_ranker, read_config, rules_of
from relaygr.worker.model.interface import EngineLimits
from relaygr.worker.model.options import ContextualFeature


@dataclass(frozen=True, slots=True)
class Description:
    """The K,V, the limits and the inputs of a model."""

    num_layers: int
    num_heads: int
    attention_dim: int
    hidden_dim: int
    layout: PrefixLayout
    limits: EngineLimits
    rules: PrefixRules
    num_tasks: int
    features: tuple[ContextualFeature, ...]
    actions: tuple[int, ...]
    """Every action that the model knows, and one that it does not. For bits of kinds of actions: none, each, all."""

    def geometry(self, page_tokens: int, dtype: KvDtype) -> KvGeometry:
        """The shape of the K,V in pages."""
        return KvGeometry(self.num_layers, self.num_heads, self.attention_dim, self.hidden_dim, page_tokens, dtype)


def description_of(config: ModelConfig) -> Description:
    """Of a model of our own layers."""
    return Description(
        config.num_layers,
        config.num_heads,
        config.attention_dim,
        config.hidden_dim,
        config.layout(),
        EngineLimits(config.max_prefix_behaviours, config.max_suffix_behaviours, config.max_candidates),
        rules_of(config),
        len(config.tasks),
        config.contextual_features,
        _actions(config),
    )


def shape_of(config: ModelConfig) -> Shape:
    """The sizes of a model of our own layers, as those of a ranker."""
    layout = config.layout()
    return Shape(
        layers=config.num_layers,
        heads=config.num_heads,
        key_dim=config.attention_dim,
        value_dim=config.hidden_dim,
        num_items=config.vocabulary_size,
        max_history=config.max_prefix_behaviours,
        max_candidates=config.max_candidates,
        max_suffix=config.max_suffix_behaviours,
        tasks=tuple(task.name for task in config.tasks),
        rows_per_behaviour=layout.tokens_per_behaviour,
        user_rows=layout.contextual_tokens,
        num_actions=config.num_actions,
        feature_cardinalities=tuple(each.cardinality for each in config.contextual_features),
    )


def _actions(config: ModelConfig) -> tuple[int, ...]:
    if config.dlrm_inputs is not None:
        weights = config.dlrm_inputs.action_weights
        return (0, *weights, sum(weights))
    return tuple(range(config.num_actions + 1))


def read_description(folder: Path) -> Description:
    """Of the model in a folder. Raises RelayError for a folder that is no model, or a ranker that was not checked."""
    if is_ranker(folder):
        from relaygr.worker.model.rankers import read_record

        return read_record(folder).description()
    return description_of(read_config(folder))
