"""`make shots`: every picture of the README and of demos/shots, from recordings made on the spot.

Owns which moment of which scene is shown. The scenes run on the real engine and the pictures come from
what `kvtop shot` runs, so that no picture can show what the program does not do.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine import EngineConfig
from engine.events import BlocksEvicted, StepBatch, TokensSampled
from kvtop.options import View
from kvtop.picture.shot import parse_size, shot
from kvtop.play import demo
from kvtop.play.demo import Demo, Script, Stage
from kvtop.play.examples import load_examples
from kvtop.record.recording import read
from kvtop.state.dashboard import DashboardState

HERE = Path(__file__).resolve().parent
Moment = Callable[[DashboardState, StepBatch], bool]


def five_enters(stage: Stage) -> Script:
    """What a newcomer does: Enter, five times."""
    for number, example in enumerate(load_examples(), 1):
        ids = [
            stage.submit(
                p.text,
                system=p.system,
                system_name=p.system_name,
                max_tokens=p.max_tokens,
                ignore_eos=False,
            )
            for p in example.prompts
        ]
        yield stage.finished(*ids)
        stage.check(f"example {number}", len(ids), len([stage.request(i).usage for i in ids]))


def moment(recording: Path, reached: Moment) -> float:
    """Seconds into the recording of the first batch after which `reached` holds."""
    state = DashboardState()
    for batch in read(recording):
        state.apply(batch)
        if reached(state, batch):
            return batch.t
    raise LookupError(f"the scene never came in {recording.name}")


def answering(request: int, tokens: int) -> Moment:
    """The `request`-th request of a recording (from 1) has given this many tokens."""

    def reached(state: DashboardState, batch: StepBatch) -> bool:
        views = list(state.requests.values())
        sampled = any(isinstance(e, TokensSampled) for e in batch.events)
        return sampled and len(views) >= request and views[request - 1].num_output >= tokens

    return reached


def evicted(at_least: int) -> Moment:
    """So many blocks have been evicted, some of them just now."""
    return lambda state, batch: (
        state.pool.evictions >= at_least and any(isinstance(e, BlocksEvicted) for e in batch.events)
    )


SCENES: dict[str, Demo] = {
    "enters": Demo("enters", "the five examples", five_enters, {"num_blocks": 546}),
    "cache-hit": demo.load("cache-hit"),
    "eviction": demo.load("eviction"),
}

SHOTS: tuple[tuple[str, str, Moment, str, str, View], ...] = (
    ("hit", "enters", answering(2, 14), "100x30", "kvtop-dark", "chat"),
    ("hit-light", "enters", answering(2, 14), "100x30", "kvtop-light", "chat"),
    ("hit-80x24", "enters", answering(2, 14), "80x24", "kvtop-dark", "chat"),
    ("changed-word", "enters", answering(3, 12), "100x30", "kvtop-dark", "chat"),
    ("eight-pages", "enters", evicted(40), "120x40", "kvtop-dark", "ops"),
    ("memory", "enters", answering(6, 4), "140x44", "kvtop-dark", "ops"),
    ("evicted", "enters", answering(12, 12), "100x30", "kvtop-dark", "chat"),
    ("all", "enters", answering(2, 14), "200x60", "kvtop-dark", "all"),
    ("cache-hit", "cache-hit", answering(4, 4), "100x30", "kvtop-dark", "chat"),
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
                out = HERE / f"{name}.{kind}"
                shot(recording, at=at, size=parse_size(size), theme=theme, view=view, motion=False, out=out)
            print(f"{name}.svg: {scene_name} at {at:.2f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
