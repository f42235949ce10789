"""Meta's DLRM-v3 ranking model around the HSTU layers: what comes before them, and the read-out after.

    token   = MLP(item) [+ MLP(other features)] + MLP(action bits)         MLP: linear, swish-norm, linear, LayerNorm
    x       = sqrt(D) token + position from the end + time bucket          contextual tokens first, one linear each
    user    = LayerNorm(last row)  or  LayerNorm(linear([last row, hour of day and day of week]))
    score   = MLP(user * MLP(candidate's features)), sigmoid where binary

swish-norm(x) = x * sigmoid(LayerNorm(x)). One user at a time, dense: with positions from the end and times relative
to the query, nothing of it can be cached beyond one impression. Source: Meta's generative-recommenders, `DlrmHSTU`;
tensors have the names of its state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from workers.model.config import Activated, OutputForm
from workers.model.dense import DenseStack
from workers.model.encodings import TimeBuckets, positions_from_end, time_rows
from workers.model.hstu import HstuLayer, LayerOptions, LayerWeights
from workers.model.masks import MaskOptions, attention_mask

_PREPROCESSOR = "_hstu_transducer._input_preprocessor."
_POSTPROCESSOR = "_hstu_transducer._output_postprocessor."
_POSITIONS = "_hstu_transducer._positional_encoder."
_SECONDS_PER_BUCKET_UNIT = 60.0
_GATED_FEATURE = "user_id"
_GATE_TOKENS = 4
"""The contextual token of the user id counts only from so many tokens of history and candidates on."""
_TWO_PI = 2 * 3.14
"""As the original has it."""

Rows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DlrmOptions:
    """What the state dict does not say."""

    num_heads: int
    num_layers: int
    normalizer: float
    norm_eps: float
    readout_norm_eps: float
    mlp_norm_eps: float
    uses_query_time: bool
    binary: tuple[bool, ...]
    contextual: tuple[str, ...]
    contextual_mask_len: int


@dataclass(frozen=True, slots=True)
class DlrmInputs:
    """One user: embeddings of the history's and the candidates' tokens, in one row each."""

    items: Sequence[torch.Tensor]
    """Of each item feature, [history + candidates, width]; the item itself first."""
    contextual: Sequence[torch.Tensor]
    """Of each contextual feature, [1, width]."""
    times: torch.Tensor
    """int64 [history + candidates], seconds."""
    actions: torch.Tensor
    """int64 [history], bit sets."""
    num_candidates: int


@dataclass(frozen=True, slots=True)
class DlrmOutputs:
    """user_rows, item_rows [candidates, D]; scores [candidates, tasks]."""

    user_rows: torch.Tensor
    item_rows: torch.Tensor
    scores: torch.Tensor


class DlrmModel:
    """The model of one state dict."""

    def __init__(self, options: DlrmOptions, weights: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError for a tensor that is missing or does not fit."""
        self._options = options
        self._weights = weights
        self._item_mlp = self._mlp("_item_embedding_mlp.", with_norm=True)
        self._content = self._mlp(f"{_PREPROCESSOR}_content_embedding_mlp.", with_norm=True)
        self._additional = self._mlp(f"{_PREPROCESSOR}_additional_embedding_mlp.", with_norm=True)
        self._action = self._mlp(f"{_PREPROCESSOR}_action_embedding_mlp.", with_norm=True)
        self._prediction = self._mlp("_multitask_module._prediction_module.", with_norm=False)
        layers = [self._layer(index) for index in range(options.num_layers)]
        attention_dim = self._sizes()[0]
        self._stack = DenseStack(layers, attention_dim**-0.5, options.normalizer)

    def __call__(self, inputs: DlrmInputs) -> DlrmOutputs:
        """Scores the candidates of one user."""
        features = torch.cat(tuple(inputs.items), dim=1)
        tokens = features.shape[0]
        history = tokens - inputs.num_candidates
        item_rows = self._item_mlp(features[history:])

        x = self._content(inputs.items[0])
        if len(inputs.items) > 1:
            x = x + self._additional(torch.cat(tuple(inputs.items[1:]), dim=1))
        x = x + self._action(self._action_rows(inputs))
        times = inputs.times
        contextual = self._contextual_rows(inputs, tokens)
        x, times = torch.cat((contextual, x)), torch.cat((times.new_zeros(contextual.shape[0]), times))
        x = self._placed(x, times, inputs.num_candidates, contextual.shape[0])

        options = MaskOptions(contextual_seq_len=self._options.contextual_mask_len)
        mask = attention_mask(x.shape[0], x.shape[0], inputs.num_candidates, options)
        last = self._stack.run(x, mask).rows[-1][x.shape[0] - inputs.num_candidates :]
        user_rows = self._read(last, inputs.times[history:])
        logits = self._prediction(user_rows * item_rows)
        binary = torch.tensor(self._options.binary)
        return DlrmOutputs(user_rows, item_rows, torch.where(binary, torch.sigmoid(logits), logits))

    def _action_rows(self, inputs: DlrmInputs) -> torch.Tensor:
        encoder = f"{_PREPROCESSOR}_action_encoder."
        bits = self._find(f"{encoder}_combined_action_weights").to(torch.int64)
        table = self._find(f"{encoder}_action_embedding_table")
        taken = (inputs.actions[:, None] & bits[None, :]) > 0
        of_history = (taken[:, :, None] * table[None, :, :]).flatten(1)
        of_candidates = self._find(f"{encoder}_target_action_embedding_table").expand(inputs.num_candidates, -1)
        return torch.cat((of_history, of_candidates))

    def _contextual_rows(self, inputs: DlrmInputs, tokens: int) -> torch.Tensor:
        rows = []
        for index, (name, row) in enumerate(zip(self._options.contextual, inputs.contextual, strict=True)):
            weight = self._find(f"{_PREPROCESSOR}_batched_contextual_linear_weights")[index]
            bias = self._find(f"{_PREPROCESSOR}_batched_contextual_linear_bias")[index]
            counts = name != _GATED_FEATURE or tokens >= _GATE_TOKENS
            rows.append((row if counts else torch.zeros_like(row)) @ weight + bias)
        width = self._find("_item_embedding_mlp.2.weight").shape[0]
        return torch.cat(rows) if rows else torch.empty(0, width)

    def _placed(self, x: torch.Tensor, times: torch.Tensor, num_candidates: int, contextual: int) -> torch.Tensor:
        positions = self._find(f"{_POSITIONS}_position_embeddings_weight")
        buckets = self._find(f"{_POSITIONS}_timestamp_embeddings_weight")
        length = x.shape[0]
        places = positions_from_end(length, length, num_candidates, contextual, positions.shape[0])
        rows = time_rows(times, _SECONDS_PER_BUCKET_UNIT, TimeBuckets.SQRT, buckets.shape[0])
        scaled: torch.Tensor = x * float(x.shape[1]) ** 0.5
        return scaled + (buckets[rows] + positions[places])

    def _read(self, rows: torch.Tensor, query_times: torch.Tensor) -> torch.Tensor:
        if self._options.uses_query_time:
            period = self._find(f"{_POSTPROCESSOR}_period_units").flatten()
            units = self._find(f"{_POSTPROCESSOR}_units_per_period").flatten()
            since_epoch = torch.div(query_times[:, None].float(), period, rounding_mode="floor")
            angle = torch.remainder(since_epoch, units) / units * _TWO_PI
            circle = torch.stack((angle.cos(), angle.sin()), dim=-1).flatten(1)
            rows = self._linear(f"{_POSTPROCESSOR}_time_feature_combiner.")(torch.cat((rows, circle), dim=1))
        return self._norm(f"{_POSTPROCESSOR}_layer_norm.", self._options.readout_norm_eps)(rows)

    def _layer(self, index: int) -> HstuLayer:
        name = f"_hstu_transducer._stu_module._stu_layers.{index}."
        attention_dim, hidden_dim, group_norm = self._sizes()
        options = LayerOptions(
            num_heads=self._options.num_heads,
            attention_dim=attention_dim,
            hidden_dim=hidden_dim,
            norm_eps=self._options.norm_eps,
            activated=Activated.U,
            output_form=OutputForm.U_A_UNORM,
            group_norm=group_norm,
        )
        return HstuLayer(
            options,
            LayerWeights(
                input_norm_weight=self._find(f"{name}_input_norm_weight"),
                input_norm_bias=self._find(f"{name}_input_norm_bias"),
                projection_weight=self._find(f"{name}_uvqk_weight"),
                projection_bias=self._find(f"{name}_uvqk_beta"),
                output_norm_weight=self._find(f"{name}_output_norm_weight"),
                output_norm_bias=self._find(f"{name}_output_norm_bias"),
                output_weight=self._find(f"{name}_output_weight"),
                output_bias=None,
            ),
        )

    def _sizes(self) -> tuple[int, int, bool]:
        """(attention_dim, hidden_dim, whether the output norm is per head), from the first layer's shapes."""
        name = "_hstu_transducer._stu_module._stu_layers.0."
        heads = self._options.num_heads
        hidden_dim = self._find(f"{name}_output_weight").shape[0] // 3 // heads
        attention_dim = self._find(f"{name}_uvqk_weight").shape[1] // heads // 2 - hidden_dim
        group_norm = self._find(f"{name}_output_norm_weight").shape[0] == heads and hidden_dim > 1
        return attention_dim, hidden_dim, group_norm

    def _mlp(self, name: str, *, with_norm: bool) -> Rows:
        first, second = self._linear(f"{name}0."), self._linear(f"{name}2.")
        inner = self._norm(f"{name}1.", self._options.mlp_norm_eps)
        outer = self._norm(f"{name}3.", self._options.mlp_norm_eps) if with_norm else lambda x: x

        def apply(x: torch.Tensor) -> torch.Tensor:
            hidden = first(x)
            return outer(second(hidden * torch.sigmoid(inner(hidden))))

        return apply

    def _linear(self, name: str) -> Rows:
        return lambda x: F.linear(x, self._find(f"{name}weight"), self._find(f"{name}bias"))

    def _norm(self, name: str, eps: float) -> Rows:
        return lambda x: F.layer_norm(x, x.shape[-1:], self._find(f"{name}weight"), self._find(f"{name}bias"), eps)

    def _find(self, name: str) -> torch.Tensor:
        if name not in self._weights:
            raise ValueError(f"{name} is missing")
        return self._weights[name]
