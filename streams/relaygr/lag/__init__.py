"""Consumer lag: how far each group is behind, in messages and in seconds, who owns what, and whether it moves.

collector   asks Kafka, and joins no group that it watches
time_lag    seconds behind: interpolated between polls, or read from one record
status      Burrow's rules over the last polls
owners      partitions whose users' messages go to two owners
report      all of that put together, pure
monitor     collects in the background
exporter    the report as Prometheus metrics; a scrape asks Kafka nothing
"""

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
