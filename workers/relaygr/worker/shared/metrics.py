"""Metrics of the shared arena. What a prefix or page became is a fixed set of words."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

EPOCH = Gauge("relaygr_arena_epoch", "Counts the holders of this worker id's arena; 0: none is held")
PREFIXES = Counter(
    "relaygr_arena_prefixes_total",
    "Prefixes found in the arena at start: restored, or dropped and why",
    ["outcome"],
)
INDEX_DROPPED = Counter(
    "relaygr_arena_index_dropped_total", "Whole indexes that were not trusted at start, by reason", ["reason"]
)
PAGES = Counter(
    "relaygr_arena_pages_verified_total",
    "Restored pages held against their checksums before their first use",
    ["outcome"],
)
UNRECORDED = Counter("relaygr_arena_unrecorded_total", "Prefixes in DRAM that a successor will not find")
