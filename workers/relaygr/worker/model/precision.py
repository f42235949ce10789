"""The element type of the matrix products, apart from that of stored K,V (`relaygr.worker.kv.KvDtype`)."""

from __future__ import annotations

import enum


class ComputeDtype(enum.StrEnum):
    """What weights and rows are rounded to before a matrix product; sums and the residual stream stay float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def size_bytes(self) -> int:
        return 4 if self is ComputeDtype.FLOAT32 else 2
