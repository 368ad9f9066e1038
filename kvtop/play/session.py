"""Session: what a dashboard shows and drives: a source, the state made from its batches, an engine if there is one.

Owns the application of batches to the state, and every control that has nothing to do with painting: freeze, slow
motion, single steps, the transport of a recording, prompts, the script of a demo. It does not know Textual. Invariant:
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
    from kvtop.sources import Source, Transport

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
        """The engine is paused, and runs one step when asked to."""
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
        """Make the composer or the demo; call it after the first frame and before `start`."""
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
        """Apply what has come. True if what is shown has changed since the last call."""
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
        """The display does not change while the engine runs on."""
        return self._still is not None

    @property
    def shown(self) -> DashboardState:
        """What is displayed: `state`, or a copy of it from when it was frozen or from before a demo's warm-up."""
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
        return self.transport is not None and not self.transport.paused

    @property
    def transport(self) -> Transport | None:
        """The controls of a recording."""
        return self.source.transport

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
        """This control works here."""
        if action in ("step_back", "seek", "speed"):
            return self.transport is not None
        if action in ("slow", "abort", "reset_cache"):
            return self.engine is not None
        if action == "new_conversation":
            return self.composer is not None
        if action == "ask":
            return self.composer is not None or self.play is not None
        return True

    def begin_slow(self) -> None:
        """Pass --slow to the engine, once it is up."""
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
        if self.transport is not None:
            self.transport.step(count)
        elif self.engine is not None and self.state.started is not None:
            self._still = None  # else the step would not be seen
            if not self.stepping:
                self.stepping = True
                self.engine.pause()
            self.engine.step_once()

    def toggle_frozen(self) -> None:
        """Freeze the display while the engine runs on; pause a recording."""
        if self.transport is not None:
            self.transport.toggle()
        elif self.engine is not None:
            self._still = self.state.copy() if self._still is None else None

    def seek(self, seconds: float) -> None:
        """Relative to the moment played."""
        if self.transport is not None:
            self.transport.seek(self.transport.t + seconds)

    def change_speed(self, direction: int) -> None:
        """The next faster (1) or slower (-1) speed of a recording."""
        if self.transport is not None:
            self.transport.change_speed(direction)

    def abort(self, picked: int | None) -> None:
        """Abort the picked request if it runs, else the newest one that runs."""
        running = self.state.requests.running
        if self.engine is not None and running:
            self.engine.abort((picked if picked in running else running[-1]) + self.state.requests.skipped)

    def abort_answers(self) -> int:
        """Abort every unfinished answer to what was typed. Returns how many these are."""
        return self.composer.abort() if self.composer is not None else 0

    def reset_cache(self) -> None:
        """Forget all hashes, unless blocks are in use."""
        if self.engine is not None:
            self.engine.reset_prefix_cache()
