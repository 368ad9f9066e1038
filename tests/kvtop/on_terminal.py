"""Program that the terminal tests run: the dashboard over a toy engine, as the command line would start it.

Usage: on_terminal.py MODE, one of plain, noisy (prints from everywhere), broken (the start fails), crash.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine import Engine, EngineConfig, SetupError
from kvtop.app import launch as run
from kvtop.app.app import KvtopApp
from kvtop.options import Options
from tests.demos.toy import build


def make(mode: str) -> Any:
    """A model builder that does what the mode says."""

    def built(config: EngineConfig, progress: Any) -> Any:
        progress(1, 2, "reading weights")
        if mode == "broken":
            raise SetupError("no such model; try --model Qwen/Qwen3-0.6B")
        if mode == "noisy":
            os.write(1, b"C writes to stdout\n")
            os.write(2, b"C writes to stderr\n")
            print("python prints")
            logging.getLogger("lib").warning("a library warns")
        return build(config, progress)

    return built


class Crashing(KvtopApp):
    """Raises in its clock once the engine runs."""

    def _started(self) -> None:
        raise RuntimeError("a bug")


def main() -> int:
    """Exit code of the dashboard."""
    mode = sys.argv[1]
    if mode == "crash":
        run.KvtopApp = Crashing  # type: ignore[misc]
    return run.run_live(Engine(EngineConfig(), build=make(mode), device_interval=0), Options())


if __name__ == "__main__":
    sys.exit(main())
