"""The consumer loop of a worker: poll thread, commit watermark, finished offsets for a successor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaygr.schemas.lazy import lazy_names

if TYPE_CHECKING:
    from relaygr.consumer.finished import FinishedLog, FinishedOffsets
    from relaygr.consumer.interface import Handler, LoopState, LoopStatus, Membership, Received, Token
    from relaygr.consumer.loop import ConsumerFactory, ConsumerLoop
    from relaygr.consumer.settings import ConsumerSettings
    from relaygr.consumer.watermark import Begin, Progress, TopicPartition, WatermarkTracker

__all__ = [
    "Begin",
    "ConsumerFactory",
    "ConsumerLoop",
    "ConsumerSettings",
    "FinishedLog",
    "FinishedOffsets",
    "Handler",
    "LoopState",
    "LoopStatus",
    "Membership",
    "Progress",
    "Received",
    "Token",
    "TopicPartition",
    "WatermarkTracker",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        __all__,
        (
            "relaygr.consumer.settings",
            "relaygr.consumer.watermark",
            "relaygr.consumer.interface",
            "relaygr.consumer.finished",
            "relaygr.consumer.loop",
        ),
    )
