"""Program that the terminal tests run: the dashboard over a toy engine, as the command line would start it.

Usage: on_terminal.py MODE [RECORDING], MODE being one of plain, noisy (prints from everywhere), broken (the start
fails), load (requests without end, recorded), and crash or crash-WHERE: the application's clock, the reader of
keys, what is written, a worker, or Textual itself fails.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine import Engine, EngineConfig, SamplingParams, SetupError
from kvtop.app import launch as run
from kvtop.app.app import KvtopApp
from kvtop.options import Options
from kvtop.record.recorder import Recorder
from kvtop.terminal.input_bytes import InputDecoder
from kvtop.terminal.textual_door import FrameCompositor
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
    """Fails at `where` once the engine runs."""

    where = ""

    def _started(self) -> None:
        match self.where:
            case "input":
                InputDecoder.decode = fail  # type: ignore[method-assign]
            case "output":
                FrameCompositor.strips_for = fail  # type: ignore[method-assign]
            case "worker":
                self.run_worker(self.fail_later())
            case "panic":
                self.panic("no more")
            case _:
                fail()

    async def fail_later(self) -> None:
        """A worker."""
        fail()


def fail(*_: Any) -> Any:
    """A bug."""
    raise RuntimeError("a bug")


def main() -> int:
    """Exit code of the dashboard."""
    mode, _, where = sys.argv[1].partition("-")
    engine = Engine(EngineConfig(), build=make(mode), device_interval=0)
    if mode == "crash":
        run.KvtopApp = Crashing  # type: ignore[misc]
        Crashing.where = where
    if mode != "load":
        return run.run_live(engine, Options())
    recorder = Recorder(sys.argv[2], request_snapshot=engine.request_snapshot)
    engine.subscribe(recorder)
    for number in range(400):
        engine.submit(
            f"question {number} about a lighthouse", SamplingParams(max_tokens=200, ignore_eos=True)
        )
    try:
        return run.run_live(engine, Options(view="all"))
    finally:
        engine.stop()
        recorder.close()


if __name__ == "__main__":
    sys.exit(main())
