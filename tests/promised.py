"""Parts that some tests need: a broker, Docker, a browser, Mooncake, transformers, programs, and `git`, a checkout with
its history.

Without its part a test is skipped. Where the part is promised, the test fails: `RELAYGR_TEST_REQUIRE` names the
promised parts, separated by commas. `RELAYGR_TEST_REQUIRE_BROKER=1` is another way to name the broker.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import NoReturn

import pytest

PROGRAMS = {
    "go": "go",
    "jdk": "javac",
    "jq": "jq",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "promtool",
    "systemd": "systemd-analyze",
}
"""The parts that are one program."""
PARTS = frozenset({"broker", "docker", "browser", "git", "mooncake", "transformers", *PROGRAMS})


def promised(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The parts that must be there. Raises ValueError for a name that is no part."""
    named = {name.strip() for name in environment.get("RELAYGR_TEST_REQUIRE", "").split(",")} - {""}
    if named - PARTS:
        raise ValueError(f"RELAYGR_TEST_REQUIRE names {sorted(named - PARTS)}; the parts are {sorted(PARTS)}")
    if environment.get("RELAYGR_TEST_REQUIRE_BROKER") == "1":
        named.add("broker")
    return frozenset(named)


def unavailable(part: str, reason: str) -> NoReturn:
    """Ends the test: as failed if `part` is promised, else as skipped."""
    assert part in PARTS
    if part in promised():
        pytest.fail(f"{part} is promised by RELAYGR_TEST_REQUIRE, but: {reason}")
    pytest.skip(reason)


def program(part: str) -> str:
    """The path of the program that is this part. Ends the test if it is not installed."""
    name = PROGRAMS[part]
    return shutil.which(name) or unavailable(part, f"{name} is not installed")
