"""kvtop without a terminal: prompts in, text or JSON out. stdout is data, stderr is talk.

Owns the loop that submits, follows the events into a DashboardState and prints what the state says, and the exit
code; the words are headless_text's. Never imports textual. However it ends (done, refused, ctrl+c, SIGTERM, SIGHUP, a
reader that went away) the engine is stopped and a recording closed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from engine import Engine, EngineConfig, SetupError, Simulation, Workload
from engine.events import RequestFinished, StepBatch, encode_batch
from kvtop import signals
from kvtop.cli.headless_text import Talk, about, answers, figures, is_terminal
from kvtop.cli.prompts import Prompt
from kvtop.record.pipe import Pipe
from kvtop.record.recorder import Recorder
from kvtop.settings import log_file
from kvtop.state.dashboard import DashboardState
from kvtop.text import cut, safe_text


@dataclass(frozen=True, slots=True)
class Job:
    """What to answer, and how. as_json: StepBatch lines and the summary; with `once` the summary alone. concurrent:
    all prompts at once, else one after another. load: requests that arrive besides the prompts. simulation: what to
    simulate instead of computing."""

    prompts: Sequence[Prompt] = ()
    as_json: bool = False
    once: bool = False
    concurrent: bool = False
    record: Path | None = None
    redact: bool = False
    slow: float = 0.0
    load: Workload | None = None
    simulation: Simulation | None = None


def run(
    config: EngineConfig,
    job: Job,
    *,
    build: Any = None,
    out: BinaryIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Answer the prompts and the load. Returns the exit code: 0 where a request succeeded; 1 if all failed, the engine
    failed on the way or the recording ended early; 2 if every request was refused; 130 after ctrl+c, 143 after SIGTERM,
    129 after SIGHUP. Raises SetupError when the engine cannot start or the recording cannot be written. build replaces
    the Engine's own (a toy in tests)."""
    simulation = job.simulation
    build = build or (simulation and simulation.build)
    engine = Engine(config) if build is None else Engine(config, build=build)
    # An engine whose time is simulated as fast as possible waits for its readers.
    patient = simulation is not None and simulation.speed is None
    batches = Pipe(patient=patient)
    engine.subscribe(batches.put)
    talk = Talk(err or sys.stderr)
    recorder = None
    if job.record is not None:
        recorder = Recorder(
            job.record,
            job.redact,
            request_snapshot=engine.request_snapshot,
            on_problem=talk.say,
            patient=patient,
        )
        engine.subscribe(recorder)
    data = out or sys.stdout.buffer
    answering = HeadlessRun(engine, batches, job, data, talk)
    with signals.raised(), _logged():
        code = 0
        try:
            engine.start()
            code = answering.run()
        except KeyboardInterrupt as end:
            talk.say(signals.reason(end))
            code = signals.exit_code(end)
        except BrokenPipeError:
            _forget(data)
        finally:
            with suppress(KeyboardInterrupt):
                batches.close()
                engine.stop()
                if recorder is not None:
                    recorder.close()
    return code or int(recorder is not None and recorder.failed is not None)


class _Log(logging.FileHandler):
    """The dashboard's log file, made when there is something to write."""

    used = False
    """Something was written."""

    def emit(self, record: logging.LogRecord) -> None:
        """Quiet where the file cannot be written."""
        with suppress(OSError):
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            super().emit(record)
            self.used = True


@contextmanager
def _logged() -> Iterator[None]:
    """What `engine` and `kvtop` log goes to the log file, which a SetupError then names."""
    log = _Log(log_file(), delay=True, encoding="utf-8")
    log.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("engine", "kvtop")]
    for logger in loggers:
        logger.addHandler(log)
    try:
        yield
    except SetupError as error:
        if not log.used:
            raise
        see = f"; see {log.baseFilename}"
        raise SetupError(cut(str(error), max(40, 190 - len(see))) + see) from None
    finally:
        for logger in loggers:
            logger.removeHandler(log)
        log.close()


class HeadlessRun:
    """One run: `state` is what the events said so far."""

    def __init__(self, engine: Engine, batches: Pipe, job: Job, out: BinaryIO, talk: Talk) -> None:
        self.state = DashboardState()
        self._engine, self._batches, self._job, self._talk = engine, batches, job, talk
        self._out = out
        self._ids: list[int] = []
        self._ends: Counter[str] = Counter()
        """Requests that came to an end, the load's included, by their finish reason."""
        self._shown = 0
        """Requests whose text is wholly printed."""
        self._printed = 0
        """Characters of the next one that are printed."""

    def run(self) -> int:
        """Load, answer, close; the exit code."""
        self._until(lambda: self.state.started is not None)
        self._engine.wait_ready()
        if self._job.slow:
            self._engine.set_slow(self._job.slow)
        if self._job.load is not None:
            self._engine.play(self._job.load)
        while len(self._ids) < len(self._job.prompts) and self.state.engine.stopped is None:
            self._submit()
            if not self._job.concurrent:
                self._until(self._answered)
        self._until(self._answered if self._job.load is None else self._all_over)
        failed = next((e.message for e in self.state.engine.errors if e.fatal), None)
        if failed is not None:
            self._talk.say(failed)
        self._engine.stop()
        self._until(lambda: False)
        if self._job.as_json:
            self._write(json.dumps(self.state.summary()).encode() + b"\n")
        elif self._job.load is not None:
            self._write("".join(f"{line}\n" for line in figures(self.state)).encode())
        if failed is not None:
            return 1
        return self._exit_code()

    def _exit_code(self) -> int:
        """0 where a request succeeded or there was none, 2 where all were refused, 1 where all failed."""
        refused, failed = self._ends["refused"], self._ends["error"]
        if not self._ends or refused + failed < self._ends.total():
            return 0
        if self._job.as_json or not self._ids:  # else each was reported as it ended
            views = self.state.requests.values()
            why = next((v.error for v in views if v.error), None) or "no reason given"
            self._talk.say(cut(f"every request {'failed' if failed else 'was refused'}: {why}", 200))
        return 1 if failed else 2

    def _submit(self) -> None:
        prompt = self._job.prompts[len(self._ids)]
        self._ids.append(
            self._engine.submit(
                prompt.prompt,
                prompt.params,
                system=prompt.system,
                system_name=prompt.system_name,
                salt=prompt.salt,
                priority=prompt.priority,
            )
        )

    def _until(self, done: Callable[[], bool]) -> None:
        """Follow the events until `done`, or until the engine has stopped."""
        while not done() and self.state.engine.stopped is None:
            self._take(self._batches.get())

    def _take(self, batch: StepBatch) -> None:
        self.state.apply(batch)
        self._ends.update(e.reason for e in batch.events if type(e) is RequestFinished)
        self._talk.hear(batch)
        if not self._job.as_json:
            self._print_text()
        elif not self._job.once:
            self._write(encode_batch(batch) + b"\n")

    def _answered(self) -> bool:
        views = self.state.requests
        return all(i in views and views[i].done for i in self._ids)

    def _all_over(self) -> bool:
        """The load has come to its end, and so have all requests."""
        engine = self._engine
        return engine.load_over and self._ends.total() >= len(self._ids) + engine.load_requests

    def _print_text(self) -> None:
        """The answers in the order they were asked, each as far as it has come."""
        while self._shown < len(self._ids):
            view = self.state.requests.get(self._ids[self._shown])
            if view is None:
                return
            if view.width > 1:  # samples stream side by side, and a beam's text may be dropped
                if not view.done:
                    return
                self._write(self._safe(answers(view)).encode("utf-8", "replace"))
            else:
                new = view.text[self._printed :]
                if new:
                    self._write(self._safe(new).encode("utf-8", "replace"))
                    self._printed = len(view.text)
                if not view.done:
                    return
                if self._printed:
                    self._write(b"\n")
            self._talk.say(about(view))
            self._shown, self._printed = self._shown + 1, 0

    def _safe(self, text: str) -> str:
        return safe_text(text, newlines=True) if is_terminal(self._out) else text

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._out.flush()


def _forget(data: BinaryIO) -> None:
    """Nobody reads stdout any more: what is still buffered must not fail at exit."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), data.fileno())
