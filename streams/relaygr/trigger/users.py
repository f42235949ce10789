"""What the trigger remembers of its users: their last event, their last job, and how soon users come back.

* An event with the request id of the user's last event is a repeat, which a producer or a rebalance may cause.
* A job is *live* until the latest end of its lease on the worker. A job for a later version of the history then needs
  only the new tokens. Until the expected ranking request the prefix is under way, and the trigger sends no second job
  for the same version. Afterwards it sends one, because the worker may have refused the first without telling the
  trigger. If the prefix is in HBM, the second job costs little.
* After the lease the trigger does not know where the prefix is. It never counts the prefix as under way then, because
  the next job is the worker's signal to reload the prefix from DRAM.

At most `most` users are remembered; the one with the oldest last event is forgotten first. Pure; not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from typing import Final

from relaygr.admission.policy import PrefixHolder
from relaygr.schemas.messages import HistoryVersion, PreInferJob
from relaygr.schemas.record import record

GAP_BUCKETS: Final = 24
FIRST_VISIT: Final = GAP_BUCKETS
"""The row of users without an earlier visit."""
LEAST_VISITS: Final = 64
"""Visits that a row needs before its chances count."""
_MOST_VISITS: Final = 16_384
_SAME_VISIT_US: Final = 1_000_000
"""Events that follow this closely belong to one visit."""


@record(frozen=True, slots=True)
class LastJob:
    """The newest job of a user. `holder`: the owner that it was sent to, None if that was unknown."""

    version: HistoryVersion | None
    holder: PrefixHolder | None
    prefix_tokens: int
    ranking_at_us: int
    """When its ranking request is expected. Wall time, as in the messages."""
    until_us: int
    """When its lease ends at the latest. Wall time, as in the messages."""


class _User:
    __slots__ = ("before", "job", "request_id", "visited_us")

    def __init__(self, request_id: str, at_us: int) -> None:
        self.request_id = request_id
        self.visited_us = at_us
        self.before = FIRST_VISIT
        """The bucket of the gap before the last visit."""
        self.job: LastJob | None = None


class ReturnGaps:
    """How soon users come back, by the length of their previous gap. Gap bucket b: less than 2^b × 1.05 s.

    A visit whose user has not come back yet counts as one without a return, so a chance is rather too low than too
    high. Old visits are halved.
    """

    def __init__(self) -> None:
        self._visits = [0.0] * (GAP_BUCKETS + 1)
        self._returns = [[0.0] * GAP_BUCKETS for _ in range(GAP_BUCKETS + 1)]

    def visited(self, before: int) -> None:
        """A user came, whose previous gap has the bucket `before`."""
        self._visits[before] += 1
        if self._visits[before] >= _MOST_VISITS:
            self._visits[before] /= 2
            self._returns[before] = [count / 2 for count in self._returns[before]]

    def returned(self, before: int, gap_us: int) -> int:
        """The user came back after this gap. Returns its bucket."""
        bucket = gap_bucket(gap_us)
        self._returns[before][bucket] += 1
        return bucket

    def chance(self, before: int, within_us: float) -> float:
        """The share of such visits that were followed by another one within this time; 0 while too few are known."""
        buckets = bisect_right(_LONGEST_US, within_us)
        visits, returns = self._visits[before], sum(self._returns[before][:buckets])
        if visits < LEAST_VISITS:
            visits = sum(self._visits)
            returns = sum(sum(row[:buckets]) for row in self._returns)
        return min(1.0, returns / visits) if visits >= LEAST_VISITS else 0.0


def gap_bucket(gap_us: int) -> int:
    """The bucket of a gap between two visits."""
    return min((gap_us >> 20).bit_length(), GAP_BUCKETS - 1)


_LONGEST_US: Final = [float(1 << (20 + bucket)) for bucket in range(GAP_BUCKETS)]
"""The longest gap of each bucket."""


class Users:
    """The users with the most recent events."""

    def __init__(self, most: int) -> None:
        """Remembers at most `most` users; 0: none, and every event is then one of a new user."""
        self._most = most
        self._users: OrderedDict[str, _User] = OrderedDict()
        self.gaps = ReturnGaps()

    def __len__(self) -> int:
        return len(self._users)

    def is_repeat(self, user_id: str, request_id: str) -> bool:
        """Whether the user's last event had this request id."""
        user = self._users.get(user_id)
        return user is not None and user.request_id == request_id

    def seen(self, user_id: str, request_id: str, at_us: int) -> None:
        """Notes an event of the user, and the gap before it."""
        user = self._users.get(user_id)
        if user is None:
            if not self._most:
                return
            user = self._users[user_id] = _User(request_id, at_us)
            self.gaps.visited(FIRST_VISIT)
            if len(self._users) > self._most:
                self._users.popitem(last=False)
            return
        self._users.move_to_end(user_id)
        user.request_id = request_id
        gap_us = at_us - user.visited_us
        if gap_us >= _SAME_VISIT_US:
            user.before, user.visited_us = self.gaps.returned(user.before, gap_us), at_us
            self.gaps.visited(user.before)

    def precedes(self, job: PreInferJob) -> bool:
        """Whether the job is newer than all that is known of its user."""
        user = self._users.get(job.user_id)
        return user is None or (user.visited_us < job.retrieval_at_us and user.request_id != job.request_id)

    def live_job(self, user_id: str, holder: PrefixHolder | None, now_us: int) -> LastJob | None:
        """The user's last job, if it went to this owner, in the same process and for the same model, and its lease may
        still hold."""
        user = self._users.get(user_id)
        job = None if user is None else user.job
        return job if job is not None and job.holder == holder and now_us < job.until_us else None

    def sent(self, user_id: str, job: LastJob) -> None:
        """Notes the user's newest job."""
        user = self._users.get(user_id)
        if user is not None:
            user.job = job

    def unsent(self, user_id: str) -> None:
        """The user's last job did not reach Kafka: the next event is not held back because of it."""
        user = self._users.get(user_id)
        if user is not None:
            user.job, user.request_id = None, ""

    def return_chance(self, user_id: str, within_us: float) -> float:
        """The chance that the user comes back within this time after the present visit."""
        user = self._users.get(user_id)
        return self.gaps.chance(FIRST_VISIT if user is None else user.before, within_us)
