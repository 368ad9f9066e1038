"""What a dashboard asks of the place where its batches come from.

Owns two protocols: every source hands out batches, and one that can be driven has a Transport besides. A source says
what it can do by its types, so nobody has to look for an attribute. Whatever a source is, it hands out batches in
order, each once, and changes the attached state only where it jumps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.events import StepBatch
    from kvtop.state.dashboard import DashboardState


@dataclass(frozen=True, slots=True)
class Loading:
    """How far a source is with work that takes several calls of `drain`."""

    badge: str
    """ "LOADING 35 %"."""
    says: str
    """The same as a sentence, for a screen that has nothing else to show yet."""


class Transport(Protocol):
    """The controls of a source that can be driven. None of them waits for a long way to be gone."""

    @property
    def paused(self) -> bool:
        """Time does not go on by itself."""
        ...

    @property
    def t(self) -> float:
        """The moment that is played, in seconds on the batches' clock."""
        ...

    def toggle(self) -> None:
        """Pause or play."""
        ...

    def seek(self, t: float) -> None:
        """Go to the moment `t`; outside of what there is, to its start or end."""
        ...

    def step(self, batches: int) -> None:
        """Go that many batches on, or back, and pause."""
        ...

    def change_speed(self, direction: int) -> None:
        """Play at the next faster (1) or slower (-1) speed."""
        ...


class Source(Protocol):
    """Where batches come from."""

    @property
    def transport(self) -> Transport | None:
        """The controls; None if this source cannot be driven."""
        ...

    @property
    def place(self) -> str:
        """Where in a recording we are, for the badge; empty for a live engine."""
        ...

    @property
    def loading(self) -> Loading | None:
        """None unless the next calls of `drain` go on with a long way; the attached state is on its way then."""
        ...

    @property
    def problem(self) -> str | None:
        """Why there are fewer batches than there should be, in one line."""
        ...

    def attach(self, state: DashboardState) -> None:
        """`state` is what the drained batches are applied to, all of them, in order."""
        ...

    def drain(self) -> list[StepBatch]:
        """What is due since the last call. Never waits."""
        ...
