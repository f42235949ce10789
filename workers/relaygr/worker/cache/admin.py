"""The requests of operators to a worker's cache: their form, and the reports that answer them.

They read the cache in short sections, on the caller's thread. A request and its report are one JSON object each. This
module opens no socket (`relaygr.worker.admin_socket`) and knows no executor.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from relaygr.runtime.clock import Clock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import USER_ID_TEXT, PrefixSource
from relaygr.worker.cache.cache import PrefixCache
from relaygr.worker.cache.entries import CacheEntry, EntryState, Holding
from relaygr.worker.cache.metadata import TierMetadata
from relaygr.worker.cache.results import MissReason, PendingKind, Tier
from relaygr.worker.cache.stats import CacheStats, TierStats

MOST_USERS: Final = 1000
"""Most users that one report lists."""
_BATCH: Final = 64
"""Most users that one section reads."""
_UserId = Annotated[str, AfterValidator(USER_ID_TEXT.unpack)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Show(_Request):
    """Both tiers, and the users with the most bytes."""

    command: Literal["show"] = "show"
    users: Annotated[int, Field(ge=0, le=MOST_USERS)] = 10


class ShowUser(_Request):
    """The entries of one user."""

    command: Literal["show_user"] = "show_user"
    user_id: _UserId


Request = Show | ShowUser
_REQUEST: Final[TypeAdapter[Request]] = TypeAdapter(Annotated[Request, Field(discriminator="command")])


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier. `found`: the share of look-ups for ranking that found K,V there; None before the first look-up.

    `pages` counts; a page takes `page_bytes`.
    """

    tier: Tier
    page_bytes: int
    pages: TierStats
    found: float | None


@dataclass(frozen=True, slots=True)
class UserShare:
    """A user's share of the cache. `age_s`: since the oldest entry became ready here, None while all are in flight.
    `idle_s`: since the latest use, None without one in this process.
    """

    user_id: str
    entries: int
    hbm_bytes: int
    dram_bytes: int
    age_s: float | None
    idle_s: float | None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The answer to `Show`. `top` has the users with the most bytes, the largest first."""

    worker_id: str
    model_revision: str
    look_ups: int
    leases: int
    tiers: tuple[TierReport, ...]
    users: int
    top: tuple[UserShare, ...]


@dataclass(frozen=True, slots=True)
class EntryReport:
    """One entry. `coming_pages` are in flight: they are being filled or loaded for it.

    `model_revision` None: an entry of another model, which nothing matches any more. Times as in `UserShare`.
    """

    tier: Tier
    state: EntryState
    holding: Holding
    model_revision: str | None
    behaviours: int
    tokens: int
    pages: int
    size_bytes: int
    coming_pages: int
    pins: int
    leases: int
    source: PrefixSource
    age_s: float | None
    idle_s: float | None


@dataclass(frozen=True, slots=True)
class UserReport:
    """The answer to `ShowUser`."""

    worker_id: str
    user_id: str
    entries: tuple[EntryReport, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to a request that cannot be carried out. `error` says what to do."""

    error: str


Report = CacheReport | UserReport | Refused
R = TypeVar("R", bound=Report)
_REPORTS: Final[dict[type[Any], TypeAdapter[Any]]] = {
    kind: TypeAdapter(kind) for kind in (CacheReport, UserReport, Refused)
}


@dataclass(frozen=True, slots=True)
class ServingModel:
    """The model that serves now, and the namespace of its entries."""

    revision: str
    namespace: bytes


def encode_request(request: Request) -> bytes:
    """One line of JSON."""
    return request.model_dump_json().encode()


def decode_report(kind: type[R], line: bytes) -> R:
    """Raises RelayError if the worker refused the request, or if its report cannot be read."""
    found: R | Refused | None = None
    for expected in (kind, Refused):
        with contextlib.suppress(ValidationError):
            found = _REPORTS[expected].validate_json(line)
            break
    if isinstance(found, Refused):
        raise RelayError(found.error)
    if found is None:
        raise RelayError("The worker's answer cannot be read: use the `relaygr` of the version that the worker runs.")
    return found


class CacheAdmin:
    """Carries out the requests. One thread calls it, which is not the owner's."""

    def __init__(
        self,
        worker_id: str,
        cache: PrefixCache,
        model: Callable[[], ServingModel],
        clock: Clock,
    ) -> None:
        self._worker_id = worker_id
        self._cache = cache
        self._model = model
        self._clock = clock

    def answer(self, line: bytes) -> bytes:
        """The report for a request, each one JSON object."""
        report: Report
        try:
            report = self._carry_out(_REQUEST.validate_json(line))
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, fault["loc"]))
            report = Refused(f"The worker does not know this request: {where or 'the line'}: {fault['msg']}.")
        return _REPORTS[type(report)].dump_json(report)

    def _carry_out(self, request: Request) -> Report:
        match request:
            case Show(users=users):
                return self._show(users)
            case ShowUser(user_id=user_id):
                return self._show_user(user_id)

    # The lock is held for a batch of users at a time.

    def _show(self, most_users: int) -> CacheReport:
        now_us = self._clock.monotonic_us()
        users = self._users()
        shares = (share for batch in _batches(users) for share in self._shares(batch, now_us))
        top = heapq.nlargest(most_users, shares, key=lambda share: share.hbm_bytes + share.dram_bytes)
        stats = self._cache.stats()
        return CacheReport(
            worker_id=self._worker_id,
            model_revision=self._model().revision,
            look_ups=stats.lookups,
            leases=stats.leases,
            tiers=tuple(
                TierReport(tier, self._cache.page_bytes(tier), pages, _found(tier, stats))
                for tier, pages in _by_tier(stats).items()
            ),
            users=len(users),
            top=tuple(top),
        )

    def _show_user(self, user_id: str) -> UserReport:
        now_us, model = self._clock.monotonic_us(), self._model()
        with self._cache.ledger.lock:
            entries = tuple(
                EntryReport(
                    tier=tier.tier,
                    state=entry.state,
                    holding=entry.holding,
                    model_revision=model.revision if entry.key.namespace == model.namespace else None,
                    behaviours=entry.key.length,
                    tokens=entry.tokens,
                    pages=entry.pages.size,
                    size_bytes=entry.pages.size * self._cache.page_bytes(tier.tier),
                    coming_pages=entry.work.new_pages.size if entry.work is not None else 0,
                    pins=entry.pins,
                    leases=len(entry.leases),
                    source=entry.source,
                    age_s=_since(entry.ready_us, now_us),
                    idle_s=_since(entry.used_us, now_us),
                )
                for tier, entry in self._entries(user_id)
            )
        return UserReport(self._worker_id, user_id, entries)

    def _users(self) -> list[str]:
        with self._cache.ledger.lock:
            by_tier = [list(tier.index.by_user) for tier in self._cache.ledger.tiers]
        return list(dict.fromkeys(itertools.chain(*by_tier)))

    def _shares(self, users: Iterable[str], now_us: int) -> list[UserShare]:
        with self._cache.ledger.lock:
            return [
                self._share(user_id, entries, now_us) for user_id in users if (entries := list(self._entries(user_id)))
            ]

    def _share(self, user_id: str, found: list[tuple[TierMetadata, CacheEntry]], now_us: int) -> UserShare:
        """Called under the lock."""
        sizes, entries = self._sizes(found), [entry for _, entry in found]
        return UserShare(
            user_id,
            len(entries),
            sizes[Tier.HBM],
            sizes[Tier.DRAM],
            age_s=_since(min((entry.ready_us for entry in entries if entry.ready_us), default=0), now_us),
            idle_s=_since(max(entry.used_us for entry in entries), now_us),
        )

    # Helpers.

    def _entries(self, user_id: str) -> Iterator[tuple[TierMetadata, CacheEntry]]:
        """Called under the lock."""
        return ((tier, entry) for tier in self._cache.ledger.tiers for entry in tier.index.by_user.get(user_id, ()))

    def _sizes(self, entries: Iterable[tuple[TierMetadata, CacheEntry]]) -> dict[Tier, int]:
        """Bytes by tier, pages in flight included. Called under the lock."""
        sizes = dict.fromkeys(Tier, 0)
        for tier, entry in entries:
            pages = entry.pages.size + (entry.work.new_pages.size if entry.work is not None else 0)
            sizes[tier.tier] += pages * self._cache.page_bytes(tier.tier)
        return sizes


def _batches(users: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(users)
    while batch := list(itertools.islice(remaining, _BATCH)):
        yield batch


def _found(tier: Tier, stats: CacheStats) -> float | None:
    if not stats.lookups:
        return None
    in_dram = stats.misses[MissReason.IN_DRAM] + stats.joins[PendingKind.LOAD]
    return (stats.hits if tier is Tier.HBM else in_dram) / stats.lookups


def _by_tier(stats: CacheStats) -> dict[Tier, TierStats]:
    return {Tier.HBM: stats.hbm, Tier.DRAM: stats.dram}


def _since(at_us: int, now_us: int) -> float | None:
    return math.ceil(max(0, now_us - at_us) / 1e3) / 1e3 if at_us else None
