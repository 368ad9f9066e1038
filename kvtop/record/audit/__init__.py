"""Audit: checks every event of a stream against the laws of the event contract.

Owns the list of laws and the order in which they get an event. PoolMirror checks the transitions of the pool. The laws
follow the contract (engine.events), not the engine's code, so an error in the engine breaks them. Most missing events
and most changed fields are found because other events depend on them, even if everything was renumbered.
docs/recording-and-proof.md lists the fields on which nothing depends.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

from engine import events as ev
from kvtop.record.audit.books import Books, Broken
from kvtop.record.audit.endings import EndingLaw
from kvtop.record.audit.evictions import EvictionLaw
from kvtop.record.audit.hits import HitLaw
from kvtop.record.audit.law import Law
from kvtop.record.audit.logprobs import LogprobLaw
from kvtop.record.audit.pool import PoolLaw
from kvtop.record.audit.requests import RequestLaw
from kvtop.record.audit.steps import StepLaw
from kvtop.record.audit.text import TextLaw
from kvtop.record.audit.times import TimeLaw
from kvtop.record.audit.waiting import WaitingLaw
from kvtop.state.pool_mirror import StateError

__all__ = ["Audit", "Broken"]

LAWS: tuple[type[Law], ...] = (
    PoolLaw,
    RequestLaw,
    StepLaw,
    WaitingLaw,
    EvictionLaw,
    HitLaw,
    LogprobLaw,
    TextLaw,
    EndingLaw,
    TimeLaw,
)
"""In the order in which they get an event. Laws that write the books come first."""
_WRONG = (Broken, StateError, ValueError, IndexError, KeyError, TypeError, struct.error)


class Audit:
    """Raises Broken for an impossible EngineStarted."""

    def __init__(self, started: ev.EngineStarted) -> None:
        self._books = Books(started)
        self._laws = [law(self._books) for law in LAWS]
        self._takers: dict[type, list[Callable[[Any], None]]] = {}
        for law in self._laws:
            for kind, method in law.takers():
                self._takers.setdefault(kind, []).append(method)

    def take(self, batch: ev.StepBatch) -> Iterator[tuple[str, str]]:
        """(name of the event, what is wrong) for the next batch. A snapshot that breaks a law replaces the books."""
        self._books.begin_batch(batch)
        for e in batch.events:
            whole = True
            for take in self._takers.get(type(e), ()):
                try:
                    take(e)
                except _WRONG as error:
                    whole = False
                    yield type(e).__name__, str(error)
            if type(e) is ev.PoolSnapshot and not whole:
                try:
                    self._books.resync(e)
                except (StateError, ValueError) as worse:
                    yield type(e).__name__, str(worse)
        for law in self._laws:
            try:
                law.end_batch(batch)
            except _WRONG as error:
                yield "", str(error)
        self._books.end_batch()

    def close(self) -> Iterator[str]:
        """What is missing or wrong in the stream as a whole."""
        for law in self._laws:
            try:
                law.close()
            except _WRONG as error:
                yield str(error)
