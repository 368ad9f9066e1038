"""What a run without a terminal prints for people: progress, the KV memory, one line a request, a load's figures.

Owns the wording. Every figure comes from the events and from DashboardState.
"""

from __future__ import annotations

import time
from typing import Any, TextIO

from engine.events import EngineStarted, ModelLoading, StepBatch
from kvtop.state.dashboard import DashboardState
from kvtop.state.request_view import RequestView
from kvtop.state.series import percentile
from kvtop.text import cut, safe_text
from kvtop.units import NONE, count, duration, percent, rate, size

PROGRESS_S = 0.1
"""Seconds between two states of the loading line."""


class Talk:
    """What goes to stderr: the loading line, the sum of the KV memory, one line a request."""

    def __init__(self, err: TextIO) -> None:
        self._err = err
        self._is_terminal = is_terminal(err)
        self._line = ""
        self._next = 0.0

    def say(self, text: str) -> None:
        """One line."""
        if self._line:
            self._put("\r" + " " * len(self._line) + "\r")
            self._line = ""
        self._put(safe_text(text) + "\n")

    def hear(self, batch: StepBatch) -> None:
        """The loading and the start."""
        for e in batch.events:
            if type(e) is ModelLoading and self._is_terminal:
                self._progress(e)
            elif type(e) is EngineStarted:
                self.say(f"{e.model} on {e.device} in {e.dtype}")
                self.say(f"KV: {kv_sum(e)}")
                if notice := e.knobs.notice:
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
    if e.knobs.kv_cache is not None:
        return e.knobs.kv_cache
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
    hit, requests = state.cache.hit_rate(), state.requests
    lines = [
        f"{count(len(views))} requests in {duration(state.t)}: {count(state.steps.output_tokens)} tokens, "
        f"{rate(state.steps.output_tokens / max(state.t, 1e-9), 'tok/s')}",
        f"prefix cache: {NONE if hit is None else percent(hit)} of {count(state.cache.query_tokens)} prompt "
        f"tokens read, {count(state.pool.evictions)} blocks evicted",
        f"at most {count(state.pool.peak_blocks)} of {count(state.num_blocks - 1)} blocks held, of their "
        f"{count(state.pool.peak_blocks * state.block_size)} slots {count(state.pool.peak_filled)} filled",
        f"{count(requests.preemptions)} preemptions lost {count(requests.tokens_lost)} tokens, of which the cache "
        f"gave {count(requests.tokens_back)} back; {count(requests.refused)} refused",
    ]
    for name, values in (("first token", ttft), ("between tokens", itl)):
        p50, p99 = (percentile(values, q) for q in (50, 99))
        if p50 is not None and p99 is not None:
            lines.append(f"{name}: p50 {duration(p50)}, p99 {duration(p99)}")
    return lines


def answers(view: RequestView) -> str:
    """The texts of a request with several answers, a line each, numbered; nothing where it has none."""
    texts = view.branch_texts() if view.n > 1 else [view.text]
    numbered = len(texts) > 1
    return "".join(f"[{i}] {text}\n" if numbered else f"{text}\n" for i, text in enumerate(texts, 1) if text)


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


def is_terminal(stream: Any) -> bool:
    """False for what has no file behind it, too."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):
        return False
