"""The wheel of this checkout, built and installed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wheel.wheel_world import Environment, build_wheel, make_environment


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's file."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel. Do not write to it."""
    return make_environment(tmp_path_factory.mktemp("installed"), wheel)
