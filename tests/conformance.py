"""`make conformance`: every numbered behaviour with the tests that check it, and their results.

Joins tests/conformance.toml with the markers that pytest collects. Exits with 1 if a test of a behaviour fails, if a
number has neither a test nor a reason, or if a test is marked with a number that does not exist.
"""

from __future__ import annotations

import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TABLE = Path(__file__).with_suffix(".toml")
LAST = 113


@dataclass(slots=True)
class Held:
    """One test function and its cases."""

    name: str
    passed: int = 0
    skipped: int = 0
    failed: int = 0

    @property
    def result(self) -> str:
        """failed if any case failed, passed if every case that ran passed, skipped if none ran."""
        return "failed" if self.failed else "passed" if self.passed else "skipped"


@dataclass(slots=True, eq=False)
class Watch:
    """A pytest plugin that collects which test has which numbers, and the result of every case."""

    claims: dict[int, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    tests: dict[str, Held] = field(default_factory=dict)
    _function: dict[str, str] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        """Collects the numbers of every case, by test function."""
        for item in items:
            numbers = [n for mark in item.iter_markers("conformance") for n in mark.args]
            if numbers:
                name = item.nodeid.partition("[")[0]
                self._function[item.nodeid] = name
                self.tests.setdefault(name, Held(name))
                for n in numbers:
                    self.claims[n][name] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """An error in set-up or tear-down counts as a failure of the case."""
        name = self._function.get(report.nodeid)
        if name is None:
            return
        held = self.tests[name]
        if report.failed:
            held.failed += 1
        elif report.when == "call" and report.passed:
            held.passed += 1
        elif report.skipped:
            held.skipped += 1


def report(watch: Watch, behaviours: dict[int, str], why: dict[int, str]) -> tuple[list[str], bool]:
    """The lines of the table, and whether everything passed."""
    lines, counts = [], {"passed": 0, "failed": 0, "skipped": 0, "reason": 0, "nothing": 0}
    for n in range(1, LAST + 1):
        tests = [watch.tests[name] for name in watch.claims.get(n, ())]
        if tests:
            results = {t.result for t in tests}
            result = next(r for r in ("failed", "passed", "skipped") if r in results)
            reported = [f"{'' if t.result == result else t.result + ' '}{_short(t.name)}" for t in tests]
        else:
            result = "reason" if n in why else "nothing"
            reported = [why.get(n, "neither a test nor a reason")]
        counts[result] += 1
        shown = {"reason": "-", "nothing": "MISSING", "failed": "FAILED"}.get(result, result)
        lines.append(f"{n:>3}  {shown:<8} {behaviours.get(n, '(not in the table)')}")
        lines += [f"{'':14}{text}" for text in reported]
    strange = sorted(set(watch.claims) - set(range(1, LAST + 1)))
    lines += [f"no such behaviour: {n}, claimed by {', '.join(watch.claims[n])}" for n in strange]
    lines += [f"no words for behaviour {n}" for n in range(1, LAST + 1) if n not in behaviours]
    lines += [
        f"behaviour {n} has a test now, and still a reason" for n in sorted(watch.claims.keys() & why.keys())
    ]
    lines.append(
        f"{LAST} behaviours: {counts['passed']} hold, {counts['failed']} fail, {counts['skipped']} were skipped, "
        f"{counts['reason']} do not apply or wait, {counts['nothing']} have neither"
    )
    ok = not (counts["failed"] or counts["nothing"] or strange) and len(behaviours) == LAST
    return lines, ok


def _short(name: str) -> str:
    path, _, test = name.rpartition("::")
    return f"{Path(path).stem}: {test.removeprefix('test_').replace('_', ' ')}"


def load() -> tuple[dict[int, str], dict[int, str]]:
    """(behaviour, reason) by number."""
    table = tomllib.loads(TABLE.read_text("utf-8"))
    behaviour, why = ({int(n): text for n, text in table[key].items()} for key in ("behaviour", "why"))
    return behaviour, why


def main(arguments: Iterable[str] = ()) -> int:
    """Run the marked tests, print the table. `arguments` go to pytest."""
    watch = Watch()
    options = [
        "-m",
        "conformance",
        "-p",
        "no:cacheprovider",
        "--durations=0",
        "--durations-min=5",
        "--tb=short",
    ]
    code = pytest.main([*options, *arguments], plugins=[watch])
    lines, ok = report(watch, *load())
    print("\n".join(lines))
    return 0 if ok and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
