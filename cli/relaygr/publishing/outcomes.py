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
from relaygr.publishing.sending import print_line, when_there_is_room
from relaygr.schemas.json_messages import to_json
from relaygr.schemas.messages import RankingRequest


class Outcomes:
    """Prints and counts outcomes in a thread of its own. Limits the requests that are open or not printed yet.

    So it can print an outcome while the main thread waits for the next line of a pipe, and a slow reader of the
    outcomes slows the requests down.
    """

    def __init__(self, max_in_flight: int) -> None:
        self.counts: Counter[str] = Counter()
        self._max_in_flight = max_in_flight
        self._room = threading.Semaphore(max_in_flight)
        self._ended: queue.SimpleQueue[tuple[int, str, RankOutcome] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._print, name="relaygr-outcomes", daemon=True)

    def follow(self, line: int, request: RankingRequest, submit: Callable[[], Future[RankOutcome]]) -> None:
        """Waits until there is room for another request, and submits it. Its outcome will be printed."""
        self._room.acquire()
        try:
            future = when_there_is_room(submit, time.sleep)
        except BaseException:
            self._room.release()
            raise
        user_id = request.user_id
        # The client's thread must not wait for the reader, so it only hands the outcome over.
        future.add_done_callback(lambda done: self._ended.put((line, user_id, done.result())))

    def wait(self) -> None:
        """Waits until every outcome is printed and counted."""
        for _ in range(self._max_in_flight):
            self._room.acquire()

    def __enter__(self) -> Outcomes:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.put(None)
        self._thread.join()

    def _print(self) -> None:
        can_print = True
        while (ended := self._ended.get()) is not None:
            line, user_id, outcome = ended
            self.counts[outcome.status.value] += 1
            try:
                if can_print:
                    typer.echo(json.dumps({"line": line, "user_id": user_id, **to_json(outcome)}))
            except OSError as error:
                # The reader has exited, or its disk is full: further outcomes are counted only.
                can_print = False
                if not isinstance(error, BrokenPipeError):
                    print_line(f"outcomes are counted only: standard output cannot be written ({error.strerror})")
            self._room.release()
