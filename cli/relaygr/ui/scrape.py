"""Reads the metrics of processes over HTTP, on a thread, from the addresses given and those that workers name.

Only the metrics in `WANTED` are parsed, and nothing else of an answer is kept. A worker's status can name any address,
so an answer may be long, slow or no metrics at all: its body is bounded in time and size, redirects are not followed,
and values that no counter or size can have are left out.
"""

from __future__ import annotations

import http.client
import itertools
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog
from prometheus_client.parser import text_string_to_metric_families

from relaygr.runtime.direct_http import is_loopback, open_directly
from relaygr.runtime.errors import RelayError
from relaygr.runtime.masking import masked

log = structlog.get_logger()

TIMEOUT_S: Final = 1.0
BODY_S: Final = 3.0
"""The longest time that the body of an answer may take."""
MAX_BYTES: Final = 4 * 1024 * 1024
MAX_LINES: Final = 4096
"""The wanted lines of a page. Our processes have a few hundred."""
MAX_TARGETS: Final = 256
LEAST_WAIT_S: Final = 0.5
"""Between two rounds, also if new targets are named all the time."""
_TURN_S: Final = 0.1
LARGEST: Final = 2.0**63
THROTTLE: Final = "relaygr_kafka_broker_throttle_seconds"
WANTED: Final = (
    "relaygr_cache_bytes",
    "relaygr_cache_hits_total",
    "relaygr_cache_joins_total",
    "relaygr_cache_misses_total",
    "relaygr_gateway_lost_requests_total",
    THROTTLE,
    "relaygr_pool_away",
    "relaygr_pool_fetches_total",
    "relaygr_pool_objects_written_total",
    "relaygr_supervisor_children",
    "relaygr_trigger_decisions_total",
    "relaygr_worker_device_seconds_total",
)


@dataclass(frozen=True, slots=True)
class Reading:
    """The metrics of one process: name -> labels -> value. Empty if the process did not answer."""

    samples: Mapping[str, Mapping[tuple[tuple[str, str], ...], float]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of the name with these labels."""
        wanted = set(labels.items())
        return sum(value for found, value in self.samples.get(name, {}).items() if wanted <= set(found))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The totals of a name by the values of one label."""
        totals: dict[str, float] = {}
        for found, value in self.samples.get(name, {}).items():
            key = dict(found).get(label, "")
            totals[key] = totals.get(key, 0.0) + value
        return totals

    def largest(self, name: str) -> float:
        """The largest sample of the name; 0 without any."""
        return max(self.samples.get(name, {}).values(), default=0.0)

    @property
    def hit_share(self) -> float | None:
        """The share of look-ups for ranking that found the prefix, or its beginning, in HBM; None without any."""
        hits = self.total("relaygr_cache_hits_total")
        others = self.total("relaygr_cache_misses_total") + self.total("relaygr_cache_joins_total")
        return hits / (hits + others) if hits + others else None


def parse_reading(text: str) -> Reading:
    """The samples of a page in Prometheus's text format. Raises ValueError if it is not one."""
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # NaN and infinity too: they have no whole number.
            if not abs(sample.value) <= LARGEST:
                continue
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return Reading(samples)


def wanted_lines(text: str) -> str:
    """The lines of the metrics in `WANTED`. The others would take most of the parser's time."""
    wanted = (line for line in text.splitlines() if line.startswith(WANTED))
    return "\n".join(itertools.islice(wanted, MAX_LINES)) + "\n"


def check_url(url: str) -> str:
    """The address. Raises RelayError if it is not one of HTTP."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_page = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        is_page = False
    if not is_page:
        raise RelayError(
            f"--scrape {masked(url)}: write the address of a metrics page, such as http://trigger-0:9100/metrics, "
            "without user and password."
        )
    return url


def can_reach(url: str, host: str | None) -> bool:
    """Whether an address that a worker on the machine `host` names leads to that worker from here."""
    try:
        name = urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        return False
    if not url.startswith(("http://", "https://")) or not url.endswith("/metrics"):
        return False
    return not is_loopback(name) or host == socket.gethostname()


def pages_at(url: str) -> list[str]:
    """The page at each address of the name in `url`, such as of a Service that has many processes.

    `url` alone if the name has one address, is unknown or this machine's, or if TLS asks for the name.
    """
    parts = urllib.parse.urlsplit(url)
    name = parts.hostname or ""
    if parts.scheme != "http" or is_loopback(name):
        return [url]
    try:
        port = "" if parts.port is None else f":{parts.port}"
        found = socket.getaddrinfo(name, parts.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return [url]
    # A process that has addresses of both versions is counted once.
    version = min(family for family, *_ in found)
    hosts = sorted({str(address[0]) for family, *_, address in found if family == version})
    shown = [f"[{host}]" if ":" in host else host for host in hosts]
    return [url] if len(hosts) == 1 else [parts._replace(netloc=host + port).geturl() for host in shown]


def read_page(url: str) -> Reading | None:
    """The wanted metrics of a page; None if it does not answer in time, or not with metrics."""
    try:
        with open_directly(url, TIMEOUT_S) as answer:
            body = _body(answer)
        return parse_reading(wanted_lines(body.decode(errors="replace")))
    except Exception as error:
        # Any server may be at the address, and neither the client nor the parser lists what they raise.
        log.debug("a metrics page cannot be read", url=masked(url), error=masked(repr(error)))
        return None


def _body(answer: http.client.HTTPResponse) -> bytes:
    """The first `MAX_BYTES`. Raises TimeoutError if they take longer than `BODY_S`."""
    ends_s = time.monotonic() + BODY_S
    body = bytearray()
    while len(body) < MAX_BYTES and (part := answer.read1(MAX_BYTES - len(body))):
        if time.monotonic() > ends_s:
            raise TimeoutError
        body += part
    return bytes(body)


class Scraper:
    """Reads all targets every `interval_s`, from `start` to `stop`."""

    def __init__(
        self,
        interval_s: float,
        targets: Callable[[], Mapping[str, str]],
        deliver: Callable[[str, Reading | None], None],
        read: Callable[[str], Reading | None] = read_page,
        named: Callable[[], int] = int,
    ) -> None:
        """`targets`: address -> name, asked before each round; `deliver` gets name and reading. `named`: a number that
        changes when there are new targets, which are then read at once.
        """
        self._interval_s = interval_s
        self._targets = targets
        self._deliver = deliver
        self._read = read
        self._named = named
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ui-scraper", daemon=True)
        self._silent: set[str] = set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended, or after a little more than one read."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            started_s, named = time.monotonic(), self._named()
            for url, name in list(self._targets().items())[:MAX_TARGETS]:
                if self._stopping.is_set():
                    return
                reading = self._read(url)
                self._note(url, reading is not None)
                self._deliver(name, reading)
            ends_s, least_s = started_s + self._interval_s, time.monotonic() + min(LEAST_WAIT_S, self._interval_s)
            while not self._stopping.wait(_TURN_S):
                now_s = time.monotonic()
                if now_s >= least_s and (now_s >= ends_s or self._named() != named):
                    break

    def _note(self, url: str, answered: bool) -> None:
        if answered:
            self._silent.discard(url)
        elif url not in self._silent:
            if len(self._silent) < MAX_TARGETS:
                self._silent.add(url)
            log.info("a metrics page does not answer", url=masked(url))
