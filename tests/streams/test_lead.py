"""The measured lead times, and what the trigger makes of them."""

from __future__ import annotations

import dataclasses

import pytest

from relaygr.admission.lead import HORIZON_US, LEAST_SAMPLES, LeadTimes, lead_shares_of
from relaygr.admission.policy import usable_lead_us
from relaygr.schemas.messages import LeadTimeReport
from tests.streams.test_trigger_policy import AT_RISK, NOW_US, OWNER


def measured(count: int, at_us: int = 0) -> LeadTimes:
    """Requests that were expected after 100 ms and came after 50, 51, 52 ... ms."""
    lead = LeadTimes()
    for number in range(count):
        lead.arrived["default"].append((at_us, NOW_US + 50_000 + 1_000 * number, NOW_US, NOW_US + 100_000))
    return lead


def test_the_report_has_low_quantiles_of_the_time_and_of_its_share_of_the_expected_one() -> None:
    lead = measured(100)
    assert lead.report(0) == LeadTimeReport(("default",), (0.59,), (59_000,), (99_000,))
    assert lead.latest["default"].median_share == 0.99


def test_few_or_old_lead_times_are_no_evidence() -> None:
    assert measured(LEAST_SAMPLES - 1).report(0) is None
    assert measured(LEAST_SAMPLES).report(HORIZON_US) is not None
    assert measured(LEAST_SAMPLES).report(HORIZON_US + 1) is None


def test_reports_between_the_requests_change_nothing_and_only_the_newest_count() -> None:
    often, once = LeadTimes(), LeadTimes()
    for number in range(3_000):
        request = number, NOW_US + 20_000 + 7_919 * number % 50_000, NOW_US, NOW_US + 100_000
        often.arrived["default"].append(request)
        once.arrived["default"].append(request)
        if number % 100 == 0:
            often.report(number)
    assert often.report(3_000) == once.report(3_000) is not None


def test_each_scenario_has_lead_times_of_its_own() -> None:
    lead = measured(LEAST_SAMPLES)
    for _ in range(LEAST_SAMPLES):
        lead.arrived["ads"].append((0, NOW_US + 20_000, NOW_US, NOW_US + 40_000))
    lead.arrived["search"].append((0, NOW_US + 20_000, NOW_US, NOW_US + 40_000))
    report = lead.report(0)
    assert report is not None
    assert report.scenarios == ("default", "ads"), "too few of the search were measured"
    assert lead_shares_of(report)["ads"] == 0.5


def test_events_that_expect_their_request_at_once_are_not_measured() -> None:
    lead = LeadTimes()
    lead.arrived["default"].extend([(0, NOW_US + 1_000, NOW_US, NOW_US)] * LEAST_SAMPLES)
    assert lead.report(0) is None


def test_a_negative_share_from_elsewhere_is_ignored() -> None:
    assert lead_shares_of(LeadTimeReport(("a", "b"), (-1.0, 0.5), (), ())) == {"b": 0.5}
    assert lead_shares_of(None) == {}


@pytest.mark.parametrize(
    ("share", "usable_us"),
    [(None, 40_000), (0.5, 20_000), (1.0, 50_000), (3.0, 50_000)],
)
def test_the_usable_lead_time_is_measured_from_the_start_of_retrieval(share: float | None, usable_us: float) -> None:
    # 60 ms from the start of retrieval to the expected request, 10 of which have passed.
    impression = dataclasses.replace(AT_RISK, retrieval_at_us=NOW_US - 10_000)
    owner = dataclasses.replace(OWNER, lead_shares={} if share is None else {"default": share})
    assert usable_lead_us(impression, owner, 0.8, NOW_US) == pytest.approx(usable_us)
