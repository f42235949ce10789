"""The result of one poll of Kafka: plain data, no I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from relaygr.consumer.watermark import TopicPartition, split_partitions

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
        """A readable name: static id (or client id) and host."""
        return f"{self.instance_id or self.client_id}@{self.host.lstrip('/')}"


@dataclass(frozen=True, slots=True)
class PartitionOffsets:
    """The committed offset of a group, the end and the start of the log. None: no commit, or unknown."""

    tp: TopicPartition
    committed: int | None
    end: int | None
    start: int | None = None

    @property
    def is_beyond_end(self) -> bool:
        """Whether the commit is that of another log: the topic was deleted and created again, or truncated."""
        return self.committed is not None and self.end is not None and self.committed > self.end

    @property
    def position(self) -> int | None:
        """The offset of the next message that the group can read; None without a commit."""
        if self.committed is None:
            return None
        if self.is_beyond_end:
            return self.end if self.start is None else self.start
        return max(self.committed, self.start or 0)

    @property
    def lag(self) -> int | None:
        """Messages that can be read, between commit and end; None if commit or end is unknown."""
        position = self.position
        if position is None or self.end is None:
            return None
        return max(0, self.end - position)

    @property
    def unread(self) -> int | None:
        """Messages that wait for a group without a commit: the whole log; None if there is a commit, or if unknown."""
        if self.committed is not None or self.end is None or self.start is None:
            return None
        return max(0, self.end - self.start)

    @property
    def lost(self) -> int:
        """Messages that were deleted before the group read them."""
        if self.committed is None or self.start is None:
            return 0
        return max(0, self.start - self.committed)


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """One group. `members` is None if the cluster does not report them."""

    group: str
    state: str
    protocol: str
    assignor: str
    members: tuple[GroupMember, ...] | None
    partitions: tuple[PartitionOffsets, ...]
    problems: tuple[str, ...] = ()
    """Sentences about values that could not be read."""
    answered: bool = True
    """Whether the group's coordinator answered; without it there are no partitions and no members."""

    @property
    def stable(self) -> bool:
        """Whether no rebalance is in progress."""
        return self.state == "stable"

    def owner(self, tp: TopicPartition) -> GroupMember | None:
        return next((member for member in self.members or () if tp in member.partitions), None)

    def is_owned(self, tp: TopicPartition) -> bool | None:
        """Whether a member owns the partition; None if the members are unknown, or during a rebalance."""
        if self.members is None or (self.members and not self.stable):
            return None
        return self.owner(tp) is not None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All groups at the time of one poll."""

    cluster_id: str
    polled_at_us: int
    """Monotonic."""
    wall_us: int
    groups: tuple[GroupSnapshot, ...]


def owner_split(group: GroupSnapshot, topics: Collection[str]) -> frozenset[int]:
    """The partitions that no member owns on all of the co-partitioned `topics`.

    Causes are unequal partition counts, an assignor other than `range`, or a member that subscribes to one of the
    topics only. The result is empty during a rebalance and while the members are unknown.
    """
    if group.members is None or not group.stable:
        return frozenset()
    return split_partitions(((tp, member.member_id) for member in group.members for tp in member.partitions), topics)
