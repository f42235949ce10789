"""What may be done with a prefix of a model, as its mask and encodings allow. Source: docs/model.md, "Rules".

Where a cached row depends on more than the behaviours up to itself, a cached prefix is worth less:

* `grows` false: earlier rows depend on where the history ends (contextual mask, positions from the end, rows near the
  end that ignore the window) or on what comes next (relative time bias). The whole prefix matches or nothing does: no
  append, no suffix.
* `chunks` false: rows see later rows (contextual mask), so pre-infer runs in one piece.
* `uses_query_time`: inputs count back from the query time, so K,V belong to one query time and the key says which.
"""

from __future__ import annotations

from dataclasses import dataclass

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.options import PositionOrigin, TimeEncoding


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """What holds for every prefix of one model."""

    grows: bool = True
    """A grown history may be appended, and a request may bring a suffix."""
    chunks: bool = True
    """Pre-infer may be cut anywhere."""
    uses_query_time: bool = False
    """K,V are good for one query time."""


class RuleError(ValueError):
    """A call that the model's rules forbid: it would give other scores than full inference."""


def rules_of(config: ModelConfig) -> PrefixRules:
    """The rules that a configuration implies."""
    has_relative_time = config.relative_bias is not None and config.relative_bias.time_buckets > 0
    counts_from_end = config.position_origin is PositionOrigin.END
    return PrefixRules(
        grows=not (config.contextual_mask or config.min_full_attn_len or has_relative_time or counts_from_end),
        chunks=not config.contextual_mask,
        uses_query_time=has_relative_time or config.time_encoding is not TimeEncoding.NONE,
    )
