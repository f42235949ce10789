"""What the trigger remembers of its users: their last event and their last job.

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

from collections import OrderedDict

from relaygr.admission.policy import PrefixHolder
from relaygr.schemas.messages import HistoryVersion, PreInferJob
from relaygr.schemas.record import record


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
    __slots__ = ("job", "request_id", "seen_us")

    def __init__(self, request_id: str, at_us: int) -> None:
        self.request_id = request_id
        self.seen_us = at_us
        self.job: LastJob | None = None


class Users:
    """The users with the most recent events."""

    def __init__(self, most: int) -> None:
        """Remembers at most `most` users; 0: none, and every event is then one of a new user."""
        self._most = most
        self._users: OrderedDict[str, _User] = OrderedDict()

    def __len__(self) -> int:
        return len(self._users)

    def is_repeat(self, user_id: str, request_id: str) -> bool:
        """Whether the user's last event had this request id."""
        user = self._users.get(user_id)
        return user is not None and user.request_id == request_id

    def seen(self, user_id: str, request_id: str, at_us: int) -> None:
        """Notes an event of the user."""
        user = self._users.get(user_id)
        if user is None:
            if not self._most:
                return
            self._users[user_id] = _User(request_id, at_us)
            if len(self._users) > self._most:
                self._users.popitem(last=False)
            return
        self._users.move_to_end(user_id)
        user.request_id, user.seen_us = request_id, max(user.seen_us, at_us)

    def precedes(self, job: PreInferJob) -> bool:
        """Whether the job is newer than all that is known of its user."""
        user = self._users.get(job.user_id)
        return user is None or (user.seen_us < job.retrieval_at_us and user.request_id != job.request_id)

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
