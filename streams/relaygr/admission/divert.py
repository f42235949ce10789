"""Which ranking request an overloaded worker passes on, and to which worker.

A worker calls `DivertPolicy.choose` for each ranking request that its own admission has no time for. It never diverts a
request that it can answer in time on the whole prefix: the cached prefix saves more time than another worker has to
spare. The request is diverted if another worker is predicted to rank it on its whole history, with time to spare:

    transit + backlog + what was sent there since + work <= 3/4 of the time left

* `backlog` and the latency model are from the peer's last status. What this worker has sent since that status counts
  until the peer has had the time to do it.
* `work` is full inference, times the peer's P98 of measured / predicted time. Where this worker sent the user's history
  before, the peer has cached the prefix: `work` is a hit then, or an append (`Placements`).
* A user's requests go to a peer that has the prefix, if one has time. Else they go to one of the least loaded peers.
  Those that differ by little count as equal, and users are spread over them.
* A history is cut only if it is larger than the message may be: to its newest part, at least `LEAST_KEPT` of it, and
  more than the worker could rank itself. A history is never cut to save time, since such an answer counts as late.

Three bounds keep requests from being passed back and forth:

* A diverted request is never diverted again: a worker asks only for requests of its own partitions.
* A worker that is short of time takes no diverted requests, and says so in its status (`overflow_partitions` empty). A
  worker becomes short of time when it has no time for `SHORT_REQUESTS` requests within a second, and stays so until
  `CALM_US` after the last such request. While all workers are short of time, none diverts.
* At most `largest_share` of the requests that a worker receives are diverted, after a burst of `BURST`.

Pure: no I/O, and the caller gives the time. `now_us` is wall time, as in the statuses, and may be set back. `at_us` of
`note_short` and `takes_diverted` is monotonic. Only `Peers.apply` may run on another thread.
"""

from __future__ import annotations

import enum
import heapq
import zlib
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import Final

from relaygr.admission.policy import OwnerView, PrefixHolder
from relaygr.admission.risk import NO_FACTORS, risky_us
from relaygr.admission.worker_table import WorkerTable
from relaygr.schemas.messages import WorkerState, WorkerStatus
from relaygr.schemas.record import record

BURST: Final = 16.0
"""Requests that are diverted at once, before the share counts."""
LEAST_KEPT: Final = 0.2
"""An answer on a smaller part of the history is worth little."""
USED_SHARE: Final = 0.75
"""The share of the time left that a peer may be predicted to need. The rest covers hops and prediction errors."""
EXAMINED_PEERS: Final = 4
"""Peers that are judged for one request, the least loaded ones and those that have the prefix."""
NEAR_US: Final = 3_000.0
"""Peers whose answers are predicted within this time of the earliest count as equal."""
SHORT_REQUESTS: Final = 3
SHORT_WITHIN_US: Final = 1_000_000
"""`SHORT_REQUESTS` requests without time within this time make a worker short of time, until `CALM_US` later."""
CALM_US: Final = 2_000_000
MOST_PEERS: Final = 1024
"""Of more workers, these are enough to choose from; each request that is diverted looks at all of them."""
MOST_USERS: Final = 16_384
"""Users whose peers are remembered, about 10 MiB."""
PLACES_OF_A_USER: Final = 2
"""The requests of a user whom one peer cannot serve alone go to two peers in turns."""
CACHED_FOR_US: Final = 60_000_000
"""How long a prefix counts as cached at the peer after it was sent, because peers do not report evictions."""


class DivertOutcome(enum.StrEnum):
    """What became of a ranking request for which its worker had no time: a metric label."""

    DELIVERED = "delivered"
    """Another worker has it."""
    UNDELIVERED = "undelivered"
    """It could not be passed on."""
    NO_PEER = "no_peer"
    """No live worker of the same model takes diverted requests."""
    NO_TIME = "no_time"
    """No peer could rank the whole history in time."""
    TOO_LARGE = "too_large"
    """Too little of the history fits into the message."""
    SHARE = "share"
    """The largest share was diverted already."""


@record(frozen=True, slots=True)
class Need:
    """A request that its worker has no time for. `behaviours` counts its prefix, cut to the model's limit."""

    user_id: str
    left_us: float
    """Time until the answer must leave a worker."""
    transit_us: float
    """Time from here to a peer's device, through the broker."""
    behaviours: int
    most_behaviours: int
    """The most behaviours that fit into the message."""
    kept_behaviours: int
    """The newest behaviours on which the worker itself could rank the request in time; 0: it could not rank it."""
    suffix: int
    candidates: int
    lineage: bytes = b""
    """Equal for a history and its later versions that only grew. Otherwise the prefixes have nothing in common."""


@record(frozen=True, slots=True)
class Target:
    """Where a request goes, with its newest `behaviours`."""

    worker_id: str
    partition: int
    behaviours: int
    placed: Placed | None = field(default=None, compare=False)
    """For `Placements.note`, once the request is delivered. None: its history was cut."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker by its last status. Each status replaces the whole object."""

    view: OwnerView
    partitions: tuple[int, ...]
    backlog_us: int
    written_at_us: int


class Peers:
    """The other workers that take diverted requests, from their statuses. One thread calls `apply`; any may read."""

    def __init__(self, own_id: str, stale_us: int) -> None:
        """`stale_us`: the age of a status above which its worker does not count as alive."""
        self._own_id = own_id
        self._stale_us = stale_us
        self._peers: WorkerTable[Peer] = WorkerTable(MOST_PEERS, stale_us)

    def apply(self, worker_id: str, status: WorkerStatus | None, now_us: int) -> None:
        """Takes the latest status of a worker; None is its tombstone.

        Raises ValueError for an unusable status, and for one without room.
        """
        if worker_id == self._own_id:
            return
        if status is None or status.state is not WorkerState.READY or not status.overflow_partitions:
            self._peers.pop(worker_id, None)
            return
        # Which partitions it owns is not needed, and may be much.
        view = OwnerView.of(replace(status, partitions=()))
        self._peers.make_room(worker_id, now_us)
        # A writer whose clock is ahead counts as one that writes now.
        written_at_us = min(status.written_at_us, now_us)
        self._peers.put(
            worker_id, Peer(view, status.overflow_partitions, status.ranking_backlog_us or 0, written_at_us)
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
    """Whether a worker is short of time, with hysteresis. Times are monotonic."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=SHORT_REQUESTS)
        self._until_us = 0

    def note(self, at_us: int) -> None:
        """A request found no time because of other work."""
        self._recent.append(at_us)
        if at_us < self._until_us or (
            len(self._recent) == SHORT_REQUESTS and at_us - self._recent[0] <= SHORT_WITHIN_US
        ):
            self._until_us = at_us + CALM_US

    def holds(self, at_us: int) -> bool:
        return at_us < self._until_us


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

    def left_us(self, peer: Peer, transit_us: float, now_us: int) -> float:
        """The part that the peer's last status does not count, and that the peer cannot have done yet."""
        # An entry in the future is from before the clock was set back: it would count until the clock is there again.
        while self.entries and not peer.written_at_us - transit_us < self.entries[0][0] <= now_us:
            self.entries.popleft()
        if not self.entries:
            return 0.0
        worked_us = max(0.0, now_us - self.entries[0][0] - transit_us)
        return max(0.0, sum(device_us for _, device_us in self.entries) - worked_us)


@record(frozen=True, slots=True)
class Placed:
    """A user's history that was sent to a peer, which keeps the prefix."""

    holder: PrefixHolder
    lineage: bytes
    behaviours: int
    at_us: int


class Placements:
    """Which peers have the prefix of which user, as far as the worker that sent it knows. Bounded.

    Without it every request of a hot user would need time for full inference at a peer. Three workers of set pace, 300
    requests a second of one user: 9 and 10 % not answered whole in time, 45 and 47 % without this, 52 % undiverted.
    """

    def __init__(self, most_users: int = MOST_USERS) -> None:
        self._most_users = most_users
        self._by_user: OrderedDict[str, tuple[Placed, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_user)

    def workers(self, user_id: str) -> tuple[str, ...]:
        """The peers to which the user was sent lately."""
        return tuple(placed.holder.worker_id for placed in self._by_user.get(user_id, ()))

    def cached_behaviours(self, need: Need, peer: Peer, now_us: int) -> int:
        """How many behaviours of this history the peer has cached; 0 if it has restarted, or serves another model."""
        known = self._known(need, peer, now_us)
        return 0 if known is None else min(known.behaviours, need.behaviours)

    def placed(self, need: Need, peer: Peer, now_us: int) -> Placed:
        """The argument for `note` once the whole history has reached the peer.

        It keeps the time of an earlier sending: the peer may have evicted the prefix since, so the belief that the
        prefix is cached must end `CACHED_FOR_US` after that time.
        """
        known = self._known(need, peer, now_us)
        return Placed(peer.view.holder, need.lineage, need.behaviours, now_us if known is None else known.at_us)

    def _known(self, need: Need, peer: Peer, now_us: int) -> Placed | None:
        if not peer.view.reuses_prefixes:
            return None
        holder = peer.view.holder
        for placed in self._by_user.get(need.user_id, ()):
            is_same = placed.holder == holder and placed.lineage == need.lineage
            # A time in the future is from before the clock was set back.
            if is_same and 0 <= now_us - placed.at_us <= CACHED_FOR_US:
                return placed
        return None

    def note(self, user_id: str, placed: Placed) -> None:
        """The user's whole history was delivered to the peer."""
        worker_id = placed.holder.worker_id
        others = [each for each in self._by_user.pop(user_id, ()) if each.holder.worker_id != worker_id]
        self._by_user[user_id] = (placed, *others)[:PLACES_OF_A_USER]
        if len(self._by_user) > self._most_users:
            self._by_user.popitem(last=False)


class DivertPolicy:
    """The decisions of one worker. See the module docstring. Not thread-safe, but for `peers.apply`."""

    def __init__(self, peers: Peers, largest_share: float) -> None:
        self._peers = peers
        self._share = ShareBound(largest_share)
        self._short = ShortOfTime()
        self._sent: dict[str, _Sent] = {}
        self.placements = Placements()

    def note_short(self, at_us: int) -> None:
        """The worker has no time for a request, its own or a diverted one. `at_us`: monotonic."""
        self._short.note(at_us)

    def takes_diverted(self, at_us: int) -> bool:
        """Whether other workers may divert requests to this one. `at_us`: monotonic."""
        return not self._short.holds(at_us)

    def objection(self, revision: str, received: int, now_us: int) -> DivertOutcome | None:
        """Why no request at all is diverted now; None: `choose` decides.

        `received`: the number of requests that this worker has received so far. `revision`: of its model.
        """
        if self._peers.is_alone(revision, now_us):
            return DivertOutcome.NO_PEER
        return None if self._share.has_room(received) else DivertOutcome.SHARE

    def choose(self, need: Need, revision: str, received: int, now_us: int) -> Target | DivertOutcome:
        """The target, to which the caller sends the request; or why there is none."""
        peers = self._peers.alive(revision, now_us)
        if not peers:
            return DivertOutcome.NO_PEER
        if not self._share.has_room(received):
            return DivertOutcome.SHARE
        behaviours = min(need.behaviours, need.most_behaviours)
        if behaviours < need.behaviours and behaviours < max(LEAST_KEPT * need.behaviours, 1 + need.kept_behaviours):
            return DivertOutcome.TOO_LARGE
        options = self._options(peers, need, behaviours, now_us)
        in_time = [each for each in options if each.end_us <= USED_SHARE * need.left_us]
        if not in_time:
            return DivertOutcome.NO_TIME
        in_time = [each for each in in_time if each.is_cached] or in_time
        latest_us = min(each.end_us for each in in_time) + NEAR_US
        near = [each for each in in_time if each.end_us <= latest_us]
        chosen = max(near, key=lambda each: _affinity(need, each.peer))
        return self._send(chosen, need, behaviours, now_us)

    def _options(self, peers: list[Peer], need: Need, behaviours: int, now_us: int) -> list[_Option]:
        """The least loaded peers and those that have the user's prefix, with the predicted end of the request."""
        waits = [(need.transit_us + peer.backlog_us + self._sent_us(peer, need, now_us), peer) for peer in peers]
        placed = self.placements.workers(need.user_id)
        examined = heapq.nsmallest(EXAMINED_PEERS, waits, key=lambda each: each[0])
        examined += [each for each in waits if each[1].view.worker_id in placed and each not in examined]
        options = []
        for wait_us, peer in examined:
            is_whole = behaviours == need.behaviours
            cached = self.placements.cached_behaviours(need, peer, now_us) if is_whole else 0
            device_us = _work_us(peer, need, behaviours, cached)
            options.append(_Option(peer, wait_us + device_us, device_us, cached > 0))
        return options

    def _sent_us(self, peer: Peer, need: Need, now_us: int) -> float:
        sent = self._sent.get(peer.view.worker_id)
        return sent.left_us(peer, need.transit_us, now_us) if sent is not None else 0.0

    def _send(self, chosen: _Option, need: Need, behaviours: int, now_us: int) -> Target:
        self._share.take()
        if len(self._sent) >= MOST_PEERS:
            self._sent.clear()
        peer = chosen.peer
        entries = self._sent.setdefault(peer.view.worker_id, _Sent()).entries
        entries.append((now_us, chosen.device_us))
        partition = peer.partitions[_affinity(need, peer) % len(peer.partitions)]
        placed = self.placements.placed(need, peer, now_us) if behaviours == need.behaviours > 0 else None
        return Target(peer.view.worker_id, partition, behaviours, placed)


@record(frozen=True, slots=True)
class _Option:
    """A peer, the predicted time until it has answered, and the device time of the answer."""

    peer: Peer
    end_us: float
    device_us: float
    is_cached: bool


def _is_usable(peer: Peer, revision: str, oldest_us: int) -> bool:
    return peer.written_at_us >= oldest_us and peer.view.model_revision == revision


def _work_us(peer: Peer, need: Need, behaviours: int, cached: int) -> float:
    """Device time that the request rarely exceeds at this peer, which has `cached` behaviours cached."""
    view = peer.view
    tokens, scored_tokens = view.prefix_tokens(behaviours), view.tokens_per_behaviour * need.suffix + need.candidates
    full_us = risky_us(view.latency, view.full_path_ratios, NO_FACTORS, tokens, scored_tokens)
    if not cached:
        return full_us
    latency, kept_tokens = view.latency_at(tokens), view.prefix_tokens(cached)
    append_us = latency.append_us(kept_tokens, tokens - kept_tokens) if tokens > kept_tokens else 0.0
    return min(full_us, view.safety_factor * (append_us + latency.hit_us(tokens, scored_tokens)))


def _affinity(need: Need, peer: Peer) -> int:
    """A hash of user and peer: fixed for a pair, so that the users of equal peers are spread over them."""
    return zlib.crc32(f"{need.user_id}\0{peer.view.worker_id}".encode())
