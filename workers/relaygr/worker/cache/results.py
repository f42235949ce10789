"""What the cache answers: small frozen values, and the reasons by which answers are counted."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relaygr.worker.cache.entries import EntryState
    from relaygr.worker.cache.handles import Handle


class MissReason(enum.StrEnum):
    """Why HBM can not serve a key."""

    ABSENT = "absent"
    IN_DRAM = "in_dram"
    OTHER_HISTORY = "other_history"
    OTHER_MODEL = "other_model"
    UNKNOWN_IDENTITY = "unknown_identity"


class NoRoomReason(enum.StrEnum):
    """Why no pages were given."""

    FULL = "full"
    TOO_LARGE = "too_large"
    NOTHING_TO_CACHE = "nothing_to_cache"
    OTHER_MODEL = "other_model"
    UNKNOWN_IDENTITY = "unknown_identity"


class DeclineReason(enum.StrEnum):
    """Why a reload was not started although there was room."""

    NOT_IN_DRAM = "not_in_dram"
    NOT_WORTH_IT = "not_worth_it"
    QUEUE_FULL = "queue_full"


class SpillOutcome(enum.StrEnum):
    """What became of a wish to spill. Only STARTED copies."""

    STARTED = "started"
    ALREADY_THERE = "already_there"
    UNDER_WAY = "under_way"
    NOT_READY = "not_ready"
    NO_ROOM = "no_room"
    SLOW = "slow"
    QUEUE_FULL = "queue_full"


class WasteReason(enum.StrEnum):
    """Why a finished pre-infer never served a ranking request."""

    LEASE_EXPIRED = "lease_expired"
    REQUEST_EXPIRED = "request_expired"
    OVERTAKEN = "overtaken"
    EVICTED = "evicted"
    INVALIDATED = "invalidated"


class Purpose(enum.StrEnum):
    """What a fill is computed for, or a prefix looked up for."""

    PRE_INFER = "pre_infer"
    RANKING = "ranking"
    AGAIN = "again"
    """A ranking whose look-up was counted before, as what it was then: a miss, or one that joined."""


class PendingKind(enum.StrEnum):
    """What a waiter waits for."""

    FILL = "fill"
    LOAD = "load"


class PendingOutcome(enum.StrEnum):
    """How it ended. After PUBLISHED `acquire` again; after the others it is a miss."""

    PUBLISHED = "published"
    FAILED = "failed"
    INVALIDATED = "invalidated"


@dataclass(frozen=True, slots=True)
class Presence:
    """What is ready for a key, in behaviours, and the state of each tier's best entry."""

    hbm_behaviours: int
    dram_behaviours: int
    hbm_state: EntryState
    dram_state: EntryState


@dataclass(frozen=True, slots=True)
class Hit:
    """K,V in HBM, pinned until the handle is released."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing in HBM; `dram_behaviours` of the key could be reloaded."""

    reason: MissReason
    dram_behaviours: int = 0


@dataclass(frozen=True, slots=True)
class NoRoom:
    """No pages, now. Nothing was evicted for it."""

    reason: NoRoomReason


@dataclass(frozen=True, slots=True)
class Declined:
    """No reload."""

    reason: DeclineReason


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A page whose rows the filler needs in a page of its own: copy it before computing."""

    source: int
    target: int
