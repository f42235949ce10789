"""A test without its part of the machine is skipped, and fails where the part is promised."""

from __future__ import annotations

import pytest

from tests.promised import promised, unavailable


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({}, set()),
        ({"RELAYGR_TEST_REQUIRE": ""}, set()),
        ({"RELAYGR_TEST_REQUIRE": "broker"}, {"broker"}),
        ({"RELAYGR_TEST_REQUIRE": "docker, browser"}, {"docker", "browser"}),
        ({"RELAYGR_TEST_REQUIRE_BROKER": "1"}, {"broker"}),
        ({"RELAYGR_TEST_REQUIRE_BROKER": "0"}, set()),
        ({"RELAYGR_TEST_REQUIRE": "promtool", "RELAYGR_TEST_REQUIRE_BROKER": "1"}, {"promtool", "broker"}),
    ],
)
def test_both_variables_name_what_is_promised(environment: dict[str, str], parts: set[str]) -> None:
    assert promised(environment) == parts


def test_a_name_that_is_no_part_is_an_error() -> None:
    with pytest.raises(ValueError, match="brokr"):
        promised({"RELAYGR_TEST_REQUIRE": "brokr"})


def test_a_missing_part_skips_a_test_and_fails_it_where_the_part_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAYGR_TEST_REQUIRE_BROKER", raising=False)
    monkeypatch.setenv("RELAYGR_TEST_REQUIRE", "docker")
    with pytest.raises(pytest.skip.Exception, match="there is no browser"):
        unavailable("browser", "there is no browser")
    with pytest.raises(pytest.fail.Exception, match=r"docker is promised .* there is no docker"):
        unavailable("docker", "there is no docker")
