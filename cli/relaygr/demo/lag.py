"""The lag line of the live table."""

from __future__ import annotations

from collections.abc import Sequence

from relaygr.kafka.settings import KafkaSettings
from relaygr.lag import GroupReport, LagMonitor, LagSettings


class LagWatch:
    """Measures lag in the background while it is entered."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._monitor = LagMonitor(kafka, LagSettings(interval_s=2.0, record_timeout_s=0))

    def __enter__(self) -> LagWatch:
        self._monitor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._monitor.stop()

    def lines(self) -> Sequence[str]:
        """One short text a group; nothing before the first measurement."""
        report = self._monitor.state.report
        return () if report is None else [_line(group) for group in report.groups]


def _line(group: GroupReport) -> str:
    name = group.group.rpartition(".")[2]
    split = f", OWNER SPLIT of {len(group.owner_split)}" if group.owner_split else ""
    return f"{name}: {group.lag} messages, {group.status.value}{split}"
