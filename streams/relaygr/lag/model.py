"""What one poll of Kafka says about groups: plain data, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relaygr.consumer.watermark import TopicPartition

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member of a group."""

    member_id: str
    client_id: str
    host: str
    instance_id: str | None
    partitions: frozenset[TopicPartition]

    @property
    def name(self) -> str:
        """What people call it: the static id where it has one."""
        return f"{self.instance_id or self.client_id}@{self.host.lstrip('/')}"


@dataclass(frozen=True, slots=True)
class PartitionOffsets:
    """Where a group and a log stand. None: no commit, or an end that the broker did not tell."""

    tp: TopicPartition
    committed: int | None
    end: int | None

    @property
    def lag(self) -> int | None:
        """Messages between commit and end. The commit is asked first, so that a fast group is not behind itself."""
        if self.committed is None or self.end is None:
            return None
        return max(0, self.end - self.committed)


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """One group. `members` is None where the cluster does not tell them."""

    group: str
    state: str
    protocol: str
    assignor: str
    members: tuple[GroupMember, ...] | None
    partitions: tuple[PartitionOffsets, ...]
    problems: tuple[str, ...] = ()
    """Sentences for people: what could not be had, and why."""

    @property
    def stable(self) -> bool:
        """Whether what the members own is settled."""
        return self.state == "stable"

    def owner(self, tp: TopicPartition) -> GroupMember | None:
        return next((member for member in self.members or () if tp in member.partitions), None)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All groups at one time."""

    cluster_id: str
    polled_at_us: int
    """Monotonic."""
    wall_us: int
    groups: tuple[GroupSnapshot, ...]


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
