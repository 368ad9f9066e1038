"""Budget: the tokens of the last step, of its token budget, and its time.

One bar is for tokens (decodes, prefill chunks, unused), one for time. Invariants: the parts of a bar add up to its
length. A part that is not 0 has at least one cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.style import Style

from kvtop.units import NONE, NOT_HERE, count, duration, percent
from kvtop.widgets.base.graph import quantile
from kvtop.widgets.base.lines import Part, Row
from kvtop.widgets.base.panel import Panel
from kvtop.widgets.base.table import cut

if TYPE_CHECKING:
    from engine.events import StepCompleted
    from kvtop.state.dashboard import DashboardState

_LABEL = 8


class BudgetPanel(Panel):
    """Tokens, time, sequences of the last step."""

    TITLE = "step · token budget"
    FIGURES = (
        (
            "budget",
            "Most tokens that a step may compute: --max-num-batched-tokens, less with a long context.",
        ),
        ("decode", "Tokens of running requests that already generate: one each, served first."),
        ("prefill", "Prompt tokens of this step's chunks: they fill what the decodes leave."),
        ("unused", "Budget that no request needed."),
        (
            "overrun",
            "Tokens computed for requests that had ended: a step that is launched ahead sees an end one step late.",
        ),
        ("schedule", "Choosing sequences, allocating blocks, looking up prefixes (ms)."),
        ("prepare", "Building the batch's rows and tables (ms)."),
        ("forward", "The model's forward pass (ms)."),
        ("sample", "Choosing the next tokens from the logits (ms)."),
        ("p50, p99", "Time of the last 1,000 steps, without the waits of slow motion (ms)."),
    )

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """The lines that fit, the bar of tokens first."""
        step = state.steps.completed
        if step is None:
            return [self.say("no step yet")]
        rows = [self._tokens(step, width)]
        if height == 1:
            return rows
        rows.append(self._token_figures(step, width))
        assert state.started is not None
        timed = "timings" in state.started.capabilities
        if height > 3 and not timed:
            rows.append(self.say(f"times {NOT_HERE}"))
        elif height > 3:
            rows += [self._times(step, width), self._time_figures(step, width)]
            if height > 4:
                rows.append(self._steps(state, width))
        return rows

    def _tokens(self, step: StepCompleted, width: int) -> Row:
        room = max(1, width - _LABEL)
        used = step.decode_tokens + step.prefill_tokens
        parts = (step.decode_tokens, step.prefill_tokens, max(0, step.budget - used))
        looks = (("█", "decode"), ("▓", "prefill"), ("·", "muted"))
        return (("tokens".ljust(_LABEL), self.ink("muted")), *self._bar(parts, looks, room))

    def _token_figures(self, step: StepCompleted, width: int) -> Row:
        used = step.decode_tokens + step.prefill_tokens
        overrun = (("overrun", count(step.overrun), None),) if step.overrun else ()
        return self._under(
            width,
            (
                ("decode", count(step.decode_tokens) if step.decode_tokens else NONE, self.ink("decode")),
                ("prefill", count(step.prefill_tokens) if step.prefill_tokens else NONE, self.ink("prefill")),
                ("unused", count(max(0, step.budget - used)), None),
                ("of", count(step.budget), None),
                *overrun,
            ),
        )

    def _times(self, step: StepCompleted, width: int) -> Row:
        parts = tuple(
            round(t * 1e6) for t in (step.t_schedule, step.t_prepare, step.t_forward, step.t_sample)
        )
        looks = (("░", "text"), ("▒", "text"), ("█", "itl"), ("▓", "text"))
        return (("time".ljust(_LABEL), self.ink("muted")), *self._bar(parts, looks, max(1, width - _LABEL)))

    def _time_figures(self, step: StepCompleted, width: int) -> Row:
        gpu = (("gpu", duration(step.t_gpu), None),) if step.t_gpu is not None else ()
        return self._under(
            width,
            (
                ("░ schedule", duration(step.t_schedule), None),
                ("▒ prepare", duration(step.t_prepare), None),
                ("█ forward", duration(step.t_forward), self.ink("itl")),
                ("▓ sample", duration(step.t_sample), None),
                *gpu,
            ),
        )

    def _steps(self, state: DashboardState, width: int) -> Row:
        times = np.sort(state.series.step.latest())
        scheduled = len(state.steps.scheduled.seq_ids) if state.steps.scheduled else 0
        busy = sum(state.steps.scheduled.n) if state.steps.scheduled else 0
        budget = state.steps.completed.budget if state.steps.completed else 0
        return self._under(
            width,
            (
                ("step", count(state.stream.step), None),
                ("sequences", count(scheduled), None),
                ("filled", percent(busy, budget), None),
                ("p50", duration(quantile(times, 0.5)), None),
                ("p99", duration(quantile(times, 0.99)), None),
            ),
        )

    def _under(self, width: int, pairs: Sequence[tuple[str, str, Style | None]]) -> Row:
        label: Part = (" " * _LABEL, self.ink("muted"))
        return tuple(cut((label, *self.figures(max(1, width - _LABEL), *pairs)), width))

    def _bar(self, parts: Sequence[int], looks: Sequence[tuple[str, str]], room: int) -> Row:
        cells = shares(parts, room)
        return tuple((glyph * n, self.ink(name)) for n, (glyph, name) in zip(cells, looks, strict=True))


def shares(parts: Sequence[int], room: int) -> list[int]:
    """Cells for each part in proportion, `room` in total. Every part over 0 gets one, if there are enough."""
    total = sum(parts)
    if total <= 0:
        return [0] * (len(parts) - 1) + [room]
    cells = [part * room // total for part in parts]
    order = sorted(range(len(parts)), key=lambda i: -(parts[i] * room % total))
    for i in order[: room - sum(cells)]:
        cells[i] += 1
    for i, part in enumerate(parts):
        if part > 0 and not cells[i]:
            rich = max(range(len(parts)), key=lambda j: cells[j])
            if cells[rich] > 1:
                cells[rich] -= 1
                cells[i] = 1
    return cells
