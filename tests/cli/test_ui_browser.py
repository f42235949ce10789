"""The live page in a real browser: it renders, follows events, and is readable, with the keyboard alone as well."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from relaygr.lag.report import GroupReport, LagReport, PartitionReport
from relaygr.lag.status import LagStatus
from relaygr.schemas.messages import Path as RankingPath
from relaygr.ui import server as server_module
from relaygr.ui.page import GateView, Page, RunView
from relaygr.ui.scrape import parse_reading
from relaygr.ui.server import UiServer
from tests.worlds.browser import Browser, browser, press
from tests.worlds.ui import UiWorld, served

pytestmark = pytest.mark.browser

TOKEN = "a token of 20 chars!"
SHOWN = "document.getElementById('live')?.hidden === false"
POOL = (
    'relaygr_pool_away 0\nrelaygr_pool_fetches_total{outcome="loaded"} 7\n'
    'relaygr_pool_objects_written_total{outcome="stored"} 9\n'
)
DECISIONS = 'relaygr_trigger_decisions_total{reason="admitted"} %d\n'
NAMED = (
    "[...document.querySelectorAll('svg')].filter(each => !each.closest('[aria-hidden=true]'))"
    ".every(each => each.getAttribute('aria-label'))"
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def world() -> UiWorld:
    """A cluster of which nothing is wrong: of 500 requests 4 are late."""
    world = UiWorld(partitions=6)
    for number in range(460):
        world.ask(f"g.5.{number}.t")
        world.answer(f"g.5.{number}.t")
    world.wait(1)
    for number in range(40):
        world.impression(
            f"g.1.{number}.t",
            latency_ms=60 if number % 10 == 0 else 12,
            path=RankingPath.DRAM if number % 3 else RankingPath.HBM,
        )
    world.status("worker-00", 0, 1, 2)
    world.status("worker-01", 3, 4)
    rows = tuple(PartitionReport("t", each, None, None, 7 * each, None, None, LagStatus.WARN) for each in range(6))
    group = GroupReport("relaygr.workers", "", "", "", 2, 105, 35, None, 0, (), LagStatus.WARN, (), rows)
    world.model.note_lag(LagReport("c", 0, 0, True, (group,)), None)
    world.model.note_metrics("worker-01", parse_reading(POOL), world.clock.monotonic_us())
    for count in (0, 40):
        world.model.note_metrics("trigger", parse_reading(DECISIONS % count), world.clock.monotonic_us())
    return world


@pytest.fixture
def page(world: UiWorld) -> Page:
    page = Page("RelayGR")
    page.follow(world, "relay on")
    return page


@pytest.fixture
def server(page: Page) -> Iterator[UiServer]:
    with served(page) as server:
        yield server


def run(title: str, late: int) -> RunView:
    curve = [(10.0 + place, (place + 1) / 20) for place in range(20)]
    dots = [(number, 15.0 + number % 7, "hbm") for number in range(50)]
    return RunView(
        title, 50, 50 - late, late, 0, 15.0, 22.0, 24.0, 3, 1.5, {"hbm": 50 - late, "failed": late}, curve, dots
    )


def complaints_of(tab: Browser, server: UiServer) -> list[str]:
    """What the page of this server complained about. On a slow machine the end of the stream of an earlier one comes
    late.
    """
    return [each for each in tab.complaints if "/events" not in each or server.address in each]


def text_of(tab: Browser, place: str) -> str:
    return str(tab.ask(f"document.querySelector('{place}').innerText"))


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_window_and_says_what_it_draws(
    tab: Browser, server: UiServer, page: Page, width: int, scheme: str, tmp_path: Path
) -> None:
    page.add_run(run("relay on", 1), 50)
    page.add_run(run("relay off", 30), 50)
    page.judge([GateView("no request lost", "0", True, True)])
    tab.complaints.clear()
    tab.asked.clear()
    tab.show(server.address, width, scheme)
    tab.until(SHOWN)
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask(NAMED) and tab.ask("document.querySelectorAll('svg').length") >= 10
    dark = tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert dark == (scheme == "dark")
    assert complaints_of(tab, server) == []
    assert {address for address in tab.asked if not address.startswith(server.address)} == set()
    tab.picture(tmp_path / f"{width}-{scheme}.png")


@pytest.mark.parametrize("shares", [(0.99, 0.91), (0.97, 0.96), (0.6, 0.5), (0.97, 0.03), (0.04, 0.03), (0.0, 0.0)])
def test_the_labels_of_curves_and_deadline_cover_neither_a_curve_nor_each_other(
    tab: Browser, server: UiServer, page: Page, shares: tuple[float, float]
) -> None:
    for title, share in zip(("relay on", "relay off"), shares, strict=True):
        page.add_run(replace(run(title, 1), distribution=[(10.0, share / 2), (20.0, share)]), 50)
    tab.show(server.address, 1280)
    tab.until("document.querySelectorAll('#plot-distribution path').length == 2")
    ends = tab.ask("[...document.querySelectorAll('#plot-distribution path')].map(each => each.getBBox().y)")
    labels = tab.ask(
        "[...document.querySelectorAll('#plot-distribution text')]"
        ".filter(each => /whole|deadline/.test(each.textContent)).map(each => each.getBBox())"
        ".map(({y, height}) => [y + 1, y + height - 2])"
    )
    assert len(ends) == 2 and len(labels) == 3
    assert not any(top < end < bottom for end in ends for top, bottom in labels)
    assert all(upper[1] <= lower[0] for upper, lower in pairwise(sorted(labels)))


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    ("from_s", "late_ms", "usual_ms"),
    [(0, 53, 30), (0, 52, 51), (0, 7, 4), (28, 6, 3), (35, 49, 4), (0, 47, 12)],
)
def test_the_labels_of_the_latencies_cover_no_line_no_axis_and_not_each_other(
    tab: Browser, width: int, from_s: int, late_ms: int, usual_ms: int
) -> None:
    """`from_s`: how long the page was there before the first request."""
    world, page = UiWorld(), Page("RelayGR")
    world.wait(from_s)
    for number in range(118 - from_s):
        world.impression(f"g.2.{number}.t", late_ms if number % 7 == 0 else usual_ms)
        world.wait(0.85)
    page.follow(world, "relay on")
    with served(page) as server:
        tab.show(server.address, width)
        tab.until("document.querySelectorAll('#latency path').length == 2")
        words = tab.ask("[...document.querySelectorAll('#latency text')].map(each => each.textContent)")
        boxes = tab.ask(
            "[...document.querySelectorAll('#latency text')].map(each => each.getBBox())"
            ".map(({x, y, width, height}) => [x, y + 1, x + width, y + height - 1])"
        )
        points = tab.ask(
            "[...document.querySelectorAll('#latency path.p50, #latency path.p99')].flatMap(line => "
            "Array.from({length: 2000}, (_, at) => line.getPointAtLength(line.getTotalLength() * at / 2000)))"
            ".map(({x, y}) => [x, y])"
        )
    labels = [box for box, word in zip(boxes, words, strict=True) if word.startswith(("deadline", "P"))]
    assert [word for word in words if word.startswith("P")] == ["P99 over 10 s", "P50 over 10 s"]
    assert len(labels) == 3
    for left, top, right, bottom in labels:
        assert not any(left < x < right and top < y < bottom for x, y in points)
        covered = [box for box in boxes if box[0] < right and left < box[2] and box[1] < bottom and top < box[3]]
        assert len(covered) == 1, "the label itself"


def test_in_an_outage_the_page_says_what_is_wrong_where_it_said_live(
    tab: Browser, server: UiServer, page: Page, world: UiWorld
) -> None:
    tab.show(server.address, 390)
    tab.until("document.getElementById('link')?.innerText == 'live'")
    world.model.note_reader("The brokers of the cluster in the cellar are all silent: look at them")
    page.set_phase("later")
    tab.until("document.getElementById('link').innerText == 'The brokers of the cluster in the cellar ar…'")
    assert "look at them" in text_of(tab, "#problems")
    assert tab.ask("document.documentElement.scrollWidth") <= 390
    world.model.note_reader("Kafka is away: wait")
    page.set_phase("later still")
    tab.until("document.getElementById('link').innerText == 'Kafka is away'")
    world.model.note_reader(None)
    page.set_phase("at last")
    tab.until("document.getElementById('link').innerText == 'live'")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_first_line_says_what_is_wrong_and_which_section_helps(
    tab: Browser, server: UiServer, page: Page, world: UiWorld, width: int
) -> None:
    """It said only "live", in green, while 65 % of the requests were late."""
    for number in range(917):
        world.ask(f"g.7.{number}.t")
        world.answer(f"g.7.{number}.t", latency_ms=90)
    world.model.note_metrics("worker-01", parse_reading(POOL.replace("away 0", "away 1")), world.clock.monotonic_us())
    tab.show(server.address, width)
    tab.until("document.querySelectorAll('#problems li').length == 2")
    lines = tab.ask("[...document.querySelectorAll('#problems li')].map(each => each.innerText)")
    assert lines == [
        "65 % of the ranking requests are late. See docs/alerts.md#relayrankinglate.",
        "The pool hangs or does not answer for worker-01: prefixes are computed instead. "
        "See docs/alerts.md#relaypoolaway.",
    ]
    tops = [
        tab.ask(f"document.querySelector('{each}').getBoundingClientRect().top") for each in ("#problems", "header")
    ]
    assert tops[0] == 0 < tops[1]
    assert text_of(tab, "#link") == "65 % of the ranking requests are late"
    assert tab.ask("document.querySelector('#link').className") == "pill bad"
    assert "65 % of the ranking requests are late." in text_of(tab, "#told"), "a screen reader hears it"
    assert tab.ask("document.documentElement.scrollWidth") <= width
    told = text_of(tab, "#told")
    for number in range(917, 1500):
        world.ask(f"g.7.{number}.t")
        world.answer(f"g.7.{number}.t", latency_ms=90)
    page.set_phase("later")
    tab.until("document.querySelector('#problems').innerText.includes('75 %')")
    assert text_of(tab, "#told") == told, "not every second anew"


def test_the_page_follows_the_events(tab: Browser, server: UiServer, page: Page, world: UiWorld) -> None:
    tab.show(server.address, 1280)
    tab.until(SHOWN)
    assert "relay on" in text_of(tab, "#phase")
    assert text_of(tab, "#workers").count("pool: 9 written, 7 loaded") == text_of(tab, "#workers").count("pool") == 1
    assert "worker-01" in text_of(tab, "#workers") and "5 of 6 owned" in text_of(tab, "#partitions-note")
    assert "admitted" in text_of(tab, "#decisions")
    assert tab.ask("document.querySelectorAll('#lag rect').length") == 6
    assert tab.ask("document.querySelectorAll('#late details').length") == 4
    world.ask("g.9.1.t")
    world.answer("g.9.1.t", latency_ms=333)
    page.set_phase("relay off")
    tab.until("document.querySelector('#late').innerText.includes('333.0 ms')")
    assert "relay off" in text_of(tab, "#phase") and text_of(tab, "#link") == "live"


def test_the_page_connects_again_when_its_stream_ends_and_not_when_another_browser_takes_its_place(
    tab: Browser, server: UiServer, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_told(phase: str) -> None:
        page.set_phase(phase)
        tab.until(f"document.querySelector('#phase')?.innerText.includes('{phase}')")

    monkeypatch.setattr(server_module, "MAX_WATCHERS", 1)
    monkeypatch.setattr(server_module, "WATCH_S", 0.1)
    tab.show(server.address, 1280)
    for phase in ("first", "second", "third"):
        is_told(phase)
    monkeypatch.setattr(server_module, "WATCH_S", 600.0)
    for phase in ("fourth", "on a stream that stays"):
        is_told(phase)
    with urllib.request.urlopen(f"{server.address}events", timeout=20):
        tab.until("document.querySelector('#link').innerText.includes('another browser took this place')")


def test_the_page_is_used_with_the_keyboard(tab: Browser, server: UiServer, page: Page, world: UiWorld) -> None:
    tab.show(server.address, 1280)
    tab.until(SHOWN)
    tab.ask("document.querySelector('#late summary').focus()")
    press(tab, "Enter", 13)
    tab.until("document.querySelector('#late details').open")
    assert "ranking request sent after" in text_of(tab, "#late details")
    world.ask("g.9.1.t")
    world.answer("g.9.1.t", latency_ms=333)
    page.set_phase("later")
    tab.until("document.querySelectorAll('#late details').length == 5")
    assert tab.ask("document.activeElement.parentElement.open"), "a newer request takes neither the focus nor the row"
    press(tab, "p", 80)
    assert text_of(tab, "#link") == "paused" and tab.ask("document.getElementById('pause').ariaPressed") == "true"
    press(tab, "p", 80)
    assert text_of(tab, "#link") == "live"


def test_requests_are_found_in_the_page(tab: Browser, server: UiServer, world: UiWorld) -> None:
    tab.complaints.clear()
    tab.show(server.address, 390)
    tab.until(SHOWN)
    tab.ask("document.getElementById('wanted').focus()")
    tab.call("Input.insertText", text="g.1.3")
    press(tab, "p", 80)
    tab.ask("document.getElementById('wanted').value = 'g.1.3'")
    press(tab, "Enter", 13)
    tab.until("document.getElementById('late-title').innerText == 'Requests found'")
    tab.until("document.querySelectorAll('#late details').length == 11")
    assert "12.0 ms" in text_of(tab, "#late") and text_of(tab, "#link") != "paused", "a letter in the field is text"
    assert tab.ask("document.documentElement.scrollWidth") <= 390 and complaints_of(tab, server) == []


def test_nothing_moves_for_those_who_want_no_motion(tab: Browser, server: UiServer) -> None:
    moving = "getComputedStyle(document.querySelector('.wire:not([class=wire])') ?? document.body).animationName"
    for motion, name in (("no-preference", "run"), ("reduce", "none")):
        tab.show(server.address, 1280, motion=motion)
        tab.until(SHOWN)
        assert tab.ask(moving) == name


def test_the_page_says_that_its_process_has_ended(tab: Browser, page: Page) -> None:
    with served(page) as server:
        tab.show(server.address, 1280)
        tab.until(SHOWN)
    tab.until("document.getElementById('link').innerText.startsWith('ended')")


def test_a_browser_logs_in_with_the_token(tab: Browser, page: Page) -> None:
    with served(page, token=TOKEN) as server:
        tab.show(server.address, 390)
        tab.until("document.activeElement?.id == 'token'")
        assert tab.ask("document.documentElement.scrollWidth") <= 390
        tab.call("Input.insertText", text=TOKEN)
        press(tab, "Enter", 13)
        tab.until(SHOWN)
