"""The worker's consumer: poll thread and commit watermark."""

from streams.consumer.finished import FinishedLog, FinishedOffsets
from streams.consumer.interface import Handler, LoopState, LoopStatus, Membership, Received, Token
from streams.consumer.loop import ConsumerFactory, ConsumerLoop
from streams.consumer.settings import ConsumerSettings
from streams.consumer.watermark import Begin, Progress, TopicPartition, WatermarkTracker

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
