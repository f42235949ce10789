"""Metrics of the consumer loop. `loop` is the loop's name: a worker has one for its group, one for the overflow."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

MESSAGES = Counter("relaygr_consumer_messages_total", "Messages handed to the handler", ["loop", "topic"])
SKIPPED = Counter(
    "relaygr_consumer_redelivered_skipped_total",
    "Messages delivered again and skipped: in flight or finished here, or of a partition that went away",
    ["loop", "state"],
)
TAKEN_UP = Counter(
    "relaygr_consumer_taken_up_total",
    "Messages that the process before had finished and not committed, so that this one need not work on them",
    ["loop"],
)
ERRORS = Counter("relaygr_consumer_errors_total", "Errors that the consumer reported", ["loop", "error"])
COMMITS = Counter("relaygr_consumer_commits_total", "Hand-overs of the watermark", ["loop", "kind"])
REJOINS = Counter(
    "relaygr_consumer_rejoins_total", "Times that a broker's outage made the member join again as a new one", ["loop"]
)
IN_FLIGHT = Gauge("relaygr_consumer_in_flight_messages", "Messages read and not finished", ["loop"])
PAUSED = Gauge("relaygr_consumer_paused_partitions", "Partitions paused now", ["loop"])
OWNED = Gauge("relaygr_consumer_owned_partitions", "Partitions owned now, counted once over all topics", ["loop"])
EPOCH = Gauge("relaygr_consumer_assignment_epoch", "Counts this process's assignments", ["loop"])
OWNER_SPLIT = Gauge(
    "relaygr_consumer_owner_split_partitions", "Partitions owned on some topics, but not on all of them", ["loop"]
)
BROKER_REACHABLE = Gauge("relaygr_consumer_broker_reachable", "1 while the cluster answers", ["loop"])
STALLED = Gauge("relaygr_consumer_stalled", "1 while assigned, with messages to read, and none comes", ["loop"])
