"""A worker of some version: answers with the newest members of its open choices until its input ends."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path as FilePath

sys.path.append(str(FilePath(__file__).parents[2]))

from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas import (
    Ended,
    LatencyCoefficients,
    Path,
    PrefixSource,
    RankingRequest,
    RankingResult,
    StageTimings,
    Topic,
    WorkerState,
    WorkerStatus,
    encode,
)
from relaygr.schemas.ended import WIRE_REASONS
from tests.echo_worker import echo_worker, ranked

STATUS = WorkerStatus(
    "worker-00", list(WorkerState)[-1], 1, 1, (0,), "r", 1024, 2, 2, 64, 1, 1, 1, 1, 0, 0,
    LatencyCoefficients(*[1.0] * 11),
)  # fmt: skip


def answer(request: RankingRequest) -> list[bytes]:
    """Fails the user `failed`, ranks every other."""
    result = ranked(request)
    if request.user_id != "failed":
        return [encode(replace(result, path=list(Path)[-1], prefix_source=list(PrefixSource)[-1]))]
    reason = WIRE_REASONS[-1]
    times = (request.sent_at_us, result.received_at_us, result.sent_at_us)
    return [encode(RankingResult(request.request_id, "worker-00", Ended.FAILED, *times, StageTimings(), reason))]


def main() -> None:
    kafka = KafkaSettings.model_validate_json(sys.argv[1])
    with echo_worker(kafka, answer):
        producer = make_producer(kafka, ProducerKind.DURABLE, "status-writer")
        producer.produce(kafka.topic(Topic.WORKERS), key=b"worker-00", value=encode(STATUS))
        producer.flush(10)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
