"""From the command line to a dashboard on the terminal, and back to an exit code.

Owns what surrounds the application: captured output, the interpreter's switch interval, and the one line
on stderr after the terminal has been given back.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from kvtop.app.app import KvtopApp
from kvtop.app.capture import Capture
from kvtop.paint import themes
from kvtop.play.session import Session
from kvtop.settings import log_file
from kvtop.sources import LiveSource, Source
from kvtop.text import cut, safe_text

if TYPE_CHECKING:
    from engine import Engine
    from kvtop.options import Options
    from kvtop.record.recorder import Recorder

SWITCH_INTERVAL = 5e-4
"""Seconds for which a frame may keep the interpreter while the engine's thread waits for it."""


def run_live(engine: Engine, options: Options, recorder: Recorder | None = None) -> int:
    """The dashboard over `engine`, which is started here after the first frame and stopped at the end.

    Returns the exit code: 0, 1 after a crash or a failed demo, 2 when the engine could not start (one
    line on stderr), 130 after ctrl+c. Raises SetupError for a theme that cannot be used.
    """
    try:
        session = Session(LiveSource(engine), options, engine)
        session.recorder = recorder
        return _run(session)
    finally:
        # A model that is still being read cannot be interrupted, and its thread dies with the process.
        engine.stop(10.0 if engine.is_ready else 0.2)


def run_replay(source: Source, options: Options) -> int:
    """The dashboard over a recording. Exit codes as `run_live`."""
    return _run(Session(source, options))


def _run(session: Session) -> int:
    themes.find(session.options.theme or themes.DEFAULT)  # an error is said before the terminal is taken
    for name in ("COLUMNS", "LINES"):  # exported by some shells, they would hide the terminal's own size
        os.environ.pop(name, None)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    capture = Capture(log_file())
    try:
        with capture as captured:
            app = KvtopApp(session, captured=captured)
            app.run()
    finally:
        sys.setswitchinterval(interval)
    crash = app.crash
    if app.failure is not None:
        print(cut(f"kvtop: {safe_text(app.failure)}", 200), file=sys.stderr)
        return 2
    if crash is not None:
        told = f"kvtop crashed: {type(crash).__name__}: {safe_text(str(crash))}; see {capture.path}"
        print(cut(told, 200), file=sys.stderr)
        return 1
    return app.return_code or 0
