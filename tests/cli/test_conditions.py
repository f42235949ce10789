"""What is wrong is told in one set of words: by page, demo, doctor, alerts and documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from relaygr import conditions
from relaygr.conditions import (
    BUDGET_SHARE,
    CONDITIONS,
    LAG_S,
    LEAST_REQUESTS,
    THROTTLE_S,
    Condition,
    Seen,
    Severity,
    judge,
)
from relaygr.lag.report import GroupReport, TimeLag, TimeLagSource
from relaygr.lag.status import LagStatus
from relaygr.schemas.ended import Ended
from relaygr.schemas.fields import Other
from relaygr.schemas.messages import Path as RankingPath
from relaygr.schemas.messages import StaleCause
from tests.test_docs import HEADING, prose_of, slug_of
from tests.worlds.compose import ALERTS
from tests.worlds.ui import UiWorld

ROOT = Path(__file__).parents[2]
TROUBLESHOOTING = "docs/troubleshooting.md"


def names(seen: Seen) -> list[str]:
    return [each.name for each in judge(seen)]


def group(status: LagStatus = LagStatus.OK, seconds: float | None = None, split: int = 0) -> GroupReport:
    lag = None if seconds is None else TimeLag(seconds, TimeLagSource.INTERPOLATED)
    return GroupReport("relaygr.workers", "", "", "", 2, 0, 0, lag, 0, tuple(range(split)), status, (), ())


# -- what is judged --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (Seen(errors=["Kafka is silent. Wait."]), "Kafka is silent. Wait"),
        (Seen(ready=0), "No worker is ready, so no request is ranked"),
        (Seen(ended=100, late=65), "65 % of the ranking requests are late"),
        (Seen(ended=200, failed=3), "1.5 % of the ranking requests fail"),
        (Seen(ended=100, truncated=20), "20 % of the ranking requests are ranked on a truncated history"),
        (
            Seen(ranked=100, waited=9),
            "9.0 % of the ranked requests waited in the queue for more than half of their time",
        ),
        (Seen(groups=[group(LagStatus.STOP)]), "The group relaygr.workers has the status stop"),
        (Seen(groups=[group(LagStatus.WARN, 7.4)]), "The group relaygr.workers is 7 s behind"),
        (
            Seen(groups=[group(split=6)]),
            "Pre-infer jobs and ranking requests of 6 partitions of the group relaygr.workers go to different workers",
        ),
        (
            Seen(held_back_s={"b": 0.5, "a": 2, "c": 0.001}),
            "A quota of Kafka holds back the answers to 2 processes (a, b) for up to 2.00 s",
        ),
        (
            Seen(away=["w-0", "w-1", "w-2", "w-3"]),
            "The pool hangs or does not answer for 4 workers (w-0, w-1, w-2, ...): prefixes are computed instead",
        ),
        (Seen(ranked=100, stale={"gap": 12}), "12 % of the ranked requests had a stale history, cause gap"),
        (Seen(silent_pages=["http://t:1/metrics"]), "No metrics come from http://t:1/metrics"),
    ],
)
def test_each_condition_is_one_sentence_with_its_figures(seen: Seen, says: str) -> None:
    assert [each.text for each in judge(seen)] == [says]


def test_a_calm_cluster_has_no_condition() -> None:
    calm = Seen(
        ready=2,
        ended=1000,
        late=10,
        failed=10,
        truncated=10,
        ranked=1000,
        waited=10,
        stale={"behind": 10},
        groups=[group(LagStatus.WARN, LAG_S), group(LagStatus.JUDGING), group(LagStatus.NO_COMMIT)],
        held_back_s={"worker-00": THROTTLE_S},
        revisions={"a": ["worker-00", "worker-01"]},
    )
    assert names(calm) == [] == names(Seen())


@pytest.mark.parametrize(("late", "ended", "holds"), [(2, 2, False), (3, 20, True), (3, 299, True), (3, 300, False)])
def test_a_share_is_told_above_the_error_budget_and_chance(late: int, ended: int, holds: bool) -> None:
    assert LEAST_REQUESTS == 3
    assert names(Seen(ended=ended, late=late)) == (["late"] if holds else [])


def test_the_gravest_comes_first() -> None:
    seen = Seen(ready=0, ended=9, late=9, silent_pages=["x"], away=["w"], groups=[group(LagStatus.STALL)])
    assert names(seen) == ["no-worker", "late", "stuck", "pool-away", "silent-pages"]
    grave = [each.severity is Severity.CRITICAL for each in CONDITIONS]
    assert grave == sorted(grave, reverse=True)


# -- what the page measures ------------------------------------------------------------------------


def test_the_page_tells_a_share_of_late_requests_under_which_it_was_green() -> None:
    world = UiWorld()
    world.status("worker-00", 0)
    for number in range(20):
        world.ask(f"g.1.{number}.t")
        world.answer(f"g.1.{number}.t", latency_ms=90 if number % 20 < 13 else 10)
    [problem] = world.snapshot().problems
    assert problem.text == "65 % of the ranking requests are late"
    assert (problem.page, problem.severity) == ("docs/alerts.md#relayrankinglate", "critical")
    world.wait(61)
    assert "late" not in {each.name for each in world.snapshot().problems}, "of the last minute"


def test_the_page_tells_apart_late_failed_and_truncated_requests() -> None:
    world = UiWorld()
    world.status("worker-00", 0)
    ends = [(Ended.FAILED, None)] * 5 + [(Ended.EXPIRED, None)] * 4 + [(Ended.RANKED, RankingPath.TRUNCATED)] * 8
    ends += [(Ended.RANKED, RankingPath.HBM)] * 3
    for number, (outcome, path) in enumerate(ends):
        world.ask(f"g.1.{number}.t")
        world.answer(f"g.1.{number}.t", 10, path, outcome)
    assert world.said() == [
        "20 % of the ranking requests are late",
        "25 % of the ranking requests fail",
        "40 % of the ranking requests are ranked on a truncated history",
    ]


def test_the_page_tells_stale_histories_by_cause_and_a_queue_near_the_deadline() -> None:
    world = UiWorld()
    world.status("worker-00", 0)
    causes: list[StaleCause | Other | None] = [StaleCause.BEHIND] * 4 + [StaleCause.GAP] * 3 + [Other("news")] * 2
    for number in range(20):
        world.ask(f"g.1.{number}.t")
        cause = causes[number] if number < len(causes) else None
        # A request is received 1 ms after it was sent, with 49 ms to its deadline.
        world.answer(f"g.1.{number}.t", 40, queue_ms=25 if number < 6 else 24, stale=cause)
    assert world.said() == [
        "30 % of the ranked requests waited in the queue for more than half of their time",
        "20 % of the ranked requests had a stale history, cause behind",
        "15 % of the ranked requests had a stale history, cause gap",
    ]


# -- the documentation -----------------------------------------------------------------------------


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda each: each.name)
def test_the_section_of_each_condition_exists(condition: Condition) -> None:
    page, _, anchor = condition.page.partition("#")
    assert anchor in {slug_of(heading) for heading in HEADING.findall(prose_of(page))}


def test_troubleshooting_lists_every_condition_with_its_words_and_its_section() -> None:
    page = (ROOT / TROUBLESHOOTING).read_text(encoding="utf-8")
    section = page.split("\n## What page, doctor and alerts say\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!the sentence|---)(.*?) \| .*?\[.*?\]\((.*?)\)", section, re.MULTILINE)
    expected = [
        (re.sub(r"\{\w+\}", "…", each.sentence), each.page.removeprefix(TROUBLESHOOTING).removeprefix("docs/"))
        for each in CONDITIONS
        if each is not conditions.UNREAD
    ]
    assert rows == expected


# -- the alerts ------------------------------------------------------------------------------------


def rules() -> dict[str, Any]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


TOLD_BY_ALERTS = [each for each in CONDITIONS if each.alert is not None]


@pytest.mark.parametrize("condition", TOLD_BY_ALERTS, ids=lambda each: each.name)
def test_alert_and_page_use_the_same_words_and_lead_to_the_same_section(condition: Condition) -> None:
    rule = rules()[str(condition.alert)]
    words = [re.escape(part) for part in re.split(r"\{\w+\}", condition.sentence)]
    template = r"\{\{.*?\}\}"
    assert re.search(template.join(words), rule["annotations"]["summary"], re.DOTALL), rule["annotations"]["summary"]
    assert rule["labels"]["severity"] == condition.severity
    runbook = rule["annotations"]["runbook_url"]
    assert runbook == f"docs/alerts.md#{str(condition.alert).lower()}"
    if condition.page != runbook:
        # The causes of stale histories have a table of their own, to which the runbook leads.
        section = (ROOT / "docs/alerts.md").read_text(encoding="utf-8").split(f"### {condition.alert}\n")[1]
        assert f"]({condition.page.removeprefix('docs/')})" in section.split("\n##")[0]


@pytest.mark.parametrize(
    ("condition", "bound"),
    [
        (conditions.LATE, BUDGET_SHARE),
        (conditions.FAILING, BUDGET_SHARE),
        (conditions.TRUNCATED, BUDGET_SHARE),
        (conditions.QUEUE, BUDGET_SHARE),
        (conditions.STALE, BUDGET_SHARE),
        (conditions.THROTTLED, THROTTLE_S),
        (conditions.LAGGING, LAG_S),
        (conditions.OWNER_SPLIT, 0),
    ],
    ids=lambda each: each.name if isinstance(each, Condition) else "",
)
def test_alert_and_page_have_the_same_threshold(condition: Condition, bound: float) -> None:
    assert rules()[str(condition.alert)]["expr"].strip().endswith(f" > {bound:g}")


def test_alert_and_page_call_the_same_statuses_stuck() -> None:
    named = re.search(r'status=~"(.*?)"', rules()[str(conditions.STUCK.alert)]["expr"])
    assert named is not None and set(named[1].split("|")) == {each.value for each in conditions._STUCK}
