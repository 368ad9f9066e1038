"""kvtop without a terminal: prompts in, text or JSON out. stdout is data, stderr is talk.

Owns the loop that submits, follows the events into a DashboardState and prints what the state says; every
figure comes from there. Never imports textual. However it ends (done, refused, ctrl+c, SIGTERM, SIGHUP, a
reader that went away) the engine is stopped and a recording closed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from engine import Engine, EngineConfig, SetupError, Simulation, Workload
from engine.events import EngineStarted, ModelLoading, RequestFinished, StepBatch, encode_batch
from kvtop import signals
from kvtop.cli.inputs import Ask
from kvtop.record.pipe import Pipe
from kvtop.record.recorder import Recorder
from kvtop.settings import log_file
from kvtop.state.dashboard import DashboardState
from kvtop.state.requests import RequestView
from kvtop.state.series import percentile
from kvtop.text import cut, safe_text
from kvtop.units import NONE, count, duration, percent, rate, size

PROGRESS_S = 0.1
"""Seconds between two states of the loading line."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """as_json: StepBatch lines and the summary; with `once` the summary alone. concurrent: all prompts at
    once, else one after another. load: requests that arrive beside them. simulation: what to simulate
    instead of computing."""

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
    asks: Sequence[Ask],
    wishes: Wishes,
    *,
    build: Any = None,
    out: BinaryIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Answer `asks`. Returns the exit code: 0; 1 if the engine failed on the way or
    the recording ended early; 2 if every request was
    refused; 130 after ctrl+c, 143 after SIGTERM, 129 after SIGHUP. Raises SetupError when
    the engine cannot start or the recording cannot be written. build stands in for Engine's own (a toy in
    tests)."""
    simulation = wishes.simulation
    build = build or (simulation and simulation.build)
    engine = Engine(config) if build is None else Engine(config, build=build)
    # An engine whose time is simulated as fast as possible waits for its readers.
    patient = simulation is not None and simulation.speed is None
    batches = Pipe(patient=patient)
    engine.subscribe(batches.put)
    talk = Talk(err or sys.stderr)
    recorder = None
    if wishes.record is not None:
        recorder = Recorder(
            wishes.record,
            wishes.redact,
            request_snapshot=engine.request_snapshot,
            on_problem=talk.say,
            patient=patient,
        )
        engine.subscribe(recorder)
    data = out or sys.stdout.buffer
    session = Session(engine, batches, list(asks), wishes, data, talk)
    with signals.raised(), _logged():
        code = 0
        try:
            engine.start()
            code = session.run()
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

    told = False
    """Something was written."""

    def emit(self, record: logging.LogRecord) -> None:
        """Quiet where the file cannot be written."""
        with suppress(OSError):
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            super().emit(record)
            self.told = True


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
        if not log.told:
            raise
        see = f"; see {log.baseFilename}"
        raise SetupError(cut(str(error), max(40, 190 - len(see))) + see) from None
    finally:
        for logger in loggers:
            logger.removeHandler(log)
        log.close()


class Session:
    """One run: `state` is what the events said so far."""

    def __init__(
        self,
        engine: Engine,
        batches: Pipe,
        asks: list[Ask],
        wishes: Wishes,
        out: BinaryIO,
        talk: Talk,
    ) -> None:
        self.state = DashboardState()
        self._engine, self._batches, self._wishes, self._talk = engine, batches, wishes, talk
        self._out = out
        self._asks = asks
        self._ids: list[int] = []
        self._finished = 0
        """Requests that came to an end, the load's included."""
        self._shown = 0
        """Requests whose text is wholly printed."""
        self._printed = 0
        """Characters of the next one that are printed."""

    def run(self) -> int:
        """Load, answer, close; the exit code."""
        self._until(lambda: self.state.started is not None)
        self._engine.wait_ready()
        if self._wishes.slow:
            self._engine.set_slow(self._wishes.slow)
        if self._wishes.load is not None:
            self._engine.play(self._wishes.load)
        while len(self._ids) < len(self._asks) and self.state.stopped is None:
            self._submit()
            if not self._wishes.concurrent:
                self._until(self._answered)
        self._until(self._answered if self._wishes.load is None else self._all_over)
        failed = next((e.message for e in self.state.errors if e.fatal), None)
        if failed is not None:
            self._talk.say(failed)
        self._engine.stop()
        self._until(lambda: False)
        if self._wishes.as_json:
            self._write(json.dumps(self.state.summary()).encode() + b"\n")
        elif self._wishes.load is not None:
            self._write("".join(f"{line}\n" for line in figures(self.state)).encode())
        if failed is not None:
            return 1
        if not self._all_refused():
            return 0
        if self._wishes.as_json or not self._ids:  # else each was told as it ended
            views = self.state.requests.values()
            why = next((v.error for v in views if v.finish_reason == "refused" and v.error), None)
            self._talk.say(cut(f"every request was refused: {why or 'no reason given'}", 200))
        return 2

    def _submit(self) -> None:
        ask = self._asks[len(self._ids)]
        self._ids.append(
            self._engine.submit(
                ask.prompt,
                ask.params,
                system=ask.system,
                system_name=ask.system_name,
                salt=ask.salt,
                priority=ask.priority,
            )
        )

    def _until(self, done: Callable[[], bool]) -> None:
        """Follow the events until `done`, or until the engine has stopped."""
        while not done() and self.state.stopped is None:
            self._take(self._batches.get())

    def _take(self, batch: StepBatch) -> None:
        self.state.apply(batch)
        self._finished += sum(type(e) is RequestFinished for e in batch.events)
        self._talk.hear(batch)
        if not self._wishes.as_json:
            self._print_text()
        elif not self._wishes.once:
            self._write(encode_batch(batch) + b"\n")

    def _answered(self) -> bool:
        views = self.state.requests
        return all(i in views and views[i].done for i in self._ids)

    def _all_over(self) -> bool:
        """The load has come to its end, and so have all requests."""
        engine = self._engine
        return engine.load_over and self._finished >= len(self._ids) + engine.load_requests

    def _all_refused(self) -> bool:
        return 0 < self._finished == self.state.refused

    def _print_text(self) -> None:
        """The answers in the order they were asked, each as far as it has come."""
        while self._shown < len(self._ids):
            view = self.state.requests.get(self._ids[self._shown])
            if view is None:
                return
            if view.width > 1:  # samples stream side by side, and a beam's text may be dropped
                if not view.done:
                    return
                texts = view.branch_texts() if view.n > 1 else [view.text]
                marks = [f"[{i}] " for i in range(1, len(texts) + 1)] if len(texts) > 1 else [""]
                told = "".join(f"{mark}{text}\n" for mark, text in zip(marks, texts, strict=True) if text)
                self._write(self._safe(told).encode("utf-8", "replace"))
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
        return safe_text(text, newlines=True) if _is_terminal(self._out) else text

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._out.flush()


class Talk:
    """What goes to stderr: the loading line, the sum of the KV memory, one line a request."""

    def __init__(self, err: TextIO) -> None:
        self._err = err
        self._is_terminal = _is_terminal(err)
        self._line = ""
        self._next = 0.0

    def say(self, text: str) -> None:
        """One line."""
        if self._line:
            self._put("\r" + " " * len(self._line) + "\r")
            self._line = ""
        self._put(safe_text(text) + "\n")

    def hear(self, batch: StepBatch) -> None:
        """Loading and the start, as they are told."""
        for e in batch.events:
            if type(e) is ModelLoading and self._is_terminal:
                self._progress(e)
            elif type(e) is EngineStarted:
                self.say(f"{e.model} on {e.device} in {e.dtype}")
                self.say(f"KV: {kv_sum(e)}")
                if notice := e.knobs.get("notice"):
                    self.say(f"{e.model} {notice}")

    def _progress(self, e: ModelLoading) -> None:
        now = time.monotonic()
        if now < self._next and e.done < e.total:
            return
        self._next = now + PROGRESS_S
        part = f" {100 * e.done // e.total} %" if e.total > 0 else ""
        line = cut(safe_text(f"{e.what}{part}"), 70)
        self._put("\r" + line.ljust(len(self._line)))
        self._line = line

    def _put(self, text: str) -> None:
        try:
            self._err.write(text)
            self._err.flush()
        except (OSError, ValueError):  # nobody listens any more; the data is what counts
            pass


def kv_sum(e: EngineStarted) -> str:
    """How the KV memory adds up, from the model's shape to tokens."""
    told = e.knobs.get("kv_cache")
    if isinstance(told, str):
        return told
    usable = e.num_blocks - 1
    return (
        f"{size(e.bytes_per_block / e.block_size)} a token, x {e.block_size} = {size(e.bytes_per_block)} a block, "
        f"x {count(e.num_blocks)} blocks = {size(e.num_blocks * e.bytes_per_block)}, "
        f"{count(usable * e.block_size)} tokens"
    )


def figures(state: DashboardState) -> list[str]:
    """What a load came to, for people."""
    views = [v for v in state.requests.values() if v.usage is not None]
    ttft = [v.ttft for v in views if v.ttft is not None]
    itl = [gap for v in views for gap in v.itl]
    hit = state.hit_rate()
    told = [
        f"{count(len(views))} requests in {duration(state.t)}: {count(state.output_tokens)} tokens, "
        f"{rate(state.output_tokens / max(state.t, 1e-9), 'tok/s')}",
        f"prefix cache: {NONE if hit is None else percent(hit)} of {count(state.query_tokens)} prompt tokens read, "
        f"{count(state.evictions)} blocks evicted",
        f"{count(state.preemptions)} preemptions lost {count(state.tokens_lost)} tokens, of which the cache gave "
        f"{count(state.tokens_back)} back; {count(state.refused)} refused",
    ]
    for name, values in (("first token", ttft), ("between tokens", itl)):
        p50, p99 = (percentile(values, q) for q in (50, 99))
        if p50 is not None and p99 is not None:
            told.append(f"{name}: p50 {duration(p50)}, p99 {duration(p99)}")
    return told


def about(view: RequestView) -> str:
    """What a request cost, in one line."""
    if view.finish_reason in ("refused", "error"):
        return f"#{view.request_id} {view.finish_reason}: {view.error or 'no reason given'}"
    parts = [
        f"#{view.request_id} read {count(view.cached_tokens)} of {count(view.prompt_tokens)} tokens from cache"
    ]
    if view.ttft is not None:
        parts.append(f"first word after {duration(view.ttft)}")
    parts.append(f"{count(view.num_output)} tokens")
    if view.t_first is not None and view.t_last is not None and view.t_last > view.t_first:
        parts.append(rate((view.num_output - 1) / (view.t_last - view.t_first), "tok/s"))
    if view.saved is not None:
        parts.append(view.sharing())
    return " · ".join([*parts, str(view.finish_reason)])


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):
        return False


def _forget(data: BinaryIO) -> None:
    """Nobody reads stdout any more: what is still buffered must not fail at exit."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), data.fileno())
