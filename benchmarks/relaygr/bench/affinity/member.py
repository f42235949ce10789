"""A member of the fleet: `python -m relaygr.bench.affinity.member SETTINGS NAME`, the settings of Kafka as JSON.

It is the workers' consumer loop with a handler that remembers jobs and answers requests at once. Each assignment is a
line on the standard output: the partitions that the member owns, as a JSON list. SIGTERM stops it, and so does the end
of its standard input, which is the end of its parent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import deque

from confluent_kafka import Consumer, KafkaError, Message

from relaygr.consumer import ConsumerLoop, LoopState, Received, Token
from relaygr.kafka.client_errors import ErrorCallback
from relaygr.kafka.clients import ProducerKind, make_group_consumer, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.logs import configure_logging
from relaygr.runtime.settings import LogLevel, LogSettings
from relaygr.schemas.headers import is_job
from relaygr.schemas.topics import Topic

_DRAIN_S = 1.0
_TURN_S = 0.5


class Member:
    """The handler of a consumer loop. A job's value is its id; a request's value is its id and that of its job."""

    def __init__(self, kafka: KafkaSettings, name: str) -> None:
        self._name = name
        self._results = kafka.topic(Topic.RESULTS)
        self._ranking = kafka.topic(Topic.RANKING)
        self._jobs: dict[str, str] = {}
        self._unsent: deque[tuple[Token, bytes]] = deque()
        """Answers that the producer had no room for."""
        self._producer = make_producer(kafka, ProducerKind.LATENCY, name)

        def consumer(on_error: ErrorCallback) -> Consumer:
            return make_group_consumer(kafka, kafka.workers_group, name, instance_id=name, on_error=on_error)

        topics = [kafka.topic(topic) for topic in kafka.worker_topics]
        self.loop = ConsumerLoop(consumer, topics, self, name=name, is_incremental=kafka.affinity.is_incremental)

    def on_message(self, message: Received) -> None:
        user, text = (message.key or b"").decode(), (message.value or b"").decode()
        if message.topic != self._ranking or is_job(message.headers):
            self._jobs[user] = text
            self.loop.finish(message.token)
        else:
            request_id, job = text.split()
            self._answer(message.token, json.dumps([request_id, self._name, self._jobs.get(user) == job]).encode())

    def _answer(self, token: Token, value: bytes) -> None:
        """Sends the answer until it is delivered. Only then its request is finished: a member may be killed before."""

        def reported(error: KafkaError | None, _: Message) -> None:
            if error is None:
                self.loop.finish(token)
            else:
                self._answer(token, value)

        try:
            self._producer.produce(self._results, value, partition=0, on_delivery=reported)
        except BufferError:
            # `reported` may not wait for room: the producer makes room after it.
            self._unsent.append((token, value))

    def on_batch(self) -> bool:
        self._producer.poll(0)
        for _ in range(len(self._unsent)):
            self._answer(*self._unsent.popleft())
        return False

    def on_rebalance(self) -> None:
        pass

    def on_assigned(self, partitions: frozenset[int], assignment_epoch: int) -> None:  # noqa: ARG002
        sys.stdout.write(json.dumps(sorted(partitions)) + "\n")
        sys.stdout.flush()

    def on_revoked(self, partitions: frozenset[int]) -> None:
        pass

    def on_lost(self, partitions: frozenset[int]) -> None:
        pass

    def on_tick(self, now_us: int) -> None:  # noqa: ARG002
        self.on_batch()

    def run(self) -> int:
        """Until SIGTERM or the end of the loop. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.loop.stop(_DRAIN_S))
        threading.Thread(target=_end_with_the_parent, daemon=True).start()
        self.loop.start()
        while not self.loop.join(_TURN_S):
            pass
        self._producer.flush(1)
        return 0 if self.loop.status().state is LoopState.STOPPED else 1


def _end_with_the_parent() -> None:
    # Not through `sys.stdin`, whose lock would be held when the interpreter ends.
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    # Logs go to standard error: they must not mix with the assignments.
    configure_logging(LogSettings(level=LogLevel.WARNING))
    sys.exit(Member(KafkaSettings.model_validate_json(sys.argv[1]), sys.argv[2]).run())
