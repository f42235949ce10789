"""The history that a request is ranked with: pure decisions over the stored, the requested and the inline history.

| inline history | stored history | requested version | status |
|---|---|---|---|
| yes | any | none, or names the inline content | INLINE |
| yes | any | names other content | `HistoryMismatchError` |
| no | none | any | UNKNOWN; stale if a version or a length is named |
| no | yes | none | NEWEST |
| no | yes | names all of the stored content | EXACT |
| no | yes | names its first `length` behaviours | PREFIX_OF_NEWER |
| no | yes | names anything else | STALE, with the newest known |
| no | yes | exactly as many behaviours as are stored; fewer; more | EXACT; PREFIX_OF_NEWER; STALE |
| no | yes | at least so many behaviours, and they are stored; fewer are | NEWEST; STALE |

A version is compared by content (length and digest of behaviours and features), never by the version number alone. A
length alone says nothing about the content. Each stale history has a cause. `may_arrive`: a record on its way may bring
the requested history, so the caller decides whether to wait for it.
"""

from __future__ import annotations

import enum

from relaygr.schemas.digest import DigestChain, digest_at, digest_chain
from relaygr.schemas.messages import History, HistoryVersion, PreInferJob, RankingRequest, StaleCause
from relaygr.schemas.record import record
from relaygr.schemas.times import EARLIEST_MS


@record(frozen=True, slots=True)
class StoredHistory:
    """A history and the digest chain of the whole history."""

    history: History
    chain: DigestChain
    has_gap: bool = False
    """Behaviours are missing in it, which no snapshot has brought yet."""

    @property
    def version(self) -> HistoryVersion:
        return HistoryVersion(self.history.number, self.chain.length, self.chain.digest)


@record(frozen=True, slots=True)
class WantedLength:
    """A history that is named by its length alone."""

    length: int
    is_exact: bool
    """Whether no more behaviours may be used."""


Wanted = HistoryVersion | WantedLength | None


def wanted_by(message: PreInferJob | RankingRequest) -> Wanted:
    """The history that a message names."""
    if message.history_exactly is not None:
        return WantedLength(message.history_exactly, True)
    if message.history_at_least is not None:
        return WantedLength(message.history_at_least, False)
    return message.history_version


def chosen_at_ms(message: PreInferJob | RankingRequest) -> int:
    """When the sender of a message chose the history that it names: at its retrieval event; ms since the epoch."""
    if isinstance(message, PreInferJob):
        return message.retrieval_at_us // 1000
    sent_ms = message.sent_at_us // 1000
    # A query time in another unit says nothing.
    return min(sent_ms, message.query_time_ms) if message.query_time_ms >= EARLIEST_MS else sent_ms


class HistoryMismatchError(ValueError):
    """A message carries one history and names another. The text names both."""


class HistoryStatus(enum.StrEnum):
    """How the chosen history relates to the requested version."""

    INLINE = "inline"
    EXACT = "exact"
    PREFIX_OF_NEWER = "prefix_of_newer"
    NEWEST = "newest"
    STALE = "stale"
    UNKNOWN = "unknown"


@record(frozen=True, slots=True)
class ResolvedHistory:
    """The chosen history. `history`, `chain` and `version` are None only if the status is UNKNOWN."""

    status: HistoryStatus
    history: History | None
    chain: DigestChain | None
    version: HistoryVersion | None
    may_arrive: bool
    """The requested version is newer than the stored one, and a record on its way may bring it."""
    loading: bool
    """The follower had not caught up with the user's partition, or had read no history of a user who has one."""
    stale: StaleCause | None = None
    """Why the chosen history is not the requested one, or incomplete; None: it is neither."""
    is_settling: bool = False
    """The worker has just got the partition: a missing history, or a newer record such as a deletion, may be in the
    store, or in the part of the log that is read now.
    """

    @property
    def is_stale(self) -> bool:
        """`history_stale` in the result."""
        return self.stale is not None


@record(frozen=True, slots=True)
class HistoryWindow:
    """The newest part of a history. Positions and digests count from the start of the window."""

    history: History
    chain: DigestChain
    start: int
    """Number of oldest behaviours left out, a multiple of the anchor."""


def resolve(
    stored: StoredHistory | None, wanted: Wanted, inline: History | None, loading: bool, is_deleted: bool = False
) -> ResolvedHistory:
    """Chooses the history for a request. Raises HistoryMismatchError if `inline` is not the version `wanted`.

    `is_deleted`: the user was deleted after `wanted` was chosen, so it does not arrive any more.
    """
    if inline is not None:
        return _inline(inline, wanted, loading)
    if stored is None:
        if wanted is None:
            return ResolvedHistory(HistoryStatus.UNKNOWN, None, None, None, False, loading)
        if is_deleted:
            return ResolvedHistory(HistoryStatus.UNKNOWN, None, None, None, False, loading, StaleCause.DELETED)
        # The requester has a version that is not here, so the store is incomplete even at the end of the log.
        return ResolvedHistory(HistoryStatus.UNKNOWN, None, None, None, True, True, StaleCause.MISSING)
    if wanted is None:
        return _whole(HistoryStatus.NEWEST, stored, loading)
    if isinstance(wanted, WantedLength):
        return _of_length(stored, wanted, loading, is_deleted)
    known = stored.history
    if wanted.length == stored.chain.length and wanted.digest == stored.chain.digest:
        history = History(known.user_id, wanted.number, known.features, known.behaviours)
        return ResolvedHistory(HistoryStatus.EXACT, history, stored.chain, wanted, False, loading)
    if not _begins_with(stored, wanted):
        # Of an equal number, the behaviours that are missing may be on their way.
        behind = known.number < wanted.number or (known.number == wanted.number and wanted.length > stored.chain.length)
        cause = StaleCause.BEHIND if behind else StaleCause.REPLACED
        if is_deleted or stored.has_gap:
            # No later behaviour brings content without the gap.
            cause = StaleCause.DELETED if is_deleted else StaleCause.GAP
        return _whole(HistoryStatus.STALE, stored, loading, cause, may_arrive=cause is StaleCause.BEHIND)
    history = History(known.user_id, wanted.number, known.features, known.behaviours[: wanted.length])
    chain = stored.chain.cut(wanted.length, wanted.digest)
    return ResolvedHistory(HistoryStatus.PREFIX_OF_NEWER, history, chain, wanted, False, loading)


def still_lacks(stored: StoredHistory | None, wanted: Wanted) -> bool:
    """Whether a store that lacked this history lacks it still, and nothing newer has taken its place."""
    return stored is None or stored.has_gap or resolve(stored, wanted, None, loading=False).may_arrive


def window(history: History, chain: DigestChain, max_prefix_behaviours: int, anchor_behaviours: int) -> HistoryWindow:
    """The newest behaviours of `history`, at most `max_prefix_behaviours`, starting at a multiple of the anchor.

    A growing history keeps the start of its window until a whole anchor of behaviours must be left out, so computed
    prefixes stay valid until then. A window with a new start is a new prefix and is hashed again; a window that starts
    at 0 costs nothing. An anchor above the maximum counts as the maximum. Raises ValueError if either is below 1.
    """
    if anchor_behaviours < 1 or max_prefix_behaviours < 1:
        raise ValueError(
            f"a window of {max_prefix_behaviours} behaviours, anchor {anchor_behaviours}: both must be at least 1"
        )
    start = window_start(chain.length, max_prefix_behaviours, anchor_behaviours)
    if not start:
        return HistoryWindow(history, chain, 0)
    kept = history.behaviours[start:]
    cut = History(history.user_id, history.number, history.features, kept)
    return HistoryWindow(cut, digest_chain(history.features, kept), start)


def window_start(length: int, max_prefix_behaviours: int, anchor_behaviours: int) -> int:
    """The number of oldest behaviours that `window` leaves out."""
    excess, anchor = length - max_prefix_behaviours, min(anchor_behaviours, max_prefix_behaviours)
    return -(-excess // anchor) * anchor if excess > 0 else 0


def _of_length(stored: StoredHistory, wanted: WantedLength, loading: bool, is_deleted: bool) -> ResolvedHistory:
    known, length = stored.history, stored.chain.length
    if length < wanted.length:
        cause = StaleCause.DELETED if is_deleted else StaleCause.GAP if stored.has_gap else StaleCause.BEHIND
        # Later behaviours reach a length even after a gap.
        return _whole(HistoryStatus.STALE, stored, loading, cause, may_arrive=not is_deleted)
    if not wanted.is_exact:
        return _whole(HistoryStatus.NEWEST, stored, loading)
    if length == wanted.length:
        return _whole(HistoryStatus.EXACT, stored, loading)
    digest = digest_at(stored.chain, known.behaviours, wanted.length)
    version = HistoryVersion(known.number, wanted.length, digest)
    history = History(known.user_id, known.number, known.features, known.behaviours[: wanted.length])
    chain = stored.chain.cut(wanted.length, digest)
    return ResolvedHistory(HistoryStatus.PREFIX_OF_NEWER, history, chain, version, False, loading, _gap_in(stored))


def _inline(inline: History, wanted: Wanted, loading: bool) -> ResolvedHistory:
    chain = inline.chain()
    version = HistoryVersion(inline.number, chain.length, chain.digest)
    if isinstance(wanted, WantedLength):
        wanted = None  # The codec refuses a message with both.
    if wanted is not None and (wanted.length, wanted.digest) != (version.length, version.digest):
        raise HistoryMismatchError(
            f"the inline history has {version.length} behaviours and digest {version.digest.hex()}, but the named "
            f"version has {wanted.length} and {wanted.digest.hex()}: name the version of the inline history, or none"
        )
    return ResolvedHistory(HistoryStatus.INLINE, inline, chain, wanted or version, False, loading)


def _whole(
    status: HistoryStatus,
    stored: StoredHistory,
    loading: bool,
    cause: StaleCause | None = None,
    may_arrive: bool = False,
) -> ResolvedHistory:
    cause = cause or _gap_in(stored)
    return ResolvedHistory(status, stored.history, stored.chain, stored.version, may_arrive, loading, cause)


def _gap_in(stored: StoredHistory) -> StaleCause | None:
    """The cause by which a history that no digest confirms is stale."""
    return StaleCause.GAP if stored.has_gap else None


def _begins_with(stored: StoredHistory, wanted: HistoryVersion) -> bool:
    if wanted.length > stored.chain.length:
        return False
    return digest_at(stored.chain, stored.history.behaviours, wanted.length) == wanted.digest
