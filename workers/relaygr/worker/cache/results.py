"""Results of the cache, and the reasons by which it counts them. Plain values without behaviour."""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.record import record

PageArray = NDArray[np.int32]
"""Numbers of pages. The memory of page n is row n of the arena of the tier."""


class Tier(enum.StrEnum):
    """The tier in which a page lies. On the CPU both tiers are plain memory."""

    HBM = "hbm"
    DRAM = "dram"


class MissReason(enum.StrEnum):
    """Why HBM cannot serve a key."""

    ABSENT = "absent"
    IN_DRAM = "in_dram"
    OTHER_HISTORY = "other_history"
    OTHER_MODEL = "other_model"
    UNKNOWN_IDENTITY = "unknown_identity"


class NoRoomReason(enum.StrEnum):
    """Why the cache gave no pages."""

    FULL = "full"
    TOO_LARGE = "too_large"
    NOTHING_TO_CACHE = "nothing_to_cache"
    OTHER_MODEL = "other_model"
    UNKNOWN_IDENTITY = "unknown_identity"


class DeclineReason(enum.StrEnum):
    """Why a reload was not started although HBM had room."""

    NOT_IN_DRAM = "not_in_dram"
    NOT_WORTH_IT = "not_worth_it"
    QUEUE_FULL = "queue_full"


class SpillOutcome(enum.StrEnum):
    """The outcome of a request to spill. Only STARTED makes a copy."""

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
    """The purpose of a look-up or of a fill."""

    PRE_INFER = "pre_infer"
    RANKING = "ranking"
    AGAIN = "again"
    """A ranking repeats its look-up. The first look-up was counted, so this one is not."""
    FOLLOW = "follow"
    """New behaviours for nobody yet: they may lengthen a ready entry into free pages, and evict or replace nothing."""


class PendingKind(enum.StrEnum):
    """Work that a waiter waits for: a computation (FILL) or a copy from DRAM (LOAD)."""

    FILL = "fill"
    LOAD = "load"


class PendingOutcome(enum.StrEnum):
    """How the work ended. After PUBLISHED the waiter calls `acquire` again; the others count as a miss."""

    PUBLISHED = "published"
    FAILED = "failed"
    INVALIDATED = "invalidated"


@record(frozen=True, slots=True)
class Miss:
    """HBM has no K,V of the key. DRAM has `dram_behaviours` behaviours of the key, which could be reloaded."""

    reason: MissReason
    dram_behaviours: int = 0


@record(frozen=True, slots=True)
class NoRoom:
    """The cache has no pages to give now, and it evicted nothing for this call."""

    reason: NoRoomReason


@record(frozen=True, slots=True)
class Room:
    """Pages of HBM that are free or evictable, without those that a limit withholds, and pages that ranking requests
    hold and will give back. `reloads`: copies from DRAM under way or queued.
    """

    free_pages: int
    held_pages: int
    reloads: int


@record(frozen=True, slots=True)
class Declined:
    """The cache did not start a reload."""

    reason: DeclineReason


@record(frozen=True, slots=True)
class PageCopy:
    """Copy page `source` to page `target` before computing: the fill needs rows of a page that others read."""

    source: int
    target: int
