"""What the screen's tests share: a source that is fed by hand, an app over it, and its rows as text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from engine.events import StepBatch
from kvtop.app.app import KvtopApp
from kvtop.options import Options
from kvtop.play.session import Session
from kvtop.sources import Loading, Transport
from kvtop.state.dashboard import DashboardState
from kvtop.terminal.textual_door import shown_strips

SIZES = ((1, 1), (20, 5), (50, 15), (80, 24), (100, 30), (120, 40), (200, 60))


class Feed:
    """A source: what is put into `queue` is drained at the next tick."""

    transport: Transport | None = None
    place = ""
    loading: Loading | None = None
    problem: str | None = None

    def __init__(self, batches: Sequence[StepBatch] = ()) -> None:
        self.queue = list(batches)

    def attach(self, state: DashboardState) -> None:
        """Nothing jumps here."""

    def drain(self) -> list[StepBatch]:
        """All of it."""
        out, self.queue = self.queue, []
        return out


class Show:
    """A running app; its clock for motion is `wall`."""

    def __init__(self, options: Options, batches: Sequence[StepBatch]) -> None:
        self.wall = 0.0
        self.feed = Feed(batches)
        self.app = KvtopApp(Session(self.feed, options), wall=lambda: self.wall)

    def apply(self, batches: Sequence[StepBatch], after: float = 100.0) -> None:
        """Apply at once, then look again `after` seconds later: by default when no mark moves any more."""
        self.feed.queue += batches
        self.app.tick()
        self.wall += after
        self.app.tick()
        self.app.paint()

    async def settle(self) -> None:
        """Let layout and paint come to rest."""
        for _ in range(2):
            await self.pilot.pause()
            self.app.paint()
        await self.pilot.pause()

    @property
    def rows(self) -> list[str]:
        """The screen as a terminal would show it."""
        return [strip.text for strip in shown_strips(self.app)]

    @property
    def text(self) -> str:
        """The same in one piece."""
        return "\n".join(self.rows)


@asynccontextmanager
async def show(
    size: tuple[int, int] = (100, 30),
    batches: Sequence[StepBatch] = (),
    *,
    notifications: bool = False,
    **options: object,
) -> AsyncIterator[Show]:
    """An app of this size over these batches, painted."""
    shown = Show(Options(**options), batches)  # type: ignore[arg-type]
    async with shown.app.run_test(size=size, notifications=notifications) as pilot:
        shown.pilot = pilot
        await shown.settle()
        shown.wall += 10
        shown.app.tick()
        await shown.settle()
        yield shown
