"""Workers come and go in each mode of `affinity`, and the partitions that move are counted.

member     a process with the workers' consumer loop
fleet      the members, and who owns what
load       impressions, and users whose K,V is held
run        the changes, and the figures of each
__main__   `python -m benchmarks.affinity`
"""

from __future__ import annotations

import enum


class FleetMode(enum.StrEnum):
    """A mode of `affinity`. With RANGE the id of a new member sorts last, with RANGE_PLACED where the fewest partitions
    move.
    """

    RANGE = "range"
    RANGE_PLACED = "range_placed"
    CONSUMER_PROTOCOL = "consumer_protocol"
    ONE_TOPIC = "one_topic"
