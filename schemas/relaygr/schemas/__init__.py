"""What crosses a topic: messages, their MessagePack codec, the digest chain and the topic catalogue.

No Kafka and no torch: a publisher can depend on this package alone.
"""

from relaygr.schemas.codec import SCHEMA_VERSION, DecodeError, DecodeReason, EncodeError, decode, encode
from relaygr.schemas.digest import DigestChain, digest_chain
from relaygr.schemas.messages import (
    Behaviours,
    FailureReason,
    History,
    HistoryVersion,
    LatencyCoefficients,
    Outcome,
    Path,
    PrefixSource,
    PreInferJob,
    RankingRequest,
    RankingResult,
    RetrievalEvent,
    StageTimings,
    WorkerState,
    WorkerStatus,
)
from relaygr.schemas.topics import CATALOGUE, Topic, TopicSpec

__all__ = [
    "CATALOGUE",
    "SCHEMA_VERSION",
    "Behaviours",
    "DecodeError",
    "DecodeReason",
    "DigestChain",
    "EncodeError",
    "FailureReason",
    "History",
    "HistoryVersion",
    "LatencyCoefficients",
    "Outcome",
    "Path",
    "PreInferJob",
    "PrefixSource",
    "RankingRequest",
    "RankingResult",
    "RetrievalEvent",
    "StageTimings",
    "Topic",
    "TopicSpec",
    "WorkerState",
    "WorkerStatus",
    "decode",
    "digest_chain",
    "encode",
]
