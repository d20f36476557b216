"""Tells at the end of a run what was skipped and why.  In the tiers of CI, a lack of an installation is a failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.support.skips import ACCELERATOR, ANOTHER_USER, KERNEL
from tests.support.tiers import is_whole_tier

STRICT = ("ci", "full")
ALLOWED = (ACCELERATOR, ANOTHER_USER, KERNEL)


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped, in its own words."""
    _, _, words = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
    return words.removeprefix("Skipped: ")


def not_allowed(reasons: Iterable[str]) -> list[str]:
    """Those of ``reasons`` that an installation would take away."""
    return sorted(reason for reason in reasons if not reason.startswith(ALLOWED))


class SkipReport:
    """Counts skips where all reports arrive, and fails a tier of CI for those that are not allowed."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.reasons[reason_of(report)] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.reasons[reason_of(report)] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.strict and not_allowed(self.reasons) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        wrong = not_allowed(self.reasons) if self.strict else []
        if self.reasons:
            terminalreporter.write_sep("=", "skipped")
        for reason, count in self.reasons.most_common():
            terminalreporter.write_line(f"{count:6} {reason}", red=reason in wrong)
        if wrong:
            count = "1 reason is" if len(wrong) == 1 else f"{len(wrong)} reasons are"
            terminalreporter.write_sep("=", f"{count} not allowed in the tiers of CI", red=True, bold=True)
            terminalreporter.write_line(
                "A skipped test proves nothing: `make test-ci` installs what tests need.  Reasons that no installation "
                f"takes away begin with one of {', '.join(map(repr, ALLOWED))}."
            )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipReport(config.getoption("tier") in STRICT and is_whole_tier(config)))
