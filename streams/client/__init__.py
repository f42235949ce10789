"""A gateway's client: publish retrieval events, rank, read the answers.

outcome.py       what a caller gets back: outcomes and typed errors
settings.py      bounds and times
sync.py          RelayClient, for plain threads
aio.py           AsyncRelayClient, for asyncio
publisher.py     EventPublisher: retrieval events and histories, without answers
requests.py      request ids, and messages from keyword arguments
pending.py       pure: requests in flight and their timers
clock_offset.py  pure: each worker's clock against ours
ledger.py        the book of requests: joins the two above with futures, counts and callbacks
link.py          producers, results partition, I/O thread
metrics.py       relaygr_gateway_*
"""

from streams.client.aio import AsyncRelayClient
from streams.client.clock_offset import ClockOffset
from streams.client.metrics import ClientStatistics
from streams.client.outcome import (
    ClientError,
    DeliveryReport,
    LostRequest,
    MessageRefused,
    NotRunning,
    QueueFull,
    RankOutcome,
    RankStatus,
    TimeOutReason,
)
from streams.client.publisher import EventPublisher
from streams.client.settings import ClientSettings
from streams.client.sync import RelayClient

__all__ = [
    "AsyncRelayClient",
    "ClientError",
    "ClientSettings",
    "ClientStatistics",
    "ClockOffset",
    "DeliveryReport",
    "EventPublisher",
    "LostRequest",
    "MessageRefused",
    "NotRunning",
    "QueueFull",
    "RankOutcome",
    "RankStatus",
    "RelayClient",
    "TimeOutReason",
]
