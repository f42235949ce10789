"""Which requests are late or lost when processes of a relay are killed, started, stopped or reloaded, when the broker
is away, and when one user sends many requests.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Event(enum.StrEnum):
    """What can happen to the relay."""

    KILL = "kill"
    """kill -9 of the worker without a standby, which is started again at once."""
    TAKE_OVER = "take-over"
    """kill -9 of the active process of the worker with a hot standby."""
    KILL_TRIGGER = "kill-trigger"
    JOIN = "join"
    """A third worker starts."""
    LEAVE = "leave"
    """The third worker stops for good, with --leave-on-stop."""
    RELOAD = "reload"
    """All workers get another model and SIGHUP."""
    BROKER_STOP = "broker-stop"
    """kill -9 of the broker, or of one of --brokers, which is started again."""
    HOT_USER = "hot-user"
    """One user sends --hot-rate impressions a second for ten seconds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played. `seconds` is 0 if each event is played once."""

    events: tuple[Event, ...]
    seconds: float
    rate_per_s: float
    hot_rate_per_s: float
    users: int
    history: int
    budget_ms: int
    window_s: float
    seed: int
    warm_up_users: int = 0
    pool: bool = False
