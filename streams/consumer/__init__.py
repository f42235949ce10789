"""The worker's consumer: poll thread and commit watermark."""

from streams.consumer.interface import Handler, LoopState, LoopStatus, Received, Token
from streams.consumer.loop import ConsumerFactory, ConsumerLoop
from streams.consumer.settings import ConsumerSettings
from streams.consumer.watermark import Begin, TopicPartition, WatermarkTracker

__all__ = [
    "Begin",
    "ConsumerFactory",
    "ConsumerLoop",
    "ConsumerSettings",
    "Handler",
    "LoopState",
    "LoopStatus",
    "Received",
    "Token",
    "TopicPartition",
    "WatermarkTracker",
]
