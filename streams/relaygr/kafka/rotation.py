"""New certificates and passwords for a process whose clients read them only when they are made.

A server process (worker, trigger, lag exporter, page) ends when Kafka refuses its clients and the files of `security`
have changed since its start, so that whatever started it starts it again with the new files. It does not end before:
its connections go on, and its caches are worth more. `RelayClient` makes new clients instead.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from relaygr.kafka.client_errors import PROCESS_REFUSAL
from relaygr.kafka.security import SecurityFiles
from relaygr.kafka.settings import Security
from relaygr.runtime.errors import RelayError

LOOK_S: Final = 2.0

_log = structlog.get_logger()


@contextmanager
def ends_for_new_files(security: Security) -> Iterator[None]:
    """While the block runs, sends SIGTERM to this process if it needs new files, and then raises RelayError."""
    files = SecurityFiles(security)
    over, outdated = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            cause = PROCESS_REFUSAL.cause
            if cause is not None and files.changed():
                outdated.set()
                _log.error("ends, so that its successor reads the new files of `security`", kafka_refuses=cause)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, name="security-files", daemon=True)
    if files.paths:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if files.paths:
            thread.join()
    if outdated.is_set():
        raise RelayError(
            f"Kafka refused this process, whose files of `security` ({', '.join(map(str, files.paths))}) have changed "
            "since its start: start it again."
        )
