"""What a check found."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    SKIP = "skip"
    """Not checked; the finding says why."""
    WARN = "warn"
    """The relay works, with less memory, speed or safety than it should have."""
    FAIL = "fail"
    """The relay, or this process of it, does not work."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding of one check."""

    check: str
    verdict: Verdict
    what: str
    mend: str = ""
    """What to do; empty unless WARN or FAIL."""


def exit_code(found: Iterable[Diagnosis]) -> int:
    """0: nothing to do; 1: a warning; 2: a failure."""
    verdicts = {each.verdict for each in found}
    return 2 if Verdict.FAIL in verdicts else 1 if Verdict.WARN in verdicts else 0
