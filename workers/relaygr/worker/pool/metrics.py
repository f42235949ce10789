"""What the pool counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

FETCHES = Counter(
    "relaygr_pool_fetches_total",
    "Fetches of prefixes from the pool, by outcome: loaded, absent (the store has no more of it than this worker), "
    "late (nobody waited any more), no_room (in DRAM), unreadable (the store has it and did not give it), torn (wrong "
    "bytes arrived), failed (the store does not answer)",
    ["outcome"],
)
DECLINED = Counter(
    "relaygr_pool_fetches_declined_total",
    "Prefixes that were not asked for: away (the store hangs or does not answer), slow (computing is faster), full "
    "(too many fetches wait)",
    ["reason"],
)
WRITES = Counter(
    "relaygr_pool_objects_written_total",
    "Objects that were written, by outcome: stored, no_room, failed, withdrawn (their user was deleted, or moved to "
    "another worker, meanwhile)",
    ["outcome"],
)
DROPPED = Counter(
    "relaygr_pool_writes_dropped_total",
    "Prefixes that were not written: full (too many wait), gone (DRAM or this worker has the user no more), slow "
    "(computing is faster than fetching), torn (its DRAM pages are)",
    ["reason"],
)
BYTES = Counter("relaygr_pool_bytes_total", "Bytes of pages read from the pool and written to it", ["direction"])
REMOVED = Counter(
    "relaygr_pool_objects_removed_total",
    "Objects removed: deletion (of a user), unreadable",
    ["reason"],
)
AWAY = Gauge("relaygr_pool_away", "Whether the pool is not used now, because the store hangs or does not answer")
