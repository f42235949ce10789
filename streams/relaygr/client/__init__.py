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

from relaygr.client.aio import AsyncRelayClient
from relaygr.client.clock_offset import ClockOffset
from relaygr.client.metrics import ClientStatistics
from relaygr.client.outcome import (
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
from relaygr.client.publisher import EventPublisher
from relaygr.client.settings import ClientSettings
from relaygr.client.sync import RelayClient
from relaygr.schemas.version import __version__

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
    "__version__",
]
