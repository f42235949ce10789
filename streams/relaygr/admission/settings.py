"""Settings of admission, shared by the trigger and the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from relaygr.runtime.settings import Section

if TYPE_CHECKING:
    from relaygr.admission.buckets import BucketLimits


class AdmissionSettings(Section):
    """How much pre-infer work a device is given. The trigger and each worker decide with the same settings."""

    lease_margin_ms: Annotated[
        int, Field(ge=0, description="how long the lease of a prefix lasts after the expected ranking request")
    ] = 200
    footprint_reserve: Annotated[
        float, Field(ge=0, lt=1, description="r: share of the HBM tier that admitted jobs do not fill")
    ] = 0.1
    load_limit: Annotated[
        float, Field(gt=0, le=1, description="rho: device load, ranking included, up to which jobs are admitted")
    ] = 0.95
    preinfer_share: Annotated[
        float, Field(ge=0, le=0.9, description="share of device time that jobs get even if ranking needs all of it")
    ] = 0.1
    burst_ms: Annotated[
        int,
        Field(
            ge=1,
            le=60_000,
            description="size of the footprint bucket, as the time in which it drains; the load bucket is twice "
            "as large",
        ),
    ] = 500

    def bucket_limits(self) -> BucketLimits:
        """The settings as the buckets take them."""
        # This import brings numpy, which a command that only reads settings does not need.
        from relaygr.admission.buckets import BucketLimits

        return BucketLimits(
            footprint_reserve=self.footprint_reserve,
            load_limit=self.load_limit,
            preinfer_share=self.preinfer_share,
            burst_us=self.burst_ms * 1000,
        )
