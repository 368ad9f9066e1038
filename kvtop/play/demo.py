"""Demos: scripts that drive a real engine, in the dashboard, headless, or as a test.

Owns where demos are (`demos/` next to the package, else inside it), how one is loaded, and Performance, which plays a
script. A script is a generator over a Stage. It submits requests, shows captions, checks results, and yields where it
waits. Invariant: every value that a check has `got` comes from DashboardState, so from events alone; a script never
reads the engine. There are no threads: the caller applies batches to the state and then calls `tick`.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from engine import Engine, EngineConfig, SamplingParams, SetupError
from engine.events import StepBatch, to_runs
from kvtop import signals
from kvtop.settings import data_folder

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState
    from kvtop.state.request_view import RequestView

# ------------------------------------------------------------------------------------ what a demo is


@dataclass(frozen=True, slots=True)
class Hold:
    """Yielded after a caption. The dashboard waits for a key; headless continues."""


@dataclass(frozen=True, slots=True)
class Until:
    """Yielded to wait. The script continues once `done()` is true."""

    done: Callable[[], bool]


Script = Iterator[Hold | Until]


@dataclass(frozen=True, slots=True)
class Demo:
    """The `DEMO` of a demo file. settings: EngineConfig fields that the scene needs, such as num_blocks."""

    name: str
    title: str
    script: Callable[[Stage], Script]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, base: EngineConfig) -> EngineConfig:
        """`base` (model, device, dtype, ...) with the settings of the scene. Raises SetupError."""
        return replace(base, **self.settings)


class Stage:
    """What a script works with: it sends requests, shows captions, and checks what the events say."""

    def __init__(self, engine: Engine, state: DashboardState) -> None:
        self.engine = engine
        self.state = state
        self.captions: list[str] = []
        self.checks: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {}
        self.failure: str | None = None
        self.warming = False
        """The warm-up is running, which is not part of the scene."""

    def warm_up(self, *prompts: str, **given: Any) -> tuple[int, ...]:
        """Send prompts that only warm up the engine. The dashboard does not show them. given: as in `submit`."""
        self.warming = True
        return tuple(self.submit(prompt, **given) for prompt in prompts)

    def begin(self) -> Until:
        """`yield stage.begin()` after the warm-up: the cache is emptied, and all figures and request numbers start
        again."""
        self.engine.reset_prefix_cache()
        return Until(self._begins)

    def caption(self, text: str) -> Hold:
        """`yield stage.caption("…")`: show `text`, then wait for the reader."""
        self.captions.append(" ".join(text.split()))
        return Hold()

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        system: str | None = None,
        system_name: str = "",
        conversation: int | None = None,
        salt: str | None = None,
        spans: Sequence[tuple[int, int, str, str]] = (),
        ignore_eos: bool = True,
    ) -> int:
        """Send a greedy request and return its number in the scene at once.

        With `ignore_eos` it generates exactly `max_tokens` tokens, so a scene has the same sizes with every model. The
        other parameters are those of Engine.submit.
        """
        rid = self.engine.submit(
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos),
            system=system,
            system_name=system_name,
            conversation=conversation,
            salt=salt,
            spans=spans,
        )
        return rid - self.state.requests.skipped

    def finished(self, *request_ids: int) -> Until:
        """`yield stage.finished(a, b)`: wait until all of these requests are finished."""
        return Until(lambda: all(self._is_done(r) for r in request_ids))

    def request(self, request_id: int) -> RequestView:
        """The state of a request so far. Raises KeyError before its RequestQueued."""
        return self.state.requests[request_id]

    def check(self, name: str, want: Any, got: Any, ok: bool | None = None) -> None:
        """Add a line to the verdict. `ok` defaults to want == got."""
        self.checks.append({"name": name, "want": want, "got": got, "ok": want == got if ok is None else ok})

    def figure(self, **values: Any) -> None:
        """Add fields to the verdict, such as ttft_cold_ms."""
        self.figures.update(values)

    def _begins(self) -> bool:
        if self.state.pool.num_hashes:
            return False
        self.state.begin_anew()
        self.warming = False
        return True

    def _is_done(self, request_id: int) -> bool:
        view = self.state.requests.get(request_id)
        if view is None or view.phase != "finished":
            return False
        if view.finish_reason in ("refused", "error", "abort"):
            self.failure = f"request {request_id}: {view.finish_reason}: {view.error or 'no reason given'}"
        return True


def page(name: str, paragraphs: int | None = None) -> str:
    """Text of a shipped page such as "pages/tides.txt", or its first paragraphs."""
    text = (folder() / name).read_text(encoding="utf-8").strip()
    return "\n\n".join(text.split("\n\n")[:paragraphs])


def runs(ids: Sequence[int]) -> str:
    """[7, 8, 9, 4, 3] -> "7–9 4–3": a list of blocks for people."""
    pairs = to_runs(ids)
    parts = zip(pairs[::2], pairs[1::2], strict=True)
    return " ".join(f"{a}–{a + n - 1 if n > 0 else a + n + 1}" if abs(n) > 1 else str(a) for a, n in parts)


# ---------------------------------------------------------------------------------- playing a script


class Performance:
    """One run of a demo. Call `tick` after batches were applied to the state.

    hold: captions wait for `advance` (dashboard), or do not (headless). verdict: None until the script is over.
    """

    def __init__(self, demo: Demo, engine: Engine, state: DashboardState, *, hold: bool) -> None:
        self.demo = demo
        self.stage = Stage(engine, state)
        self.verdict: dict[str, Any] | None = None
        self._hold = hold
        self._script = demo.script(self.stage)
        self._step: Hold | Until | None = None

    @property
    def caption(self) -> str:
        """The text to show now."""
        if self.stage.warming:
            return f"{self.demo.title}. The engine warms up first …"
        return self.stage.captions[-1] if self.stage.captions else self.demo.title

    @property
    def waiting(self) -> bool:
        """The script waits for a key."""
        return isinstance(self._step, Hold)

    def advance(self) -> None:
        """The user has read the caption."""
        if isinstance(self._step, Hold):
            self._step = None
            self.tick()

    def tick(self) -> bool:
        """Run the script as far as the state allows. Returns whether it continued."""
        moved = False
        while self.verdict is None and self._may_go_on():
            moved = True
            try:
                self._step = next(self._script)
            except StopIteration:
                self._close()
            except Exception as error:  # an error in a demo's file is a failed check
                self._close(f"{type(error).__name__}: {error}")
        return moved

    def _may_go_on(self) -> bool:
        fatal = next((e for e in self.stage.state.engine.errors if e.fatal), None)
        if fatal is not None:
            self._close(fatal.message)
            return False
        if self.stage.state.started is None:  # loading: the script may need the pool's size
            return False
        if isinstance(self._step, Hold):
            return not self._hold
        if self._step is None:
            return True
        done = self._step.done()
        if self.stage.failure is not None:
            self._close(self.stage.failure)
            return False
        return done

    def _close(self, failure: str | None = None) -> None:
        stage, started = self.stage, self.stage.state.started
        if failure is not None:
            stage.check("the script ran to its end", "no error", failure)
        passed = sum(c["ok"] for c in stage.checks)
        self._step = None
        self.verdict = {
            "type": "verdict",
            "demo": self.demo.name,
            "ok": passed == len(stage.checks) > 0,
            "checks": stage.checks,
            **stage.figures,
        }
        if started is not None:
            names = ("model", "device", "dtype", "num_blocks", "block_size")
            self.verdict.update({n: getattr(started, n) for n in names})
        stage.caption(f"{passed} of {len(stage.checks)} checks passed")


# ----------------------------------------------------------------------------------- finding demos


def folder() -> Path:
    """The folder of the shipped demos. Raises SetupError."""
    place = data_folder("demos")
    if not (place / "page.txt").is_file():
        raise SetupError("the demos are missing from this installation; install kvtop-tui again")
    return place


def load(name: str) -> Demo:
    """The demo with this name, or in this .py file. Raises SetupError that lists the names."""
    if name.endswith(".py"):
        return _load_file(Path(name).expanduser())
    demos = {d.name: d for d in all_demos()}
    if name not in demos:
        raise SetupError(f"no demo {name[:60]!r}; there are: {', '.join(demos)} (or the path of a .py file)")
    return demos[name]


def all_demos() -> list[Demo]:
    """All shipped demos, by name."""
    return sorted((_load_file(p) for p in folder().glob("*.py")), key=lambda d: d.name)


def listing(as_json: bool) -> str:
    """What `kvtop demo list` prints: `[{name, title}]` or two columns."""
    demos = all_demos()
    if as_json:
        return json.dumps([{"name": d.name, "title": d.title} for d in demos], ensure_ascii=False)
    width = max(len(d.name) for d in demos)
    return "\n".join(f"{d.name:<{width}}  {d.title}" for d in demos)


def _load_file(path: Path) -> Demo:
    if not path.is_file():
        raise SetupError(f"no demo file {str(path)[-80:]!r}; `kvtop demo list` shows the shipped ones")
    spec = importlib.util.spec_from_file_location(f"kvtop_demos_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SetupError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SetupError(f"{path.name} cannot be loaded: {type(error).__name__}: {error}"[:200]) from error
    demo = getattr(module, "DEMO", None)
    if not isinstance(demo, Demo):
        raise SetupError(f"{path.name} has no DEMO = Demo(name, title, script); see demos/cache_hit.py")
    return demo


# ---------------------------------------------------------------------------------------- headless


def run_headless(
    demo: Demo,
    base: EngineConfig,
    *,
    as_json: bool = False,
    record: str | Path | None = None,
    redact: bool = False,
    sinks: Sequence[Callable[[StepBatch], None]] = (),
    build: Any = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Play `demo` without a terminal: captions go to `err`, and the verdict is the last line of `out`.

    record: a file for the batches. sinks: they get the batches too. build: replaces that of Engine (a toy in tests).
    Returns the exit code: 0; 1 if a check failed or the recording ended early; 143 after SIGTERM, 129 after SIGHUP and
    130 after ctrl+c, without a verdict. Raises SetupError if the engine cannot start or the recording cannot be
    written.
    """
    from kvtop.record.recorder import Recorder
    from kvtop.state.dashboard import DashboardState

    out, err = out or sys.stdout, err or sys.stderr
    batches: queue.SimpleQueue[StepBatch] = queue.SimpleQueue()
    config = demo.config(base)
    engine = Engine(config) if build is None else Engine(config, build=build)
    recorder = None
    if record is not None:
        recorder = Recorder(
            record,
            redact,
            request_snapshot=engine.request_snapshot,
            on_problem=lambda text: print(text, file=err),
        )
        engine.subscribe(recorder)
    for sink in (*sinks, batches.put):
        engine.subscribe(sink)
    state = DashboardState()
    with signals.raised():
        try:
            engine.start()
            engine.wait_ready()
            verdict = _play(Performance(demo, engine, state, hold=False), state, batches, err)
        except KeyboardInterrupt as end:
            print(signals.reason(end), file=err, flush=True)
            return signals.exit_code(end)
        finally:
            with suppress(KeyboardInterrupt):
                engine.stop()
                if recorder is not None:
                    recorder.close()
    print(json.dumps(verdict, ensure_ascii=False) if as_json else verdict_text(verdict), file=out, flush=True)
    return int(not verdict["ok"] or (recorder is not None and recorder.failed is not None))


def _play(
    play: Performance, state: DashboardState, batches: queue.SimpleQueue[StepBatch], err: TextIO
) -> dict[str, Any]:
    shown = 0
    while True:
        play.tick()
        for text in play.stage.captions[shown:]:
            shown += 1
            print(f"{shown}. {text}", file=err, flush=True)
        if play.verdict is not None:
            return play.verdict
        state.apply(batches.get())
        while not batches.empty():
            state.apply(batches.get())


def verdict_text(verdict: Mapping[str, Any]) -> str:
    """The verdict for people: a line for each check, then the sum."""
    checks = verdict["checks"]
    lines = [
        f"{'ok ' if c['ok'] else 'NOT'}  {c['name']}: {c['got']}"
        + ("" if c["ok"] else f" (want {c['want']})")
        for c in checks
    ]
    passed = sum(c["ok"] for c in checks)
    return "\n".join([*lines, f"{verdict['demo']}: {passed} of {len(checks)} checks passed"])
