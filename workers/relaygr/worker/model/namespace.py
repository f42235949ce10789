"""What tells K,V of one engine from those of any other."""

from __future__ import annotations

from hashlib import blake2b

from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.precision import ComputeDtype


def kv_namespace(revision: str, config: ModelConfig, geometry: KvGeometry, compute_dtype: ComputeDtype) -> bytes:
    """All that K,V depend on but the user: 16 bytes. The encodings are in the configuration, so in the revision."""
    g = geometry
    parts = (
        "relaygr.kv.2",
        revision,
        repr(config.normalizer),
        f"{g.num_layers}x{g.num_heads}x{g.attention_dim}+{g.hidden_dim}",
        str(g.page_tokens),
        str(g.dtype),
        str(compute_dtype),
    )
    return blake2b("\0".join(parts).encode(), digest_size=16).digest()
