"""The requests of operators to a worker's cache: their form, their execution, and the reports that answer them.

    Show, ShowUser     read the cache in short sections, on the caller's thread
    DropUser, DropAll  remove prefixes, on the thread that owns the cache: at most `_BATCH` users at a time
    Limit              bounds the pages in use and evicts what exceeds the bound, on that thread, in batches too

A request and its report are one JSON object each. `CacheAdmin` logs who dropped prefixes and who set a limit; the log
names a user by a digest. This module opens no socket (`relaygr.worker.admin_socket`) and knows no executor.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

import structlog
from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from relaygr.runtime.clock import Clock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_sockets import SocketPeer
from relaygr.schemas.messages import USER_ID_TEXT, PrefixSource
from relaygr.worker.cache.cache import PrefixCache
from relaygr.worker.cache.entries import CacheEntry, EntryState, Holding
from relaygr.worker.cache.metadata import TierMetadata
from relaygr.worker.cache.results import MissReason, PendingKind, Tier
from relaygr.worker.cache.stats import CacheStats, TierStats

log = structlog.get_logger()

MOST_USERS: Final = 1000
"""Most users that one report lists."""
_BATCH: Final = 64
"""Most users that one section reads, and that one piece of work on the owner's thread drops: about 2 ms."""
_UserId = Annotated[str, AfterValidator(USER_ID_TEXT.unpack)]
_Size = Annotated[int, Field(ge=0)]


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


class DropUser(_Request):
    """Removes the prefixes of one user from both tiers."""

    command: Literal["drop_user"] = "drop_user"
    user_id: _UserId


class DropAll(_Request):
    """Removes the prefixes of all users from both tiers."""

    command: Literal["drop_all"] = "drop_all"


class Limit(_Request):
    """Bounds the bytes of a tier that may be in use. None lifts the limit; a tier that is absent keeps its own."""

    command: Literal["limit"] = "limit"
    tiers: Annotated[dict[Literal["hbm", "dram"], _Size | None], Field(min_length=1)]


Request = Show | ShowUser | DropUser | DropAll | Limit
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
class DropReport:
    """The answer to `DropUser` and `DropAll`. Of the dropped bytes, `held_bytes` are free when their readers, or the
    work that fills them, have ended. `leases`: leases that ended.
    """

    worker_id: str
    users: int
    entries: int
    hbm_bytes: int
    dram_bytes: int
    held_entries: int
    held_bytes: int
    leases: int


_DROPPED: Final = ("users", "entries", "hbm_bytes", "dram_bytes", "held_entries", "held_bytes", "leases")
"""The figures of a `DropReport`."""


@dataclass(frozen=True, slots=True)
class TierLimit:
    """A tier's new limit. `excess_bytes` are in use above it, since requests hold them; they go when those end."""

    tier: Tier
    capacity_bytes: int
    limit_bytes: int
    evicted: int
    excess_bytes: int


@dataclass(frozen=True, slots=True)
class LimitReport:
    """The answer to `Limit`."""

    worker_id: str
    tiers: tuple[TierLimit, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to a request that cannot be carried out. `error` says what to do."""

    error: str


Report = CacheReport | UserReport | DropReport | LimitReport | Refused
R = TypeVar("R", bound=Report)
_REPORTS: Final[dict[type[Any], TypeAdapter[Any]]] = {
    kind: TypeAdapter(kind) for kind in (CacheReport, UserReport, DropReport, LimitReport, Refused)
}


class CacheOwner(Protocol):
    """The changes that only the thread which owns the cache makes. `relaygr.worker.executor` has them."""

    def drop_user(self, user_id: str) -> int:
        """Removes the user's prefixes. Returns their number."""

    def limit_tier(self, tier: Tier, pages: int) -> None:
        """Bounds the pages of a tier that may be in use."""


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
        owner: CacheOwner,
        run: Callable[[Callable[[], Any]], Any],
        model: Callable[[], ServingModel],
        least_hbm_pages: int,
        clock: Clock,
    ) -> None:
        """`run` makes a call on the owner's thread, and returns its result or raises RelayError.

        `least_hbm_pages`: those of the longest prefix, without which the model could not be served.
        """
        self._worker_id = worker_id
        self._cache = cache
        self._owner = owner
        self._run = run
        self._model = model
        self._least_pages = {Tier.HBM: least_hbm_pages, Tier.DRAM: 0}
        self._clock = clock

    def answer(self, line: bytes, caller: SocketPeer) -> bytes:
        """The report for a request, each one JSON object."""
        report: Report
        try:
            report = self._carry_out(_REQUEST.validate_json(line), caller)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, fault["loc"]))
            report = Refused(f"The worker does not know this request: {where or 'the line'}: {fault['msg']}.")
        except RelayError as error:
            report = Refused(str(error))
        return _REPORTS[type(report)].dump_json(report)

    def _carry_out(self, request: Request, caller: SocketPeer) -> Report:
        match request:
            case Show(users=users):
                return self._show(users)
            case ShowUser(user_id=user_id):
                return self._show_user(user_id)
            case DropUser(user_id=user_id):
                return self._drop([user_id], caller, digest_of(user_id))
            case DropAll():
                return self._drop(self._users(), caller, "all")
            case Limit(tiers=tiers):
                return self._limit({Tier(name): size for name, size in tiers.items()}, caller)

    # Reading. The lock is held for a batch of users at a time.

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

    # Changing.

    def _drop(self, users: Iterable[str], caller: SocketPeer, whose: str) -> DropReport:
        totals: Counter[str] = Counter()
        try:
            for batch in _batches(users):
                totals += self._run(partial(self._drop_batch, batch))
        finally:
            # Also after an error: earlier batches were dropped.
            log.warning("an operator dropped prefixes", uid=caller.uid, pid=caller.pid, whose=whose, **totals)
        return DropReport(self._worker_id, **{name: totals[name] for name in _DROPPED})

    def _drop_batch(self, users: list[str]) -> Counter[str]:
        """On the owner's thread. The figures of a `DropReport`."""
        with self._cache.ledger.lock:
            found = [(user_id, entries) for user_id in users if (entries := list(self._entries(user_id)))]
            dropped = [each for _, entries in found for each in entries]
            held = [each for each in dropped if each[1].pins or each[1].work is not None]
            leases = sum(len(entry.leases) for _, entry in dropped)
            sizes, held_sizes = self._sizes(dropped), self._sizes(held)
        for user_id in users:
            self._owner.drop_user(user_id)
        figures = (
            len(found), len(dropped), sizes[Tier.HBM], sizes[Tier.DRAM], len(held), sum(held_sizes.values()), leases,
        )  # fmt: skip
        return Counter(dict(zip(_DROPPED, figures, strict=True)))

    def _limit(self, sizes: dict[Tier, int | None], caller: SocketPeer) -> LimitReport:
        pages = {tier: self._pages_of(tier, size_bytes) for tier, size_bytes in sizes.items()}
        before = self._run(partial(self._set_limits, pages))
        for tier, limit in pages.items():
            log.warning(
                "an operator set the limit of a tier",
                uid=caller.uid,
                pid=caller.pid,
                tier=tier.value,
                limit_bytes=limit * self._cache.page_bytes(tier),
            )
        while self._run(lambda: self._cache.shrink(self._clock.monotonic_us())):
            pass
        stats = self._cache.stats()
        after = _by_tier(stats)
        return LimitReport(
            self._worker_id,
            tuple(
                TierLimit(
                    tier=tier,
                    capacity_bytes=after[tier].capacity * self._cache.page_bytes(tier),
                    limit_bytes=limit * self._cache.page_bytes(tier),
                    evicted=stats.evictions[tier] - before[tier],
                    excess_bytes=max(0, _in_use(after[tier]) - limit) * self._cache.page_bytes(tier),
                )
                for tier, limit in pages.items()
            ),
        )

    def _set_limits(self, pages: dict[Tier, int]) -> Counter[Tier]:
        """On the owner's thread. Returns the evictions so far."""
        before = self._cache.stats().evictions
        for tier, limit in pages.items():
            self._owner.limit_tier(tier, limit)
        return before

    def _pages_of(self, tier: Tier, size_bytes: int | None) -> int:
        """Raises RelayError for a limit that the tier cannot have."""
        capacity, page_bytes = _by_tier(self._cache.stats())[tier].capacity, self._cache.page_bytes(tier)
        if size_bytes is None:
            return capacity
        name = tier.value
        if not capacity:
            raise RelayError(f"{self._worker_id} has no {name} tier (worker.{name}_bytes is 0): leave --{name} out.")
        pages = size_bytes // page_bytes
        if pages > capacity:
            raise RelayError(
                f"--{name} is more than the {ByteSize(capacity * page_bytes).human_readable()} that {self._worker_id} "
                f"took at its start: give less, or start the worker with a larger worker.{name}_bytes."
            )
        if pages < self._least_pages[tier]:
            raise RelayError(
                f"--{name} has no room for the prefix of the model's longest history: give at least "
                f"{-(-self._least_pages[tier] * page_bytes // 1024)}KiB."
            )
        return pages

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


def digest_of(user_id: str) -> str:
    """Names a user in the log without showing who it is: BLAKE2b of the UTF-8 bytes, 8 bytes, in hexadecimal."""
    return hashlib.blake2b(user_id.encode(), digest_size=8).hexdigest()


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


def _in_use(pages: TierStats) -> int:
    return pages.capacity - pages.free - pages.withheld


def _since(at_us: int, now_us: int) -> float | None:
    return math.ceil(max(0, now_us - at_us) / 1e3) / 1e3 if at_us else None
