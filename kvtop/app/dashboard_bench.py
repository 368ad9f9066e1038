"""What the dashboard costs: CPU a frame, part of a core, and the engine's speed beside it.

Owns `kvtop bench --with-dashboard`. The same work (decodes at 1 and at 8 sequences) runs in children of
this process, in turns with a dashboard on a real pseudo-terminal (so that escape codes are made and
written, which a headless run would not do) and without one. Rates are tokens over time between the first
and the last of them, so that a pause of one long frame counts as well as many short ones.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine import Engine, EngineConfig, SamplingParams, SetupError
from engine.events import StepBatch, TokensSampled

USUAL, LARGE = (100, 30), (200, 60)
"""Terminals, columns and rows: the default view's, and one that starts with every panel."""
ROUNDS = 3
"""Turns of each kind; the medians are reported."""
WORK = ((1, 400), (8, 300))
"""(sequences, tokens each)."""
PATIENCE = 300.0
"""Seconds that one child may take."""


def measure(config: EngineConfig) -> dict[str, float]:
    """`{ui_ms_frame_p50, ui_ms_frame_p99, ui_core_share, fps, engine_ratio}` and what they come from.

    ui_ms_frame: CPU of the UI's thread from one frame to the next at 200x60, in ms. ui_core_share: its part
    of a core there while the engine runs. engine_ratio: tokens/s with the dashboard over tokens/s without,
    the smaller of the two works, at 100x30; engine_ratio_200x60 beside it. Raises SetupError if the engine
    does not start.
    """
    bare, usual, large = [], [], []
    for _ in range(ROUNDS):
        bare.append(_child(config))
        usual.append(_child(config, USUAL))
        large.append(_child(config, LARGE))

    def middle(rows: list[dict[str, Any]], name: str) -> float:
        return statistics.median(r[name] for r in rows)

    def ratio(rows: list[dict[str, Any]]) -> float:
        names = [f"tok_s_{sequences}" for sequences, _ in WORK]
        return min(middle(rows, n) / middle(bare, n) for n in names)

    figures = {n: middle(large, n) for n in ("ui_ms_frame_p50", "ui_ms_frame_p99", "ui_core_share", "fps")}
    figures["engine_ratio"] = ratio(usual)
    figures["engine_ratio_200x60"] = ratio(large)
    for sequences, _ in WORK:
        name = f"tok_s_{sequences}"
        figures[f"{name}_headless"] = middle(bare, name)
        figures[f"{name}_100x30"], figures[f"{name}_200x60"] = middle(usual, name), middle(large, name)
    return {n: round(v, 3) for n, v in figures.items()}


def main(config: EngineConfig, *, as_json: bool = False) -> int:
    """Measures and prints."""
    figures = measure(config)
    if as_json:
        print(json.dumps(figures))
        return 0
    print(f"with the dashboard and without in turns, medians of {ROUNDS}")
    for name, value in figures.items():
        print(f"{name:<24}{value:>10,.3f}")
    return 0


# -------------------------------------------------------------------------------------- the children


def _child(config: EngineConfig, terminal: tuple[int, int] | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "kvtop.app.dashboard_bench", str(out), json.dumps(asdict(config))]
        if terminal is not None:
            _under_terminal([*command, "dashboard"], *terminal)
        else:
            subprocess.run(command, timeout=PATIENCE, check=False, stdin=subprocess.DEVNULL)
        if not out.exists():
            raise SetupError("the bench's child ended without figures: does `kvtop` start here?")
        figures: dict[str, Any] = json.loads(out.read_text())
    if "error" in figures:
        raise SetupError(figures["error"])
    return figures


def _under_terminal(command: list[str], columns: int, rows: int) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        env.pop(name, None)
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
    ) as child:
        os.close(theirs)
        end = time.monotonic() + PATIENCE
        try:
            while time.monotonic() < end:
                ready, _, _ = select.select([ours], [], [], 0.5)
                if ready:
                    try:
                        if not os.read(ours, 1 << 16):
                            break
                    except OSError:  # the child closed its end
                        break
                elif child.poll() is not None:
                    break
        finally:
            os.close(ours)
            if child.poll() is None and time.monotonic() >= end:
                child.kill()


class Work:
    """Gives an engine its work, from a thread of its own, and notes the rates."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rates: dict[str, float] = {}
        self.busy: list[tuple[float, float]] = []
        """(start, end) of the measured stretches, on the process's monotonic clock."""
        self._tokens = 0
        self._wanted = 0
        self._sequences = 0
        self._first = self._last = 0.0
        self._from = 0
        self._done = threading.Event()
        engine.subscribe(self._count)

    def _count(self, batch: StepBatch) -> None:
        n = sum(sum(e.counts) for e in batch.events if isinstance(e, TokensSampled))
        if not n or not self._wanted:
            return
        self._tokens += n
        if self._tokens <= 2 * self._sequences:  # all of them decode from here on
            self._first, self._from = time.monotonic(), self._tokens
        if self._tokens == self._wanted:
            self._last, self._wanted = time.monotonic(), 0
            self._done.set()

    def run(self) -> None:
        """All of WORK, after a warm-up that is not counted."""
        self.engine.wait_ready()
        for number, (sequences, tokens) in enumerate(((1, 16), *WORK)):
            self._tokens, self._sequences = 0, sequences
            self._done.clear()
            params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
            self._wanted = sequences * tokens
            for i in range(sequences):
                prompt = f"Tell a long story about a lighthouse, number {number}.{i}."
                self.engine.submit(prompt, params)
            if not self._done.wait(PATIENCE):
                raise TimeoutError("the bench's work did not end")
            if number:
                rate = (sequences * tokens - self._from) / (self._last - self._first)
                self.rates[f"tok_s_{sequences}"] = rate
                self.busy.append((self._first, self._last))


def _run_bare(engine: Engine) -> dict[str, Any]:
    work = Work(engine)
    sys.setswitchinterval(5e-4)
    engine.start()
    work.run()
    engine.stop()
    return dict(work.rates)


def _run_dashboard(engine: Engine) -> dict[str, Any]:
    from kvtop.app.app import KvtopApp
    from kvtop.app.capture import Capture
    from kvtop.options import Options
    from kvtop.play.session import Session
    from kvtop.settings import log_file
    from kvtop.sources import LiveSource

    frames: list[tuple[float, float, int]] = []

    class Measured(KvtopApp):
        def tick(self) -> None:
            # What Textual draws after a frame falls to the stretch up to the next tick.
            frames.append((time.monotonic(), time.thread_time(), self.frames))
            super().tick()

    work = Work(engine)
    failure: list[BaseException] = []
    sys.setswitchinterval(5e-4)
    with Capture(log_file()) as captured:
        app = Measured(Session(LiveSource(engine), Options(), engine), captured=captured)

        def drive() -> None:
            try:
                work.run()
            except BaseException as error:
                failure.append(error)
            app.call_from_thread(app.exit, 0)

        threading.Thread(target=drive, daemon=True).start()
        app.run()
    engine.stop()
    if failure:
        raise failure[0]
    return {**work.rates, **_frame_figures(frames, work.busy)}


def _frame_figures(
    frames: list[tuple[float, float, int]], busy: list[tuple[float, float]]
) -> dict[str, float]:
    """frames: (wall, CPU of the UI's thread, frames painted) at each tick; busy: the measured stretches."""
    costs: list[float] = []
    cpu = wall = painted = 0.0
    for start, end in busy:
        inside = [f for f in frames if start <= f[0] <= end]
        pairs = list(pairwise(inside))
        costs += [1e3 * (b[1] - a[1]) / (b[2] - a[2]) for a, b in pairs if b[2] > a[2]]
        if pairs:
            cpu += inside[-1][1] - inside[0][1]
            wall += inside[-1][0] - inside[0][0]
            painted += inside[-1][2] - inside[0][2]
    costs.sort()
    return {
        "ui_ms_frame_p50": statistics.median(costs),
        "ui_ms_frame_p99": costs[min(len(costs) - 1, int(0.99 * len(costs)))],
        "ui_core_share": cpu / wall,
        "fps": painted / wall,
    }


def _main(arguments: list[str]) -> None:
    out, config = Path(arguments[0]), EngineConfig(**json.loads(arguments[1]))
    engine = Engine(config)
    try:
        figures = (_run_dashboard if "dashboard" in arguments else _run_bare)(engine)
    except SetupError as error:
        figures = {"error": str(error)}
    out.write_text(json.dumps(figures))


if __name__ == "__main__":
    _main(sys.argv[1:])
