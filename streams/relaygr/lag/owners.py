"""The owner split: a user's pre-infer jobs and ranking requests that go to two members, so that K,V is never met.

It comes from unequal partition counts, from an assignor other than `range`, or from a member that
subscribes to one of the topics only. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaygr.lag.model import GroupSnapshot


def owner_split(group: GroupSnapshot, topics: Sequence[str]) -> frozenset[int]:
    """Partitions that not one and the same member owns on all of `topics`.

    Empty while a rebalance is under way or members are not known: then nothing can be said.
    """
    if group.members is None or not group.stable or len(topics) < 2:
        return frozenset()
    owners: dict[int, dict[str, str]] = {}
    for member in group.members:
        for tp in member.partitions:
            if tp.topic in topics:
                owners.setdefault(tp.partition, {})[tp.topic] = member.member_id
    return frozenset(
        partition
        for partition, by_topic in owners.items()
        if len(by_topic) < len(topics) or len(set(by_topic.values())) > 1
    )
