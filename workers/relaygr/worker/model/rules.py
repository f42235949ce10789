"""Rules for the prefixes of a model, derived from its mask and encodings (docs/model.md, "Rules").

A rule restricts the reuse of cached prefixes if a row depends on more than the behaviours up to itself:

* `grows` false: earlier rows depend on the end of the history (contextual mask, positions from the end, rows near the
  end that ignore the window) or on the next token (relative time bias). Only the whole prefix can match; appends and
  suffixes are refused.
* `chunks` false: rows see later rows (contextual mask), so pre-infer computes the prefix in one chunk.
* `uses_query_time`: inputs depend on the time before the query, so K,V belong to one query time, which is a part of
  the key.
"""

from __future__ import annotations

from dataclasses import dataclass

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.options import PositionOrigin, TimeEncoding


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """The rules for every prefix of one model."""

    grows: bool = True
    """New behaviours may be appended to a prefix, and a request may have a suffix."""
    chunks: bool = True
    """Pre-infer may be split into chunks anywhere."""
    uses_query_time: bool = False
    """K,V are valid for one query time only."""

    @property
    def is_reusable(self) -> bool:
        """Whether a prefix serves later impressions of its user, too."""
        return self.grows and not self.uses_query_time


class RuleError(ValueError):
    """A call that the model's rules forbid, because its scores would differ from full inference."""


def rules_of(config: ModelConfig) -> PrefixRules:
    """The rules that a configuration implies."""
    has_relative_time = config.relative_bias is not None and config.relative_bias.time_buckets > 0
    counts_from_end = config.position_origin is PositionOrigin.END
    return PrefixRules(
        grows=not (config.contextual_mask or config.min_full_attn_len or has_relative_time or counts_from_end),
        chunks=not config.contextual_mask,
        uses_query_time=has_relative_time or config.time_encoding is not TimeEncoding.NONE,
    )
