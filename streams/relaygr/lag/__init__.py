"""Consumer lag: how far each group is behind in messages and seconds, who owns each partition, and the trend.

collector   polls Kafka; joins no group that it measures
model       the result of one poll, and the owner split
status      Burrow's rules over the last polls
report      all of that as one report, with the lag in seconds; pure
monitor     polls in the background
exporter    the report as Prometheus metrics; a scrape sends no request to Kafka
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaygr.schemas.lazy import lazy_names

if TYPE_CHECKING:
    from relaygr.lag.model import GroupMember, GroupSnapshot, PartitionOffsets, Snapshot
    from relaygr.lag.monitor import LagMonitor
    from relaygr.lag.report import GroupReport, LagReport, LagTracker, PartitionReport
    from relaygr.lag.settings import LagSettings
    from relaygr.lag.status import LagStatus

__all__ = [
    "GroupMember",
    "GroupReport",
    "GroupSnapshot",
    "LagMonitor",
    "LagReport",
    "LagSettings",
    "LagStatus",
    "LagTracker",
    "PartitionOffsets",
    "PartitionReport",
    "Snapshot",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        __all__,
        (
            "relaygr.lag.settings",
            "relaygr.lag.status",
            "relaygr.lag.model",
            "relaygr.lag.report",
            "relaygr.lag.monitor",
        ),
    )
