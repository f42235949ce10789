"""What `/readyz` and `/healthz` say. Apart from their server: a client has checks, and needs no web server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One condition, whether it holds, and an explanation for people."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Several checks. Ready means that all of them pass."""

    checks: tuple[Check, ...] = ()

    @property
    def ready(self) -> bool:
        return all(check.ok for check in self.checks)
