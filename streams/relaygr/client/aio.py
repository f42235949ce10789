"""`AsyncRelayClient`: the same client for asyncio.

It wraps a `RelayClient`, whose I/O thread passes outcomes to the loop with `call_soon_threadsafe`.
(confluent-kafka's asyncio producer supports no headers and took a hundred times as long.) `rank` and
`publish_*` encode and enqueue in the caller's loop; that takes microseconds and does not block. `start`,
`close` and `drain` run in a thread.

Each wait is in the loop of its caller, so several `asyncio.run` may use one client. `on_late` and `on_lost` run in the
loop that called the client last.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from types import TracebackType
from typing import TypeVar, Unpack

from numpy.typing import ArrayLike
from prometheus_client import REGISTRY, CollectorRegistry

from relaygr.client.clock_offset import ClockOffset
from relaygr.client.ledger import OnLate, OnLost
from relaygr.client.metrics import ClientStatistics
from relaygr.client.outcome import DeliveryReport, RankOutcome
from relaygr.client.process import refuse_green_threads
from relaygr.client.publisher import OnDelivery
from relaygr.client.requests import RankFields, RetrievalFields
from relaygr.client.settings import ClientSettings
from relaygr.client.sync import RelayClient
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import Clock
from relaygr.schemas.messages import BehaviourEvent, History, RetrievalEvent
from relaygr.tracing import Tracer

T = TypeVar("T")


class AsyncRelayClient:
    """A gateway's client for event loops, with the contract of `RelayClient`."""

    def __init__(
        self,
        kafka: KafkaSettings,
        gateway_id: str,
        settings: ClientSettings | None = None,
        *,
        on_late: OnLate | None = None,
        on_lost: OnLost | None = None,
        clock: Clock | None = None,
        registry: CollectorRegistry = REGISTRY,
        tracer: Tracer | None = None,
    ) -> None:
        """See `RelayClient`. Raises TypeError for a callback that is a coroutine function, here and in
        `publish_retrieval`: callbacks are called, and not awaited.
        """
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client = RelayClient(
            kafka,
            gateway_id,
            settings,
            on_late=self._in_loop(on_late),
            on_lost=self._in_loop(on_lost),
            clock=clock,
            registry=registry,
            tracer=tracer,
        )

    async def start(self) -> None:
        """See `RelayClient.start`."""
        refuse_green_threads()
        self._enter_loop()
        try:
            await asyncio.to_thread(self._client.start)
        except asyncio.CancelledError:
            # The start goes on, and nobody closes a client that has not started. This waits for it.
            threading.Thread(target=self._client.close, name="close-unstarted").start()
            raise

    async def close(self) -> None:
        """See `RelayClient.close`."""
        try:
            await asyncio.to_thread(self._client.close)
        except RuntimeError:
            # Python starts no threads any more, as in a handler of `atexit`.
            self._client.close()

    async def __aenter__(self) -> AsyncRelayClient:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def drain(self, timeout_s: float) -> bool:
        """See `RelayClient.drain`."""
        return await asyncio.to_thread(self._client.drain, timeout_s)

    async def rank(self, user_id: str, candidates: ArrayLike, **fields: Unpack[RankFields]) -> RankOutcome:
        """See `RelayClient.rank`. Cancelling the wait does not withdraw the request."""
        self._enter_loop()
        return await asyncio.wrap_future(self._client.submit_rank(user_id, candidates, **fields))

    def publish_retrieval(
        self, user_id: str, *, on_delivery: OnDelivery | None = None, **fields: Unpack[RetrievalFields]
    ) -> RetrievalEvent:
        """See `RelayClient.publish_retrieval`. Does not wait for the broker. `on_delivery` runs in the loop and with
        the context of the caller.
        """
        loop = None
        with suppress(RuntimeError):  # The caller may be a thread without a loop.
            loop = self._enter_loop()
        return self._client.publish_retrieval(user_id, on_delivery=self._in_loop(on_delivery, loop), **fields)

    async def publish_history(self, history: History) -> DeliveryReport:
        """Replaces a user's history. Returns when the broker has accepted or refused the message."""
        return await self._delivered(lambda on_delivery: self._client.publish_history(history, on_delivery))

    async def publish_behaviours(self, event: BehaviourEvent) -> DeliveryReport:
        """Adds behaviours to a user's history. Returns when the broker has accepted or refused the message."""
        return await self._delivered(lambda on_delivery: self._client.publish_behaviours(event, on_delivery))

    async def tombstone(self, user_id: str) -> DeliveryReport:
        """Deletes a user's history, also in the workers. Returns when the broker has accepted or refused it."""
        return await self._delivered(lambda on_delivery: self._client.tombstone(user_id, on_delivery))

    def new_request_id(self) -> str:
        """See `RelayClient.new_request_id`."""
        return self._client.new_request_id()

    @property
    def results_partition(self) -> int:
        """See `RelayClient.results_partition`."""
        return self._client.results_partition

    @property
    def in_flight(self) -> int:
        """See `RelayClient.in_flight`."""
        return self._client.in_flight

    @property
    def refusal(self) -> str | None:
        """See `RelayClient.refusal`."""
        return self._client.refusal

    @property
    def silence(self) -> str | None:
        """See `RelayClient.silence`."""
        return self._client.silence

    def statistics(self) -> ClientStatistics:
        """See `RelayClient.statistics`."""
        return self._client.statistics()

    def clock_offsets(self) -> dict[str, ClockOffset]:
        """See `RelayClient.clock_offsets`."""
        return self._client.clock_offsets()

    async def _delivered(self, publish: Callable[[OnDelivery], None]) -> DeliveryReport:
        self._enter_loop()
        reported: Future[DeliveryReport] = Future()
        # A message that was published cannot be withdrawn, so cancel() has no effect.
        reported.set_running_or_notify_cancel()
        publish(reported.set_result)
        return await asyncio.wrap_future(reported)

    def _enter_loop(self) -> asyncio.AbstractEventLoop:
        self._loop = loop = asyncio.get_running_loop()
        return loop

    def _in_loop(
        self, callback: Callable[[T], None] | None, loop: asyncio.AbstractEventLoop | None = None
    ) -> Callable[[T], None] | None:
        """A callback that runs in `loop`, with the context of now; None: in the loop that called the client last."""
        if callback is None:
            return None
        if inspect.iscoroutinefunction(callback):
            name = getattr(callback, "__qualname__", repr(callback))
            raise TypeError(f"{name} is a coroutine function, and callbacks are not awaited: give a plain function")

        context = copy_context() if loop is not None else None

        def hand_over(value: T) -> None:
            used = loop or self._loop
            if used is not None and not used.is_closed():
                used.call_soon_threadsafe(callback, value, context=context)

        return hand_over
