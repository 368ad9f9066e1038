"""Session: what a dashboard is about. A source, the state built from it, and whoever takes orders.

Owns the way of batches into the state and every control that is no matter of painting: freezing,
slow motion, single steps, a recording's transport, prompts, a demo's script. No textual. Invariant:
`state` is exactly the source's batches applied in order, also while the display is frozen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import SetupError
from kvtop.play.composer import Composer
from kvtop.play.demo import Performance
from kvtop.state.dashboard import DashboardState

if TYPE_CHECKING:
    from engine import Engine
    from kvtop.options import Options
    from kvtop.record.recorder import Recorder
    from kvtop.sources import Source

SLOW = 0.25
"""Seconds that slow motion waits between steps, unless --slow says otherwise."""


class Session:
    """Live with an `engine`, else a replay. Call `pull` once a tick."""

    def __init__(self, source: Source, options: Options, engine: Engine | None = None) -> None:
        self.source, self.options, self.engine = source, options, engine
        self.state = DashboardState()
        source.attach(self.state)
        self.composer: Composer | None = None
        """Takes prompts: live, and no demo."""
        self.play: Performance | None = None
        """The demo that is played."""
        self.stepping = False
        """The engine stands still between single steps."""
        self.slow = options.slow
        self.recorder: Recorder | None = None
        """Writes what happens to a file."""
        self.problem: str | None = None
        """Why there are no examples."""
        self._still: DashboardState | None = None
        self._cover: DashboardState | None = None
        """Shown while a demo's warm-up runs: the state before it."""
        self._applied = (-1, -1)

    # ----------------------------------------------------------------------------------- start

    def prepare(self) -> None:
        """Make what takes orders from the keys; before `start`, after the first frame."""
        if self.engine is None:
            return
        options = self.options
        if options.demo is not None:
            self.play = Performance(options.demo, self.engine, self.state, hold=True)
            return
        try:
            from kvtop.play.examples import load_examples

            examples = load_examples()
        except SetupError as error:
            examples, self.problem = (), str(error)
        self.composer = Composer(
            self.engine,
            self.state,
            examples=examples,
            params=options.params,
            system=options.system,
            system_name=options.system_name,
            salt=options.salt,
        )

    def start(self) -> None:
        """Start the engine and send the prompts of the command line, each as a conversation."""
        if self.engine is None:
            return
        self.engine.start()
        if self.composer is not None:
            for prompt in self.options.prompts:
                self.composer.new_conversation()
                self.composer.send(prompt)

    # ----------------------------------------------------------------------------------- batches

    def pull(self) -> bool:
        """Apply what has come. True if what is shown is another than at the last call."""
        state = self.state
        for batch in self.source.drain():
            state.apply(batch)
        if self.composer is not None:
            self.composer.tick()
        if self.play is not None:
            self.play.tick()
            if not self.play.stage.warming:
                self._cover = None
            elif self._cover is None:
                self._cover = state.copy()
        shown = self.shown
        before, self._applied = self._applied, (shown.seq, shown.generation)  # a source may jump by itself
        return self._applied != before

    @property
    def frozen(self) -> bool:
        """The display stands still while the engine runs on."""
        return self._still is not None

    @property
    def shown(self) -> DashboardState:
        """What the display is about: `state`, or as it was when it was frozen, or before a demo's warm-up."""
        return self._still or self._cover or self.state

    @property
    def now(self) -> float:
        """The display's clock in seconds: the engine's, or the moment shown."""
        if self.frozen or self.engine is None:
            return self.shown.t
        return max(self.state.t, self.engine.clock())

    @property
    def playing(self) -> bool:
        """A recording runs."""
        return self.engine is None and not getattr(self.source, "paused", True)

    @property
    def place(self) -> str:
        """Where in a recording we are, for the badge."""
        return getattr(self.source, "place", "")

    @property
    def failure(self) -> str | None:
        """Why the engine could not start, one line."""
        if self.engine is None or self.engine.failure is None or self.state.started is not None:
            return None
        return str(self.engine.failure)

    @property
    def recording_failed(self) -> str | None:
        """Why the recording ended early, one line."""
        return None if self.recorder is None else self.recorder.failed

    @property
    def exit_code(self) -> int:
        """1 after a demo whose checks failed."""
        verdict = self.play.verdict if self.play is not None else None
        return int(verdict is not None and not verdict["ok"])

    # ---------------------------------------------------------------------------------- controls

    def may(self, action: str) -> bool:
        """This control exists here."""
        if action in ("step_back", "seek", "speed"):
            return self.engine is None
        if action in ("slow", "abort", "reset_cache"):
            return self.engine is not None
        if action == "new_conversation":
            return self.composer is not None
        if action == "ask":
            return self.composer is not None or self.play is not None
        return True

    def begin_slow(self) -> None:
        """Tell an engine that is up about --slow."""
        if self.engine is not None and self.slow:
            self.engine.set_slow(self.slow)

    def toggle_slow(self) -> None:
        """Slow motion on or off; after single steps the engine runs on."""
        if self.engine is None or self.state.started is None:
            return
        if self.stepping:
            self.stepping = False
            self.engine.resume()
        else:
            self.slow = 0.0 if self.slow else self.options.slow or SLOW
            self.engine.set_slow(self.slow)

    def step(self, count: int = 1) -> None:
        """One engine step; or batches of a recording, also backwards."""
        if self.engine is None:
            self._replay("step", count)
        elif self.state.started is not None:
            self._still = None  # a step that is not shown would be no step
            if not self.stepping:
                self.stepping = True
                self.engine.pause()
            self.engine.step_once()

    def toggle_frozen(self) -> None:
        """Freeze the display while the engine runs on; pause a recording."""
        if self.engine is None:
            self._replay("toggle")
        else:
            self._still = self.state.copy() if self._still is None else None

    def seek(self, seconds: float) -> None:
        """Relative to the moment played."""
        self._replay("seek", getattr(self.source, "t", self.state.t) + seconds)

    def change_speed(self, direction: int) -> None:
        """The next faster (1) or slower (-1) speed of a recording."""
        self._replay("change_speed", direction)

    def abort(self, picked: int | None) -> None:
        """The picked request if it runs, else the newest running one."""
        running = self.state.requests.running
        if self.engine is not None and running:
            self.engine.abort((picked if picked in running else running[-1]) + self.state.requests.skipped)

    def abort_answers(self) -> int:
        """All that the prompt has asked for and that has not finished. Returns how many these are."""
        return self.composer.abort() if self.composer is not None else 0

    def reset_cache(self) -> None:
        """Forget all hashes, unless blocks are in use."""
        if self.engine is not None:
            self.engine.reset_prefix_cache()

    def _replay(self, control: str, *args: float) -> None:
        found = getattr(self.source, control, None)
        if found is not None:
            found(*args)
