"""What an executor hands over, in the place of the ResultWriter."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from relaygr.consumer.interface import Received
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import Path
from relaygr.worker.executor.work import JobOutcome, RankingWork, Unranked
from relaygr.worker.model.interface import RankOutputs


@dataclass
class Outbox:
    """Every result and every end of a job, in order."""

    tasks: int | None = None
    """Scores that each candidate must have, if that is known."""
    may_expire: bool = True
    takes_jobs: bool = True
    ranked_works: list[RankingWork] = field(default_factory=list)
    answered: dict[str, tuple[RankingWork, np.ndarray]] = field(default_factory=dict)  # type: ignore[type-arg]
    """The work and the scores of each ranked request."""
    counted: list[RankingWork] = field(default_factory=list)
    """The ranked requests that were counted, which comes after the results of their batch were sent."""
    expired_works: list[RankingWork] = field(default_factory=list)
    failures: list[tuple[RankingWork, Reason, str]] = field(default_factory=list)
    jobs: list[JobOutcome] = field(default_factory=list)
    unsent: int = 0
    """Results that were written and not sent."""

    def ranked(self, work: RankingWork, outputs: RankOutputs) -> bool:
        if self.tasks is not None:
            assert outputs.scores.shape == (work.request.candidates.size, self.tasks)
        if not np.isfinite(outputs.scores).all():
            end = Unranked(Ended.FAILED, Reason.DEVICE_ERROR, "the scores are not finite")
            self.unranked(work.reply, work.received, end, work)
            return False
        self.ranked_works.append(work)
        self.answered[work.request.request_id] = (work, outputs.scores)
        self.unsent += 1
        return True

    def count_ranked(self, work: RankingWork) -> None:
        assert not self.unsent, "counting delays results that are written"
        assert not work.has_ended, "a request is counted when it lets go of its prefix"
        self.counted.append(work)

    def unranked(self, reply: RankingHeaders, received: Received, end: Unranked, work: RankingWork) -> None:
        assert (reply, received) == (work.reply, work.received)
        if end.ended is Ended.EXPIRED:
            assert self.may_expire, f"{work.request.request_id} expired"
            self.expired_works.append(work)
        else:
            assert end.reason is not None
            self.failures.append((work, end.reason, end.detail or ""))
        self.unsent += 1

    def send(self) -> None:
        self.unsent = 0

    def job_done(self, received: object, outcome: JobOutcome, work: object = None) -> None:
        assert self.takes_jobs, "no jobs here"
        self.jobs.append(outcome)

    @property
    def paths(self) -> list[Path | None]:
        return [work.path for work in self.ranked_works]

    @property
    def answers(self) -> int:
        return len(self.ranked_works) + len(self.expired_works) + len(self.failures)
