"""The state after a recording, for the commands that report on one without a dashboard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvtop.text import safe_text

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState


def replayed(file: Path) -> tuple[DashboardState, int]:
    """(the state after the whole recording, 0), or after its readable part, 1, and a line on stderr."""
    from kvtop.record.recording import read_readable
    from kvtop.state.dashboard import DashboardState

    state = DashboardState()
    missing = read_readable(file, state.apply)
    if missing is not None:
        print(safe_text(f"kvtop: {missing}"), file=sys.stderr)
    return state, int(missing is not None)
