"""Which ranking request an overloaded worker passes on, to which worker, and with how much of its history.

A worker asks for each ranking request for which its own admission finds no time (`DivertPolicy.choose`). With a request
that it can answer in time on its whole prefix, it never asks: the cached prefix saves more time than another worker has
to spare. The request is diverted if another worker is predicted to answer it in time without a cached prefix:

    way + backlog + what was sent there since + ratio × full inference <= time left

* `backlog` and the latency model are from the peer's last status, `ratio` is its P95 of measured / predicted time. What
  this worker has sent since that status counts until the peer has had the time to do it.
* Of the least loaded peers, those that differ by little count as equal. A user's requests go to the same one of them,
  which has the user's prefix by then.
* If no peer has time for the whole history, the newest part that fits is attached: at least `LEAST_KEPT` of it, and
  more than the worker could rank itself.

Three bounds keep messages from going to and fro:

* A diverted request is never diverted again: a worker asks only for requests of its own partitions.
* A worker that is short of time takes no diverted requests, and says so in its status (`overflow_partitions` empty). It
  is short of time from a few such requests within a second until `CALM_US` after the last one. If all are, nobody
  diverts.
* At most `largest_share` of the requests that a worker receives are diverted, after a burst of `BURST`.

Pure: no I/O, and the caller gives the time. `now_us` is wall time, as in the statuses. Only `Peers.apply` may run on
another thread.
"""

from __future__ import annotations

import enum
import heapq
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from relaygr.admission.policy import OwnerView
from relaygr.admission.risk import NO_FACTORS, risky_us
from relaygr.schemas.messages import WorkerState, WorkerStatus
from relaygr.schemas.record import record

BURST: Final = 16.0
"""Requests that are diverted at once, before the share counts."""
LEAST_KEPT: Final = 0.2
"""An answer on a smaller part of the history is worth little."""
EXAMINED_PEERS: Final = 4
"""Peers that are judged for one request, the least loaded ones."""
NEAR_US: Final = 3_000.0
"""Peers whose answers are predicted within this time of the earliest count as equal."""
SHORT_REQUESTS: Final = 3
SHORT_WITHIN_US: Final = 1_000_000
"""So many requests without time within this time make a worker short of time."""
CALM_US: Final = 2_000_000
MOST_PEERS: Final = 4096


class NotDiverted(enum.StrEnum):
    """Why a request is not diverted: a metric label."""

    NO_PEER = "no_peer"
    """No live worker of the same model takes diverted requests."""
    NO_TIME = "no_time"
    """No peer could answer in time."""
    SHARE = "share"
    """The largest share was diverted already."""


@record(frozen=True, slots=True)
class Need:
    """A request for which its worker has no time. Behaviours are those of its prefix, cut to the model's limit."""

    user_id: str
    left_us: float
    """Until the answer must leave a worker."""
    way_us: float
    """From here to a peer's device, through the broker."""
    behaviours: int
    most_behaviours: int
    """The most that fit into the message."""
    kept_behaviours: int
    """The newest ones with which the worker could rank the request itself; 0: it could not at all."""
    suffix: int
    candidates: int


@record(frozen=True, slots=True)
class Target:
    """Where a request goes, with its newest `behaviours`."""

    worker_id: str
    partition: int
    behaviours: int


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker by its last status. Each status replaces the whole object."""

    view: OwnerView
    revision: str
    partitions: tuple[int, ...]
    backlog_us: int
    written_at_us: int


class Peers:
    """The other workers that take diverted requests, from their statuses. One thread calls `apply`; any may read."""

    def __init__(self, own_id: str, stale_us: int) -> None:
        """`stale_us`: the age of a status above which its worker does not count as alive."""
        self._own_id = own_id
        self._stale_us = stale_us
        self._peers: dict[str, Peer] = {}

    def apply(self, worker_id: str, status: WorkerStatus | None, now_us: int) -> None:
        """Takes the latest status of a worker; None is its tombstone. Raises ValueError for an unusable status."""
        if worker_id == self._own_id:
            return
        if status is None or status.state is not WorkerState.READY or not status.overflow_partitions:
            self._peers.pop(worker_id, None)
            return
        if len(self._peers) >= MOST_PEERS and worker_id not in self._peers:
            return
        self._peers[worker_id] = Peer(
            OwnerView.of(status),
            status.model_revision,
            status.overflow_partitions,
            status.ranking_backlog_us or 0,
            # A writer whose clock is ahead counts as one that writes now.
            min(status.written_at_us, now_us),
        )

    def alive(self, revision: str, now_us: int) -> list[Peer]:
        """The live peers that serve this model."""
        oldest_us = now_us - self._stale_us
        return [peer for peer in [*self._peers.values()] if _is_usable(peer, revision, oldest_us)]

    def is_alone(self, revision: str, now_us: int) -> bool:
        """Whether `alive` would be empty."""
        oldest_us = now_us - self._stale_us
        return not any(_is_usable(peer, revision, oldest_us) for peer in [*self._peers.values()])


class ShortOfTime:
    """Whether a worker is short of time, with hysteresis."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=SHORT_REQUESTS)
        self._until_us = 0

    def note(self, now_us: int) -> None:
        """A request found no time because of other work."""
        self._recent.append(now_us)
        if now_us < self._until_us or (
            len(self._recent) == SHORT_REQUESTS and now_us - self._recent[0] <= SHORT_WITHIN_US
        ):
            self._until_us = now_us + CALM_US

    def holds(self, now_us: int) -> bool:
        return now_us < self._until_us


class ShareBound:
    """Lets at most a share of the received requests pass, after a burst."""

    def __init__(self, largest_share: float) -> None:
        self._share = largest_share
        self._room = BURST
        self._received = 0

    def has_room(self, received: int) -> bool:
        """`received`: the number of requests that were received so far."""
        self._room = min(BURST, self._room + self._share * max(0, received - self._received))
        self._received = received
        return self._room >= 1

    def take(self) -> None:
        """One more passes."""
        self._room -= 1


@dataclass(slots=True)
class _Sent:
    """What was sent to one peer: when, and its predicted device time."""

    entries: deque[tuple[int, float]] = field(default_factory=deque)

    def left_us(self, peer: Peer, way_us: float, now_us: int) -> float:
        """The part that the peer's last status does not count, and that the peer cannot have done yet."""
        while self.entries and self.entries[0][0] <= peer.written_at_us - way_us:
            self.entries.popleft()
        if not self.entries:
            return 0.0
        return max(0.0, sum(device_us for _, device_us in self.entries) - (now_us - self.entries[0][0]))


class DivertPolicy:
    """The decisions of one worker. See the module docstring. Not thread-safe, but for `peers.apply`."""

    def __init__(self, peers: Peers, largest_share: float) -> None:
        self._peers = peers
        self._share = ShareBound(largest_share)
        self._short = ShortOfTime()
        self._sent: dict[str, _Sent] = {}

    def note_short(self, now_us: int) -> None:
        """The worker has no time for a request, its own or a diverted one."""
        self._short.note(now_us)

    def takes_diverted(self, now_us: int) -> bool:
        """Whether other workers may divert requests to this one."""
        return not self._short.holds(now_us)

    def objection(self, revision: str, received: int, now_us: int) -> NotDiverted | None:
        """Why no request at all is diverted now; None: `choose` decides.

        `received`: the number of requests that this worker has received so far. `revision`: of its model.
        """
        if self._peers.is_alone(revision, now_us):
            return NotDiverted.NO_PEER
        return None if self._share.has_room(received) else NotDiverted.SHARE

    def choose(self, need: Need, revision: str, received: int, now_us: int) -> Target | NotDiverted:
        """The target, to which the caller sends the request; or why there is none."""
        peers = self._peers.alive(revision, now_us)
        if not peers:
            return NotDiverted.NO_PEER
        if not self._share.has_room(received):
            return NotDiverted.SHARE
        waits = [(need.way_us + peer.backlog_us + self._sent_us(peer, need, now_us), peer) for peer in peers]
        least_loaded = heapq.nsmallest(EXAMINED_PEERS, waits, key=lambda each: each[0])
        if need.behaviours <= need.most_behaviours:
            ends = [(wait_us + _full_us(peer, need, need.behaviours), peer) for wait_us, peer in least_loaded]
            earliest_us = min(end_us for end_us, _ in ends)
            if earliest_us <= need.left_us:
                latest_us = min(need.left_us, earliest_us + NEAR_US)
                near = [peer for end_us, peer in ends if end_us <= latest_us]
                return self._send(max(near, key=lambda peer: _affinity(need, peer)), need, need.behaviours, now_us)
        wait_us, peer = least_loaded[0]
        behaviours = _longest(peer, need, need.left_us - wait_us)
        if behaviours < max(1.0, LEAST_KEPT * need.behaviours) or behaviours <= need.kept_behaviours:
            return NotDiverted.NO_TIME
        return self._send(peer, need, behaviours, now_us)

    def _sent_us(self, peer: Peer, need: Need, now_us: int) -> float:
        sent = self._sent.get(peer.view.worker_id)
        return sent.left_us(peer, need.way_us, now_us) if sent is not None else 0.0

    def _send(self, peer: Peer, need: Need, behaviours: int, now_us: int) -> Target:
        self._share.take()
        if len(self._sent) >= MOST_PEERS:
            self._sent.clear()
        entries = self._sent.setdefault(peer.view.worker_id, _Sent()).entries
        entries.append((now_us, _full_us(peer, need, behaviours)))
        partition = peer.partitions[_affinity(need, peer) % len(peer.partitions)]
        return Target(peer.view.worker_id, partition, behaviours)


def _is_usable(peer: Peer, revision: str, oldest_us: int) -> bool:
    return peer.written_at_us >= oldest_us and peer.revision == revision


def _full_us(peer: Peer, need: Need, behaviours: int) -> float:
    """Device time that full inference on so many behaviours rarely exceeds at this peer."""
    view = peer.view
    scored_tokens = view.tokens_per_behaviour * need.suffix + need.candidates
    return risky_us(view.latency, view.full_path_ratios, NO_FACTORS, view.prefix_tokens(behaviours), scored_tokens)


def _longest(peer: Peer, need: Need, spare_us: float) -> int:
    """The most behaviours whose full inference ends within `spare_us` and that fit into the message; 0: none do."""
    fits, above = 0, min(need.behaviours, need.most_behaviours) + 1
    if _full_us(peer, need, 0) > spare_us:
        return 0
    while above - fits > 1:
        middle = (fits + above) // 2
        if _full_us(peer, need, middle) <= spare_us:
            fits = middle
        else:
            above = middle
    return fits


def _affinity(need: Need, peer: Peer) -> int:
    """The same for the same user and peer, and different for different ones."""
    return zlib.crc32(f"{need.user_id}\0{peer.view.worker_id}".encode())
