"""Whether one owner has every topic's partition of its users. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relaygr.consumer.watermark import TopicPartition


def split_partitions(owned: Iterable[TopicPartition], topics: Sequence[str]) -> frozenset[int]:
    """Partitions owned on some of `topics`, but not on all: their users' K,V and requests do not meet."""
    by_topic: dict[str, set[int]] = {topic: set() for topic in topics}
    for tp in owned:
        by_topic.setdefault(tp.topic, set()).add(tp.partition)
    return frozenset(
        partition
        for partition in set[int]().union(*by_topic.values())
        if any(partition not in partitions for partitions in by_topic.values())
    )
