"""Sends one impression through the running relay: a retrieval event, and its ranking request."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
from prometheus_client import CollectorRegistry

from relaygr.client import ClientSettings, DeliveryReport, RankOutcome, RelayClient
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.partitioner import partition_for

BUDGET_MS: Final = 5_000
CANDIDATES: Final = 4
_USER: Final = "relaygr-doctor"
_MOST_USERS: Final = 1_000


@dataclass(frozen=True, slots=True)
class SeenImpression:
    """How the impression ended."""

    undelivered: str | None
    """Why the retrieval event was not delivered; None if the broker acknowledged it."""
    outcome: RankOutcome
    offsets_us: dict[str, int]
    """The clock of each worker that answered minus ours."""


def send(kafka: KafkaSettings, owned: Collection[int], scenario: str | None = None) -> SeenImpression:
    """Sends the impression of a user without a history, whose partition is in `owned`. Takes `BUDGET_MS` and some more.

    Raises RelayError if the client cannot start, and ClientError if it cannot send.
    """
    user = next(
        (name for name in _names() if partition_for(name.encode(), kafka.partitions) in owned),
        _USER,
    )
    reports: list[DeliveryReport] = []
    reported = threading.Event()

    def keep(report: DeliveryReport) -> None:
        reports.append(report)
        reported.set()

    settings = ClientSettings(close_timeout_s=1.0, lost_after_ms=0)
    client = RelayClient(kafka, f"doctor-{secrets.token_hex(4)}", settings, registry=CollectorRegistry())
    with client:
        event = client.publish_retrieval(
            user,
            on_delivery=keep,
            ranking_budget_ms=BUDGET_MS,
            expected_ranking_in_ms=100,
            expected_candidates=CANDIDATES,
            expected_suffix=0,
            scenario=scenario,
        )
        outcome = client.rank(
            user,
            np.arange(CANDIDATES),
            budget_ms=BUDGET_MS,
            request_id=event.request_id,
            query_time_ms=event.retrieval_at_us // 1000,
            scenario=scenario,
        )
        reported.wait(BUDGET_MS / 1000)
        offsets_us = {worker: round(offset.offset_us) for worker, offset in client.clock_offsets().items()}
    undelivered = reports[0].error if reports else "the broker gave no answer in time"
    return SeenImpression(undelivered, outcome, offsets_us)


def _names() -> list[str]:
    return [_USER, *(f"{_USER}-{number}" for number in range(1, _MOST_USERS))]
