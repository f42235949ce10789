"""The release of this checkout and the wheel of an earlier commit, each built and installed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wheel.upgrade_world import Version
from tests.wheel.wheel_world import Environment, Release, build_earlier, build_release, make_environment


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The files that `make dist` makes."""
    return build_release(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="session")
def wheel(release: Release) -> Path:
    """The wheel's file."""
    return release.wheel


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel. Do not write to it."""
    return make_environment(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel of the earlier commit. Do not write to it."""
    folder = tmp_path_factory.mktemp("earlier")
    return make_environment(folder / "installed", build_earlier(folder))


@pytest.fixture(params=["upgrade", "rollback"])
def versions(request: pytest.FixtureRequest, earlier: Environment, installed: Environment) -> tuple[Version, Version]:
    """The version that runs, and the one that comes."""
    old, new = Version("earlier", earlier), Version("today", installed)
    return (old, new) if request.param == "upgrade" else (new, old)
