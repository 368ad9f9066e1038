"""Engine: a background thread around EngineCore. Other threads use only this class.

Owns the thread, the inbox of commands, pause and slow motion, and the handling of failures. A public method only puts a
command into the inbox, so no caller waits for a step. The subscribed sinks get all results as StepBatches. Invariant:
every request that submit() accepted gets its RequestFinished before EngineStopped, also if the engine fails.
"""

from __future__ import annotations

import gc
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from operator import index

from engine.chat.turns import Prompt, Turns
from engine.clock import Clock, WallClock
from engine.config import EngineConfig
from engine.device_sampler import DeviceSampler
from engine.errors import NotRunning, SetupError, one_line
from engine.event_log import EventLog
from engine.events import (
    DeviceSample,
    EngineError,
    EngineStopped,
    ModelLoading,
    StepBatch,
)
from engine.files.model_files import Progress
from engine.loaded import Built
from engine.params import SamplingParams
from engine.sim.load_driver import LoadDriver
from engine.sim.synthetic import Language
from engine.sim.workload import Workload
from engine.start import build, started, with_budget
from engine.step.core import EngineCore
from engine.step.sequence import Request

Sink = Callable[[StepBatch], None]
Build = Callable[[EngineConfig, Progress], Built]
_log = logging.getLogger(__name__)


class _StartGivenUp(Exception):
    """stop() was called while the model was loading."""


class Engine:
    """A live engine: subscribe, start, wait_ready, submit …, stop.

    build: builds the model in the engine thread; tests pass a toy. device_interval: seconds between DeviceSamples; 0:
    none.
    """

    def __init__(self, config: EngineConfig, *, build: Build = build, device_interval: float = 1.0) -> None:
        self.config = config
        self._build = build
        self._device_interval = device_interval
        self._sinks: list[Sink] = []
        self._clock: Clock = WallClock()
        self._epoch = time.time()
        self._log = EventLog(self.clock, self._publish)
        self._inbox: deque[Callable[[], None]] = deque()
        self._door = threading.Lock()
        """Held while a request is posted and while the engine closes, so that no request is posted after the inbox was
        read for the last time."""
        self._closed: str | None = None
        """Why no more requests are accepted."""
        self._wake = threading.Event()
        self._ready = threading.Event()
        self._failure: SetupError | None = None
        self._ids = count(1)
        self._conversation_ids = count(1)
        self._core: EngineCore | None = None
        self._model: Built | None = None
        self._turns: Turns | None = None
        self._load = LoadDriver(lambda: next(self._ids))
        self._sample_due: float | None = None
        """Time at which the runner makes its next DeviceSample. None: a DeviceSampler samples the machine."""
        self._stopping = False
        self._give_up_start = False
        self._paused = False
        self._single_steps = 0
        self._slow = 0.0
        self._thread = threading.Thread(target=self._run, name="kvtop-engine", daemon=True)

    def clock(self) -> float:
        """Seconds since this engine was created: the `t` of its batches. A simulated engine has virtual seconds."""
        return self._clock.now()

    # ---------------------------------------------------------------- life, from any thread

    def subscribe(self, sink: Sink) -> None:
        """`sink` is called in the engine thread with every StepBatch and must return at once. Call before start()."""
        self._sinks.append(sink)

    def start(self) -> None:
        """Begin loading in the background."""
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until the engine accepts requests. Raises SetupError if the start failed, and TimeoutError."""
        if not self._ready.wait(timeout):
            raise TimeoutError(f"the engine was not ready after {timeout} s")
        if self._failure:
            raise self._failure

    @property
    def is_ready(self) -> bool:
        """The model is loaded and the engine accepts requests."""
        return self._ready.is_set() and self._failure is None

    @property
    def failure(self) -> SetupError | None:
        """Why the start failed, if it did."""
        return self._failure

    def stop(self, timeout: float = 10.0) -> None:
        """Abort all requests, emit the closing PoolSnapshot and EngineStopped, and end the thread.

        A model that is still loading stops at its next report of progress.
        """

        def command() -> None:
            self._stopping = True

        self._give_up_start = True
        with self._door:
            self._closed = self._closed or "it was stopped"
        self._post(command)
        if self._model is not None and self._model.clock is not None:
            self._model.clock.close()
        if self._thread.is_alive():
            self._thread.join(timeout)

    # ---------------------------------------------------------------- requests, from any thread

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        system_name: str = "",
        conversation: int | None = None,
        salt: str | None = None,
        priority: int = 0,
        spans: Sequence[tuple[int, int, str, str]] = (),
    ) -> int:
        """Queue a prompt and return its request id at once. Raises NotRunning after stop() or a failure.

        A text goes through the chat template, as the next turn of `conversation`, else as a new conversation with
        `system`. A next turn arrives when the running turn of its conversation has finished. Token ids are used as they
        are; `spans` then has the roles, as in RequestQueued. A refusal comes as RequestFinished("refused"). Raises
        TypeError for any other prompt, and for texts and numbers of another type: an error in the engine's thread
        would leave the request without an end.
        """
        if not isinstance(prompt, str):
            if conversation is not None:
                raise TypeError("a conversation takes text: it keeps the token ids itself")
            prompt = list(
                map(index, prompt)
            )  # a copy, because the caller may change its list; `index` because numpy's numbers are not int
        _check_texts(system=system, system_name=system_name, salt=salt)
        conversation = None if conversation is None else index(conversation)
        priority, spans = index(priority), list(spans)
        one = Prompt(next(self._ids), prompt, params or SamplingParams(), self.clock(), priority, salt)

        def command() -> None:
            if isinstance(one.content, str):
                self._talk().take_text(one, conversation, system, system_name)
            else:
                self._talk().take_ids(one, spans)

        self._request(command)
        return one.request_id

    def new_conversation(self, system: str | None = None, system_name: str = "") -> int:
        """A conversation that keeps its token ids, so its history is found in the cache. Returns its id. Raises
        NotRunning like submit()."""
        _check_texts(system=system, system_name=system_name)
        number = next(self._conversation_ids)
        self._request(lambda: self._talk().open(number, system, system_name))
        return number

    def abort(self, request_id: int) -> None:
        """End a request in any state. Unknown and finished requests are ignored."""

        def command() -> None:
            self._talk().abort(request_id)
            self._live().abort(request_id)

        self._post(command)

    def play(self, workload: Workload) -> None:
        """Start a workload. Its second 0 is the moment at which the engine thread reads this command.

        Only one load runs at a time. Raises NotRunning like submit().
        """

        def command() -> None:
            model = self._model
            assert model is not None
            language = Language.of(model.tokenizer, model.runner.vocab_size)
            if not self._load.begin(workload, language, self.clock()):
                self._log.emit(EngineError(f"a load is under way: {workload.name} was not started"))

        self._request(command, self._load.asked)

    @property
    def load_over(self) -> bool:
        """No more requests of a load will arrive. Those that have arrived may still run."""
        return self._load.over

    @property
    def load_requests(self) -> int:
        """Requests of loads that have arrived so far."""
        return self._load.requests

    # ---------------------------------------------------------------- control, from any thread

    def pause(self) -> None:
        """Run no step until resume() or step_once()."""
        self._post(lambda: self._pause(True))

    def resume(self) -> None:
        """Run steps again."""
        self._post(lambda: self._pause(False))

    def step_once(self) -> None:
        """Run one step of a paused engine. Does nothing if the engine is not paused or has no work."""

        def command() -> None:
            if self._paused:
                self._single_steps += 1

        self._post(command)

    def set_slow(self, seconds: float) -> None:
        """Slow motion: wait this long between steps. 0 ends it."""

        def command() -> None:
            self._slow = seconds
            self._live().slow = seconds > 0

        self._post(command)

    def request_snapshot(self) -> None:
        """Ask for a batch with a PoolSnapshot. Also works while the engine is idle."""
        self._post(lambda: self._live().snapshot())

    def reset_prefix_cache(self, reset_running: bool = False) -> None:
        """Drop all hashes. Ignored while blocks are in use, unless `reset_running`."""

        def command() -> None:
            if not self._live().reset_prefix_cache(reset_running):
                self._log.emit(EngineError("the prefix cache was not reset: blocks are in use"))

        self._post(command)

    # ---------------------------------------------------------------- the engine thread

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        self._single_steps = 0
        self._live().one_at_a_time = paused

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _request(self, command: Callable[[], None], first: Callable[[], None] = lambda: None) -> None:
        """Post a command unless the engine is closed. first: is called before it is posted. Raises NotRunning."""
        with self._door:
            if self._closed is not None:
                raise NotRunning(f"the engine takes no more requests: {self._closed}")
            first()
            self._post(command)

    def _publish(self, batch: StepBatch) -> None:
        for sink in self._sinks:
            try:
                sink(batch)
            except Exception:  # a sink that fails must not stop the engine or the other sinks
                _log.exception("a sink failed on batch %d", batch.seq)

    def _live(self) -> EngineCore:
        assert self._core is not None
        return self._core

    def _talk(self) -> Turns:
        assert self._turns is not None
        return self._turns

    def _run(self) -> None:
        sampler = None
        try:
            core = self._begin()
            if self._sample_due is None and self._device_interval > 0:
                sampler = DeviceSampler(self._sample, self._device_interval, core.runner.device)
                sampler.start()
            self._ready.set()
            self._loop(core)
            reason = "stopped"
        except _StartGivenUp:
            self._failure = SetupError("the engine was stopped before it was ready")
            reason = "stopped"
        except SetupError as error:
            self._fail(error)
            reason = "the start failed"
        except Exception as error:
            _log.exception("the engine thread failed")
            self._fail(SetupError(f"engine: {one_line(error)}"))
            reason = "failed"
        finally:
            if sampler:
                sampler.stop()
        try:
            self._close(reason)
        finally:
            self._ready.set()

    def _begin(self) -> EngineCore:
        last = 0.0

        def progress(done: int, total: int, what: str) -> None:
            nonlocal last
            if self._give_up_start:
                raise _StartGivenUp
            self._log.cut(ModelLoading(done, total, what))
            last = self.clock()

        model = self._model = self._build(self.config, progress)
        if model.clock is not None:
            model.clock.start(last)
            self._clock = model.clock
        if model.sample is not None and self._device_interval > 0:
            self._sample_due = self.clock() + self._device_interval
        config = with_budget(self.config, model.runner)
        # 53 bits stay exact in any reader of JSON.
        seed = secrets.randbits(53) if config.hash_seed is None else config.hash_seed
        text = model.tokenizer
        core = self._core = EngineCore(
            config,
            model.runner,
            self._log,
            hash_seed=seed,
            token_bytes=text.token_bytes if text else None,
            is_text=(lambda t: not text.is_special(t)) if text else (lambda t: True),
            eos_ids=model.eos_ids,
            defaults=model.defaults,
            on_finished=self._finished,
        )
        self._log.cut(started(config, model, seed, self._epoch, samples=self._device_interval > 0))
        self._turns = Turns(core, text, self._post, allow_special=self.config.allow_special_tokens)
        if model.source == "live" and model.runner.weights_bytes:
            # A full collection visits all objects of torch. It holds the interpreter for 0.1 s, which is visible as a
            # delay between tokens. The objects that exist now will stay, so they need not be visited again.
            gc.collect()
            gc.freeze()
        return core

    def _loop(self, core: EngineCore) -> None:
        while True:
            self._obey()
            if self._stopping:
                return
            self._wake.clear()
            if self._inbox:
                continue
            if not self._paused or self._single_steps > 0:
                self._load.arrive(core)
                if core.has_work:
                    if self._paused:
                        self._single_steps -= 1
                    core.step()
                    self._sample_runner()
                    if self._slow and not self._paused:
                        self._rest()
                    continue
            self._single_steps = 0
            core.settle()
            core.flush()
            if self._paused:
                self._wake.wait()
            else:
                self._clock.wait(self._wake, self._load.next_at)
                self._sample_runner()

    def _sample_runner(self) -> None:
        """Sample a simulated device once in each interval of the engine's clock."""
        now = self.clock()
        if self._sample_due is not None and now >= self._sample_due:
            assert self._model is not None and self._model.sample is not None
            self._log.emit(self._model.sample())
            self._sample_due = now + self._device_interval

    def _rest(self) -> None:
        """The wait of slow motion, in real time. Commands are carried out during it."""
        begun = time.monotonic()
        while not (self._paused or self._stopping):
            left = begun + self._slow - time.monotonic()  # a command may have changed the wait
            if left <= 0:
                return
            if self._wake.wait(left):
                self._wake.clear()
                self._obey()
                self._live().flush()

    def _obey(self) -> None:
        """Carry out the commands in the inbox. A failure is reported and affects no other command."""
        while self._inbox:
            try:
                self._inbox.popleft()()
            except Exception as error:
                _log.exception("a command failed")
                self._log.emit(EngineError(f"a command failed: {one_line(error)}"))

    def _fail(self, error: SetupError) -> None:
        self._failure = error
        self._log.cut(EngineError(str(error), fatal=True))

    def _close(self, reason: str) -> None:
        with self._door:
            self._closed = self._closed or str(self._failure or "it was stopped")
        core = self._core
        if core is not None:
            if self._turns is not None:
                self._obey()  # prompts submitted before the end become requests, so that each gets a RequestFinished
                self._turns.close()
            core.close()
            try:
                core.snapshot()
            except Exception:  # the failure that ended the engine has been reported
                _log.exception("closing the engine")
        # Frozen objects would survive the interpreter's last collection. Their memory would never be released, and some
        # libraries print a list of their objects that still exist at exit.
        gc.unfreeze()
        self._log.cut(EngineStopped(reason))

    def _finished(self, request: Request) -> None:
        self._load.finished(request, self.clock())
        self._talk().finished(request)

    def _sample(self, sample: DeviceSample) -> None:
        self._post(lambda: self._log.emit(sample))


def _check_texts(**texts: str | None) -> None:
    for name, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{name} must be a text, not {text!r:.40}")
