"""A gateway's client: it publishes retrieval events, sends ranking requests and reads their results.

outcome.py       outcomes and errors of the client's calls
settings.py      bounds and times
sync.py          RelayClient, for threads
aio.py           AsyncRelayClient, for asyncio
publisher.py     EventPublisher, for retrieval events and histories only
requests.py      request ids, and messages from keyword arguments
pending.py       the table of open requests and their timers; no I/O
clock_offset.py  the offset of each worker's clock; no I/O
ledger.py        the open requests, with futures, counters and callbacks; no Kafka
link.py          producers, the results partition, the I/O thread
process.py       errors of a client in a forked process, or with green threads
metrics.py       the metrics relaygr_gateway_*
scenarios.py     the client of each user, for a gateway with several scenarios
tracing.py       the spans of a gateway that has a tracer
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaygr.schemas.lazy import lazy_names

if TYPE_CHECKING:
    from relaygr.client.aio import AsyncRelayClient
    from relaygr.client.clock_offset import ClockOffset
    from relaygr.client.metrics import ClientStatistics
    from relaygr.client.outcome import (
        ClientError,
        DeliveryReport,
        LostRequest,
        MessageRefused,
        MessageTooLarge,
        NotRunning,
        QueueFull,
        RankOutcome,
        RequestIdInUse,
    )
    from relaygr.client.publisher import EventPublisher
    from relaygr.client.scenarios import ScenarioClients
    from relaygr.client.settings import ClientSettings
    from relaygr.client.sync import RelayClient
    from relaygr.schemas.ended import Ended, Reason
    from relaygr.schemas.version import __version__

__all__ = [
    "AsyncRelayClient",
    "ClientError",
    "ClientSettings",
    "ClientStatistics",
    "ClockOffset",
    "DeliveryReport",
    "Ended",
    "EventPublisher",
    "LostRequest",
    "MessageRefused",
    "MessageTooLarge",
    "NotRunning",
    "QueueFull",
    "RankOutcome",
    "Reason",
    "RelayClient",
    "RequestIdInUse",
    "ScenarioClients",
    "__version__",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        __all__,
        (
            "relaygr.client.settings",
            "relaygr.client.outcome",
            "relaygr.client.clock_offset",
            "relaygr.client.metrics",
            "relaygr.client.publisher",
            "relaygr.client.sync",
            "relaygr.client.aio",
            "relaygr.client.scenarios",
            "relaygr.schemas.ended",
            "relaygr.schemas.version",
        ),
    )
