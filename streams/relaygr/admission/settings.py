"""Settings of admission, which trigger and workers share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relaygr.admission.buckets import BucketLimits
from relaygr.runtime.settings import Section


class AdmissionSettings(Section):
    """How much pre-infer work a device is given. The trigger decides by these, and each worker again."""

    lease_margin_ms: Annotated[int, Field(ge=0, description="how long a prefix is kept past its expected ranking")] = (
        200
    )
    footprint_reserve: Annotated[
        float, Field(ge=0, lt=1, description="r: part of the HBM tier that jobs never fill")
    ] = 0.1
    load_limit: Annotated[
        float, Field(gt=0, le=1, description="rho: device load, ranking included, up to which jobs are admitted")
    ] = 0.8
    preinfer_share: Annotated[
        float, Field(ge=0, le=0.9, description="device time kept for jobs however busy ranking is")
    ] = 0.3
    burst_ms: Annotated[int, Field(ge=1, le=60_000, description="how far the buckets may run ahead of their rate")] = (
        500
    )

    def bucket_limits(self) -> BucketLimits:
        """The numbers that the buckets count by."""
        return BucketLimits(
            footprint_reserve=self.footprint_reserve,
            load_limit=self.load_limit,
            preinfer_share=self.preinfer_share,
            burst_us=self.burst_ms * 1000,
        )
