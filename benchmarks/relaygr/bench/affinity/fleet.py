"""The members as processes, and the partitions that each owns."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from relaygr.consumer.leave import leave
from relaygr.kafka.settings import GroupProtocol, KafkaSettings
from relaygr.runtime.errors import RelayError

_POLL_S = 0.01
_QUIET_S = 0.5
"""An assignment that holds for so long is the last one of a rebalance."""
_STOP_S = 30.0

Owners = Mapping[int, str]
"""Partition -> name of its owner."""


def range_owners(names: Sequence[str], partitions: int) -> dict[int, str]:
    """The owners that the assignor `range` chooses: each member, in the order of the ids, gets the next ones."""
    share, rest = divmod(partitions, len(names))
    counts = [share + (place < rest) for place in range(len(names))]
    owners = [name for name, count in zip(sorted(names), counts, strict=True) for _ in range(count)]
    return dict(enumerate(owners))


def moved(before: Owners, after: Owners) -> frozenset[int]:
    """Partitions that moved away from members which are still there."""
    live = set(after.values())
    return frozenset(part for part, owner in before.items() if owner in live and after[part] != owner)


def best_new_id(names: Sequence[str], partitions: int) -> str:
    """The id with which a new member makes `range` move the fewest partitions: another member's id and `-b`."""
    before = range_owners(names, partitions)
    ids = [f"{name}-b" for name in names]
    return min(ids, key=lambda each: len(moved(before, range_owners([*names, each], partitions))))


def fewest_moves(before: Owners, after: Owners) -> int:
    """The fewest partitions that live members must give up so that the members of `after` have equal shares."""
    names = set(after.values())
    held = sorted((sum(owner == name for owner in before.values()) for name in names), reverse=True)
    share, rest = divmod(len(before), len(names))
    return sum(max(0, count - share - (place < rest)) for place, count in enumerate(held))


class _Process:
    """A member's process, and the thread that reads its assignments."""

    def __init__(self, name: str, settings: str) -> None:
        command = [sys.executable, "-m", "relaygr.bench.affinity.member", settings, name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.owned: frozenset[int] = frozenset()
        self.changed_s = time.monotonic()
        self._thread = threading.Thread(target=self._read, name=f"reads {name}", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self, number: signal.Signals) -> None:
        """Sends the signal, and waits for the end of the process."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.send_signal(number)
        process.wait(_STOP_S)
        self._thread.join()
        process.stdin.close()
        process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.owned, self.changed_s = frozenset(json.loads(line)), time.monotonic()


class Fleet:
    """Starts and ends members. A context manager, which ends all of them."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._members: dict[str, _Process] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*self._members]:
            self.kill(name)

    def start(self, name: str) -> None:
        self._members[name] = _Process(name, self._kafka.model_dump_json())

    def kill(self, name: str) -> None:
        """kill -9."""
        self._members.pop(name).end(signal.SIGKILL)

    def stop(self, name: str) -> None:
        """Ends the member for good. Unless the protocol forbids it, its partitions move at once."""
        self._members.pop(name).end(signal.SIGTERM)
        if self._kafka.group_protocol is GroupProtocol.CLASSIC:
            leave(self._kafka, self._kafka.workers_group, name)

    def await_owners(self, timeout_s: float) -> tuple[Owners, float]:
        """The owners once every partition has exactly one among the members that run, and since when (monotonic s).

        Every member that runs owns something then. Raises RelayError if that does not come true in time.
        """
        ends_s = time.monotonic() + timeout_s
        while time.monotonic() < ends_s:
            if ended := [name for name, each in self._members.items() if each.has_ended]:
                raise RelayError(f"{', '.join(ended)} ended by itself: its log is on standard error")
            since_s = max(each.changed_s for each in self._members.values())
            pairs = [(part, name) for name, each in self._members.items() for part in each.owned]
            owners = dict(pairs)
            is_whole = len(pairs) == len(owners) == self._kafka.partitions
            if is_whole and len(set(owners.values())) == len(self._members) and time.monotonic() > since_s + _QUIET_S:
                return owners, since_s
            time.sleep(_POLL_S)
        listed = {name: len(each.owned) for name, each in self._members.items()}
        raise RelayError(f"{self._kafka.partitions} partitions have not one owner each after {timeout_s:g} s: {listed}")
