"""The consumer loop of a worker: poll thread, commit watermark, finished offsets for a successor."""

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
