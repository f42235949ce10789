"""The rules of `relaygr model check` in a team's own CI, as a plug-in of pytest: one test for each rule.

    pytest --relaygr-ranker model --relaygr-module ours

pytest loads this module wherever RelayGR is installed. So it imports nothing of RelayGR, nor torch, without the option.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from relaygr.worker.model_check import Finding, Rule


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("relaygr", "rankers for RelayGR")
    group.addoption("--relaygr-ranker", metavar="DIR", help="A ranker's folder: adds a test for each rule.")
    group.addoption(
        "--relaygr-module",
        metavar="NAME",
        action="append",
        default=[],
        help="Module, or entry point, of a ranker whose code may run; may be repeated.",
    )
    group.addoption(
        "--relaygr-may-break",
        metavar="RULE",
        action="append",
        default=[],
        help="A rule that the ranker may break, such as query_time: its test may fail; may be repeated.",
    )
    group.addoption(
        "--relaygr-minutes", metavar="MINUTES", type=float, default=3.0, help="Time for all rules; 3 by default."
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the tests before others are left out by name or mark."""
    folder = config.getoption("--relaygr-ranker")
    if folder is None:
        return
    try:
        from relaygr.worker.model_check import Rule
    except ModuleNotFoundError as error:
        raise pytest.UsageError(f"{error.name} is not installed: pip install 'relaygr[worker]'.") from error
    allowed, known = config.getoption("--relaygr-may-break"), [rule.name.lower() for rule in Rule]
    unknown = sorted(set(allowed) - set(known))
    if unknown:
        raise pytest.UsageError(f"--relaygr-may-break {unknown[0]} is no rule: name one of {', '.join(known)}.")
    check = _Check(folder, config.getoption("--relaygr-module"), config.getoption("--relaygr-minutes"))
    items.extend(
        RuleItem.from_parent(
            session,
            name=f"relaygr[{name}]",
            nodeid=f"{folder}::relaygr[{name}]",
            check=check,
            rule=rule,
            may_break=name in allowed or rule is Rule.CANDIDATES,
        )
        for name, rule in zip(known, Rule, strict=True)
    )


class _Check:
    """The comparisons, made once, by the first test that runs."""

    def __init__(self, folder: str, modules: list[str], minutes: float) -> None:
        self.folder = folder
        self._modules = modules
        self._minutes = minutes

    @cached_property
    def found(self) -> dict[Rule, Finding] | Exception:
        """The findings, or why there are none."""
        from relaygr.worker.model.engine import engine_to_check
        from relaygr.worker.model_check import ModelCheck
        from relaygr.worker.score_error import made_sample

        try:
            engine = engine_to_check(Path(self.folder), None, self._modules)
            findings = ModelCheck(engine, *made_sample(engine), 60 * self._minutes).run()
            return {each.rule: each for each in findings}
        # Whatever a team's code raises, it is raised once, and not by each test again.
        except Exception as error:
            return error


class RuleItem(pytest.Item):
    """The test of one rule. One whose break costs nothing here, or is expected, may fail."""

    def __init__(self, *, check: _Check, rule: Rule, may_break: bool, **node: Any) -> None:
        super().__init__(**node)
        self._check = check
        self._rule = rule
        self._may_break = may_break

    def runtest(self) -> None:
        found = self._check.found
        if not isinstance(found, dict):
            pytest.fail(str(found) or repr(found), pytrace=False)
        if self._rule not in found:
            pytest.skip("not tried: the model does not claim it")
        finding = found[self._rule]
        if finding.holds:
            return
        broken = f"It is not so that {self._rule.text}: {finding.case}. What it costs: {self._rule.cost}."
        if self._may_break:
            pytest.xfail(broken)
        pytest.fail(broken, pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return Path(self._check.folder), None, f"{self._check.folder}: {self._rule.text}"
