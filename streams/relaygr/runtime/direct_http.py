"""HTTP requests to processes of RelayGR: they never go through a proxy.

Docker and many shells set `http_proxy` for every process. A proxy knows no loopback address and no pod, so a process
that serves would look dead.
"""

from __future__ import annotations

import http.client
import urllib.request
from ipaddress import ip_address
from typing import Final, cast

NO_PROXY: Final = urllib.request.ProxyHandler({})
"""For an opener of urllib that asks the address itself, whatever the environment says."""

EVERY_ADDRESS: Final = ("::", "0.0.0.0", "")
"""Hosts of a server that listens on all addresses of its machine."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


_OPENER: Final = urllib.request.build_opener(NO_PROXY, _NoRedirect())


def open_directly(url: str, timeout_s: float) -> http.client.HTTPResponse:
    """The answer of the process at this address, which the caller closes. Redirects are not followed.

    Raises OSError if there is no answer, or one that is no success.
    """
    return cast(http.client.HTTPResponse, _OPENER.open(url, timeout=timeout_s))


def http_address(host: str, port: int) -> str:
    """Where a server on this host and port is found: addresses of IPv6 are in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def address_here(host: str) -> str:
    """By which a process on this machine reaches a server that listens on `host`.

    A server on every address is asked at one of IPv4: a container without IPv6 has no way to `::`.
    """
    return "127.0.0.1" if host in EVERY_ADDRESS else host


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is this machine's alone."""
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
