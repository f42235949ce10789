"""The open files (descriptors) that a process may have, and the share of its HTTP servers.

A server that took all of them for idle connections could accept no other one, not even of a probe. Kafka's connections
and the history store need some, too.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final

OTHERS: Final = 64
"""Kept for everything but HTTP connections."""
SERVERS: Final = 2
"""Most HTTP servers of one process: the gateway's API or the live page, and the probes."""
LEAST: Final = 16


def raise_limit() -> None:
    """Raises the soft limit of this process to the hard one. Usual soft limits are 1,024, for programs of the 1990s."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The kernel refuses more than its own `fs.nr_open`, which may be below the hard limit.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def highest_limit() -> int:
    """The most open files of a process that raises its limit."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def share_of_server() -> int:
    """The most open files that one HTTP server of this process may take."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max((_number(soft) - OTHERS) // SERVERS, LEAST)


def _number(limit: int) -> int:
    return limit if limit != resource.RLIM_INFINITY else 1 << 30
