"""verify: is a recording complete and consistent?

Owns the checks of the frame (the numbers of batches and events, the clock, the first and last events) and the report.
Audit checks the meaning of events, PoolMirror the transitions of the pool. A violation is one line that names the
batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import events as ev
from kvtop.record.audit import Audit, Broken
from kvtop.record.recording import RecordingError, read

MOST_VIOLATIONS = 100
"""Violations that are kept. One missing event can cause many more."""
SHOWN_VIOLATIONS = 5
"""Violations that are printed."""


@dataclass(slots=True)
class Report:
    """ok: there is no violation. notes: what could not be checked in this recording."""

    ok: bool = True
    batches: int = 0
    snapshots: int = 0
    violations: list[str] = field(default_factory=list)
    """The first MOST_VIOLATIONS."""
    found: int = 0
    """Number of all violations."""
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people: the first violations, which usually cause the others; the notes; the sum."""
        shown = self.violations[:SHOWN_VIOLATIONS]
        more = self.found - len(shown)
        rest = (
            [f"… and {more:,} more, most of them because of the first (--json lists {MOST_VIOLATIONS})"]
            if more
            else []
        )
        verdict = "ok" if self.ok else f"{self.found:,} violation{'s' * (self.found != 1)}"
        sums = (
            f"{verdict}: {self.batches:,} batches, {self.snapshots:,} snapshot{'s' * (self.snapshots != 1)}"
        )
        return [*shown, *rest, *self.notes, sums]

    def as_dict(self) -> dict[str, Any]:
        """The object of `kvtop verify --json`."""
        out = {n: getattr(self, n) for n in ("ok", "batches", "snapshots", "found", "violations")}
        return out | ({"notes": self.notes} if self.notes else {})


def verify(path: str | Path) -> Report:
    """Check a file. Raises RecordingError if it is no recording. Damage after the first line is a violation."""
    return verify_batches(read(path))


def verify_batches(batches: Iterable[ev.StepBatch]) -> Report:
    """Check a stream."""
    frame = _Frame()
    try:
        for batch in batches:
            frame.take(batch)
    except RecordingError as error:
        if error.line < 2:
            raise
        frame.say(str(error))
    frame.close()
    return frame.report


class _Frame:
    def __init__(self) -> None:
        self.report = Report()
        self._t = 0.0
        self._events = 0
        self._audit: Audit | None = None
        self._starts = 0
        self._stopped = False
        self._unknown: dict[str, int] = {}

    def say(self, text: str, batch: int | None = None, event: str = "") -> None:
        self.report.ok = False
        where = "" if batch is None else f"batch {batch}: " + (f"{event}: " if event else "")
        self.report.found += 1
        if self.report.found <= MOST_VIOLATIONS:
            self.report.violations.append((where + text)[:300])

    def take(self, batch: ev.StepBatch) -> None:
        n = batch.seq
        if n != self.report.batches:
            self.say(f"seq is {n}, expected {self.report.batches}", n)
        if batch.first_event != self._events:
            self.say(f"first_event is {batch.first_event}, expected {self._events}", n)
        if not batch.t >= self._t:
            self.say(f"t went back from {self._t} to {batch.t}", n)
        if not batch.events:
            self.say("a batch without events", n)
        # Continue with the numbers of this batch, so that one gap is one violation.
        self.report.batches = n + 1
        self._events = batch.first_event + len(batch.events)
        self._t = batch.t
        for place, e in enumerate(batch.events):
            self._frame_event(n, e, is_last=place == len(batch.events) - 1)
        if self._audit is not None:
            for name, text in self._audit.take(batch):
                self.say(text, n, name)

    def _frame_event(self, n: int, e: Any, *, is_last: bool) -> None:
        kind = type(e)
        if self._stopped:
            self.say(f"{kind.__name__} after EngineStopped", n)
        if kind is ev.EngineStarted:
            self._starts += 1
            if self._audit is None:
                try:
                    self._audit = Audit(e)
                except Broken as error:
                    self.say(str(error), n, "EngineStarted")
                if e.hash_seed is None:
                    self.report.notes.append("redacted: hashes and tokens were not recomputed")
        elif kind is ev.EngineStopped:
            self._stopped = True
        elif kind is ev.PoolSnapshot:
            self.report.snapshots += 1
            if not is_last:
                self.say("a PoolSnapshot that is not the last event of its batch", n)
        elif kind is ev.UnknownEvent:
            self._unknown[e.type] = self._unknown.get(e.type, 0) + 1
        if not self._starts and kind not in (ev.ModelLoading, ev.EngineStopped, ev.EngineError):
            self.say(f"{kind.__name__} before EngineStarted", n)

    def close(self) -> None:
        if self._starts != 1:
            self.say(f"{self._starts} EngineStarted, expected exactly one")
        if not self._stopped:
            self.say("truncated: the recording does not end with EngineStopped")
        if self._audit is not None:
            for text in self._audit.close():
                self.say(text)
        for name, count in self._unknown.items():
            self.report.notes.append(f"{count} events of the unknown type {name[:40]} were skipped")
