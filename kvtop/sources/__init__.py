"""Sources: where batches come from. A dashboard needs nothing else.

Owns the protocol; live.py is an engine in this process, recording.py a file. Whatever a source is, it hands
out batches in order, each once, and moves the attached state only where it must jump.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.events import StepBatch
from kvtop.sources.live import LiveSource
from kvtop.sources.recording import RecordingSource

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

__all__ = ["LiveSource", "RecordingSource", "Source"]


class Source(Protocol):
    """What a dashboard needs; a recording can do more."""

    def attach(self, state: DashboardState) -> None:
        """`state` is what the drained batches are applied to, all of them, in order."""
        ...

    def drain(self) -> list[StepBatch]:
        """What is due since the last call. Never waits."""
        ...
