"""The messages on the topics: their classes, the MessagePack codec, digests, headers, routing, the topic catalogue.

It needs msgpack and numpy only, so that a publisher can install `relaygr` without any extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaygr.schemas.lazy import lazy_names

if TYPE_CHECKING:
    from relaygr.schemas.codec import SCHEMA_VERSION, DecodeError, DecodeReason, EncodeError, decode, encode
    from relaygr.schemas.digest import DigestChain, digest_chain
    from relaygr.schemas.ended import Ended, Reason
    from relaygr.schemas.fields import Other
    from relaygr.schemas.headers import RankingHeaders, ResultHeaders
    from relaygr.schemas.messages import (
        BehaviourEvent,
        Behaviours,
        BehavioursOffset,
        Continuation,
        Diverted,
        FullPathReport,
        History,
        HistoryVersion,
        LatencyCoefficients,
        LeadTimeReport,
        LengthRatios,
        Path,
        PrefixSource,
        PreInferJob,
        RankingRequest,
        RankingResult,
        RetrievalEvent,
        StageTimings,
        StaleCause,
        WorkerState,
        WorkerStatus,
    )
    from relaygr.schemas.partitioner import partition_for
    from relaygr.schemas.topics import CATALOGUE, Topic, TopicSpec
    from relaygr.schemas.version import __version__

__all__ = [
    "CATALOGUE",
    "SCHEMA_VERSION",
    "BehaviourEvent",
    "Behaviours",
    "BehavioursOffset",
    "Continuation",
    "DecodeError",
    "DecodeReason",
    "DigestChain",
    "Diverted",
    "EncodeError",
    "Ended",
    "FullPathReport",
    "History",
    "HistoryVersion",
    "LatencyCoefficients",
    "LeadTimeReport",
    "LengthRatios",
    "Other",
    "Path",
    "PreInferJob",
    "PrefixSource",
    "RankingHeaders",
    "RankingRequest",
    "RankingResult",
    "Reason",
    "ResultHeaders",
    "RetrievalEvent",
    "StageTimings",
    "StaleCause",
    "Topic",
    "TopicSpec",
    "WorkerState",
    "WorkerStatus",
    "__version__",
    "decode",
    "digest_chain",
    "encode",
    "partition_for",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        __all__,
        (
            "relaygr.schemas.version",
            "relaygr.schemas.topics",
            "relaygr.schemas.partitioner",
            "relaygr.schemas.digest",
            "relaygr.schemas.ended",
            "relaygr.schemas.fields",
            "relaygr.schemas.messages",
            "relaygr.schemas.codec",
            "relaygr.schemas.headers",
        ),
    )
