"""Moments as text: one line each, with numbers, for the event log and the list of evictions.

Pure functions of DashboardState, no widget. Invariants: foreign text (prompts, model output, errors) goes through
safe_text. What the source does not know is left out, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.events import to_runs
from kvtop.text import safe_text
from kvtop.units import count, duration, span

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState, Moment

QUOTE = 32
"""Characters of a block's text in a line."""

_WITHDRAWN = {"unwritten": "its step did not run", "invalid": "its content proved bad"}
_LONG = 64
_FOLDED = frozenset({"stored", "hit", "forked", "released"})
"""Consecutive moments of these kinds and of one request are one line."""


@dataclass(slots=True)
class MomentLine:
    """One moment, or consecutive moments of one kind and request."""

    t: float
    kind: str
    request_id: int | None
    ids: list[int] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    detail: str = ""


def fold(moments: Iterable[Moment], most: int = 1 << 30) -> list[MomentLine]:
    """At most `most` lines, the newest first, of moments in the same order.

    A hit that belongs to an admission has no line: the line of the admission shows it.
    """
    groups: list[list[Moment]] = []
    moments = list(moments)
    admitted = {(m.seq, m.request_id) for m in moments if m.kind == "admitted"}
    for moment in moments:
        if moment.kind == "hit" and (
            moment.request_id is None or (moment.seq, moment.request_id) in admitted
        ):
            continue
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and moment.kind in _FOLDED
            and (last.kind, last.request_id) == (moment.kind, moment.request_id)
        ):
            groups[-1].append(moment)
            continue
        if len(groups) == most:
            break
        groups.append([moment])
    return [_line(group[::-1]) for group in groups]


def _line(group: Sequence[Moment]) -> MomentLine:
    last = group[-1]
    ids = [b for moment in group for b in moment.ids]
    hashes = [h for moment in group for h in moment.hashes]
    return MomentLine(last.t, last.kind, last.request_id, ids, hashes, last.detail)


def describe(state: DashboardState, line: MomentLine, width: int = 120) -> str:
    """The line as text, without its time. A quotation is shortened so that the facts fit in `width`."""
    if line.kind == "evicted":
        return _evicted(state, line, width)
    words = _WORDS.get(line.kind)
    return words(state, line) if words is not None else f"{line.kind} {safe_text(line.detail)}".rstrip()


def who(request_id: int | None) -> str:
    """#3; "somebody" where the source does not know it."""
    return f"#{request_id}" if request_id is not None else "somebody"


def blocks(ids: Sequence[int], most: int = 3) -> str:
    """62 blocks 1–62; 1 block 88; 4 blocks 9–7, 2; after `most` runs comes "…"."""
    n = len(ids)
    # If a long list is one run, its first ids give the start, and the length is set below.
    head = ids[:_LONG] if n > _LONG and _is_run(ids) else ids
    runs = to_runs(head)
    if head is not ids:
        runs[1] = n if ids[1] > ids[0] else -n
    spans = [
        str(first) if abs(k) == 1 else f"{first}–{first + k - 1 if k > 0 else first + k + 1}"
        for first, k in zip(runs[: 2 * most : 2], runs[1 : 2 * most : 2], strict=True)
    ]
    more = ", …" if len(runs) > 2 * most else ""
    return f"{count(n)} block{'s' * (n != 1)} {', '.join(spans)}{more}"


def _is_run(ids: Sequence[int]) -> bool:
    steps = np.diff(np.asarray(ids))
    return bool((steps == 1).all() or (steps == -1).all())


def spell(state: DashboardState, token_ids: Iterable[int]) -> str:
    """Tokens as safe text in one line. Several blanks or newlines become one blank."""
    return " ".join(safe_text(state.vocabulary.text(token_ids), newlines=True).split())


def quote(state: DashboardState, hash_: str, most: int = QUOTE) -> str:
    """The text of a content in quotes, cut to `most` characters; "" where it is not known."""
    record = state.history.get(hash_)
    if record is None or not record.token_ids:
        return ""
    text = spell(state, record.token_ids)
    return f"“{text[:most].rstrip()}…”" if len(text) > most else f"“{text}”"


@dataclass(frozen=True, slots=True)
class Loss:
    """What was lost with one evicted content. age is in seconds. None: not remembered."""

    text: str
    age: float | None
    hits: int | None
    by: int | None


def loss(state: DashboardState, hash_: str, t: float) -> Loss:
    """About a content that was evicted at t."""
    record = state.history.get(hash_)
    gone = record.gone if record is not None else None
    if gone is None:  # forgotten, or stored again since
        return Loss(quote(state, hash_), None, None, None)
    by = state.requests.of_sequence(gone.by_seq) if gone.by_seq is not None else None
    return Loss(quote(state, hash_), max(0.0, gone.t - gone.born), gone.hits, by)


def _evicted(state: DashboardState, line: MomentLine, width: int) -> str:
    lost = loss(state, line.hashes[0], line.t) if line.hashes else Loss("", None, None, None)
    by = line.request_id if line.request_id is not None else lost.by
    facts = [f"age {span(lost.age)}"] if lost.age is not None else []
    if lost.hits is not None:
        facts.append(f"{lost.hits} hit{'s' * (lost.hits != 1)}")
    if line.detail == "reallocated":
        facts.append(f"taken by {who(by)}")
    elif line.detail in _WITHDRAWN:
        facts.append(_WITHDRAWN[line.detail])
    one = len(line.ids) == 1
    head = f"× {line.ids[0]} evicted" if one else f"× {blocks(sorted(line.ids))} evicted"
    tail = ", ".join(facts)
    room = width - len(head) - len(tail) - (6 if one else 12)
    text = quote(state, line.hashes[0], min(QUOTE, room)) if line.hashes and room >= 8 else ""
    words = [*(["first"] if text and not one else []), *([text] if text else []), *([tail] if tail else [])]
    return f"{head}: {' '.join(words)}" if words else head


def _queued(state: DashboardState, line: MomentLine) -> str:
    view = state.requests.get(line.request_id or 0)
    return f"{who(line.request_id)} queued" + (f", {count(view.prompt_tokens)} tokens" if view else "")


def _admitted(state: DashboardState, line: MomentLine) -> str:
    view = state.requests.get(line.request_id or 0)
    if line.detail == "resumed" or view is None:
        return f"{who(line.request_id)} {line.detail or 'admitted'}"
    if view.hit_blocks and view.hit_ids:
        return f"◆ {who(line.request_id)} hit {blocks(view.hit_ids)}"
    why = view.explanation.short if view.explanation is not None else ""
    return f"{who(line.request_id)} admitted, nothing cached" + (f" ({safe_text(why)})" if why else "")


def _finished(state: DashboardState, line: MomentLine) -> str:
    view = state.requests.get(line.request_id or 0)
    facts = [safe_text(line.detail)]
    if view is not None and view.num_output:
        facts.append(f"{count(view.num_output)} tokens")
        facts.append(f"first after {duration(view.ttft)}")
    if view is not None and view.error:
        facts.append(safe_text(view.error))
    return f"{who(line.request_id)} finished: {', '.join(facts)}"


def _released(state: DashboardState, line: MomentLine) -> str:
    return f"{who(line.request_id)} gave back {blocks(sorted(line.ids))}"


_WORDS = {
    "queued": _queued,
    "admitted": _admitted,
    "finished": _finished,
    "released": _released,
    "hit": lambda _, line: f"◆ {who(line.request_id)} hit {blocks(line.ids)} more",
    "stored": lambda _, line: f"{who(line.request_id)} stored {blocks(line.ids)}",
    "forked": lambda _, line: f"{who(line.request_id)} forked, shares {blocks(line.ids)}",
    "copied": lambda _, line: f"{who(line.request_id)} copied {line.detail}",
    "blocked": lambda _, line: f"{who(line.request_id)} waits, {safe_text(line.detail)}",
    "preempted": lambda _, line: f"{who(line.request_id)} preempted, {line.detail}",
    "profiled": lambda _, line: f"profiled {safe_text(line.detail)}",
    "graph": lambda _, line: f"graph of {line.detail}",
    "cleared": lambda _, line: f"cache cleared, {count(len(line.ids))} blocks forgotten",
    "error": lambda _, line: (
        f"error{' ' + who(line.request_id) if line.request_id is not None else ''}: {safe_text(line.detail)}"
    ),
    "lost": lambda _, line: f"lost track: {safe_text(line.detail)}",
}
