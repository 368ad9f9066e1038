"""`make shots`: every picture of the README and of demos/shots, from recordings made on the spot.

Owns which moment of which scene is shown. The scenes run on the real engine and the pictures come from
`kvtop shot`, so that no picture can show what the program does not do.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine import EngineConfig
from engine.events import BlocksEvicted, StepBatch, TokensSampled
from kvtop import demo
from kvtop.demo import Demo, Script, Stage
from kvtop.examples import load_examples
from kvtop.recording import read
from kvtop.state import DashboardState

HERE = Path(__file__).resolve().parent


def five_enters(stage: Stage) -> Script:
    """What a newcomer does: Enter, five times."""
    for number, example in enumerate(load_examples(), 1):
        ids = [
            stage.submit(p.text, max_tokens=min(40, p.max_tokens), system=p.system, system_name=p.system_name)
            for p in example.prompts
        ]
        yield stage.finished(*ids)
        stage.check(f"example {number}", len(ids), len([stage.request(i).usage for i in ids]))


def moment(recording: Path, reached: Callable[[DashboardState, StepBatch], bool]) -> float:
    """Seconds into the recording of the first batch after which `reached` holds."""
    state = DashboardState()
    for batch in read(recording):
        state.apply(batch)
        if reached(state, batch):
            return batch.t
    raise LookupError(f"the scene never came in {recording.name}")


def answering(request: int, tokens: int) -> Callable[[DashboardState, StepBatch], bool]:
    """The `request`-th request of a recording (from 1) has given this many tokens."""

    def reached(state: DashboardState, batch: StepBatch) -> bool:
        views = list(state.requests.values())
        sampled = any(isinstance(e, TokensSampled) for e in batch.events)
        return sampled and len(views) >= request and views[request - 1].num_output >= tokens

    return reached


def evicted(at_least: int) -> Callable[[DashboardState, StepBatch], bool]:
    """So many blocks have been evicted, some of them just now."""
    return lambda state, batch: (
        state.evictions >= at_least and any(isinstance(e, BlocksEvicted) for e in batch.events)
    )


SCENES: dict[str, Demo] = {
    "enters": Demo("enters", "the five examples", five_enters, {"num_blocks": 546}),
    "cache-hit": demo.load("cache-hit"),
    "eviction": demo.load("eviction"),
}

SHOTS: tuple[tuple[str, str, Callable[[DashboardState, StepBatch], bool], str, str, str], ...] = (
    ("hit", "enters", answering(2, 12), "120x36", "kvtop-dark", "chat"),
    ("hit-light", "enters", answering(2, 12), "120x36", "kvtop-light", "chat"),
    ("hit-80x24", "enters", answering(2, 12), "80x24", "kvtop-dark", "chat"),
    ("changed-word", "enters", answering(3, 12), "120x36", "kvtop-dark", "chat"),
    ("eight-pages", "enters", evicted(40), "120x40", "kvtop-dark", "ops"),
    ("evicted", "enters", answering(12, 12), "120x36", "kvtop-dark", "chat"),
    ("all", "enters", answering(2, 12), "200x60", "kvtop-dark", "all"),
    ("cache-hit", "cache-hit", answering(4, 4), "120x36", "kvtop-dark", "chat"),
    ("eviction", "eviction", evicted(1), "100x30", "kvtop-dark", "chat"),
)
"""File, scene, moment, size, theme, view."""


def main() -> int:
    """Record every scene, then draw every picture as SVG and as text."""
    with tempfile.TemporaryDirectory() as folder:
        for name, scene in SCENES.items():
            print(f"recording {name}", flush=True)
            if demo.run_headless(scene, EngineConfig(), record=Path(folder) / f"{name}.jsonl.gz"):
                return 1
        for name, scene_name, reached, size, theme, view in SHOTS:
            recording = Path(folder) / f"{scene_name}.jsonl.gz"
            at = moment(recording, reached)
            for kind in ("svg", "txt"):
                target = HERE / f"{name}.{kind}"
                command = [sys.executable, "-m", "kvtop", "shot", str(recording), "--at", f"{at:.6f}"]
                command += ["--size", size, "--theme", theme, "--view", view]
                command += ["--format", kind, "-o", str(target)]
                if subprocess.run(command, check=False).returncode:
                    return 1
            print(f"{name}.svg: {scene_name} at {at:.2f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
