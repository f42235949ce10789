"""Prints the outcomes of ranking requests as JSON lines on standard output."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import typer

from relaygr.client import RankOutcome
from relaygr.publishing.sending import when_there_is_room
from relaygr.schemas.json_messages import to_json
from relaygr.schemas.messages import RankingRequest


class Outcomes:
    """Prints outcomes in a thread of its own, and limits the number of open requests.

    So it can print an outcome while the main thread waits for the next line of a pipe.
    """

    def __init__(self, max_in_flight: int) -> None:
        self.counts: Counter[str] = Counter()
        self._max_in_flight = max_in_flight
        self._room = threading.Semaphore(max_in_flight)
        self._ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._print, name="relaygr-outcomes", daemon=True)

    def follow(self, line: int, request: RankingRequest, submit: Callable[[], Future[RankOutcome]]) -> None:
        """Waits until fewer than `max_in_flight` requests are open, and submits one. Its outcome will be printed."""
        self._room.acquire()
        try:
            future = when_there_is_room(submit, time.sleep)
        except BaseException:
            self._room.release()
            raise
        user_id = request.user_id

        def end(done: Future[RankOutcome]) -> None:
            outcome = done.result()
            self.counts[outcome.status.value] += 1
            self._ended.put(json.dumps({"line": line, "user_id": user_id, **to_json(outcome)}))
            self._room.release()

        future.add_done_callback(end)

    def wait(self) -> None:
        """Waits until every request has ended."""
        for _ in range(self._max_in_flight):
            self._room.acquire()

    def __enter__(self) -> Outcomes:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.put(None)
        self._thread.join()

    def _print(self) -> None:
        while (text := self._ended.get()) is not None:
            try:
                typer.echo(text)
            except BrokenPipeError:
                # The reader of the outcomes has exited; further outcomes are counted only.
                return
