"""A look-up in words: which request computed the prefix, how much sooner the first word came, why it stopped.

Pure functions of DashboardState; no textual. Invariant: a comparison is made only with an earlier request
that had the same tokens up to the last hit block (its chain hash there is the same), read nothing, was no
longer than twice that beginning, and did not wait for others: then its time is what the hit has saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvtop.text import safe_text
from kvtop.units import count, duration

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState
    from kvtop.state.request_view import RequestView

_EARLIER = 200
"""How many earlier requests are searched."""


def blocks_of(view: RequestView, size: int) -> int:
    """Blocks that the prompt takes, the last one perhaps in part."""
    return -(-view.prompt_tokens // size)


def table_of(state: DashboardState, view: RequestView) -> list[int]:
    """Physical block of each logical one. Of a finished request: where its content can be read now (0
    where nowhere), since memory is handed on."""
    table = state.table(view.request_id)
    if view.phase == "running":
        return table
    for i in range(len(table)):
        if i < len(view.lookup_hashes):
            table[i] = next(iter(state.pool.find(view.lookup_hashes[i])), 0)
        elif state.requests.of_sequence(int(state.pool.last_seq[table[i]])) != view.request_id:
            table[i] = 0
    return table


def runs(ids: Iterable[int], most: int = 3) -> str:
    """1, 2, 3, 7 -> "1–3, 7"; after `most` runs "…"."""
    out: list[tuple[int, int]] = []
    for i in ids:
        if out and i == out[-1][1] + 1:
            out[-1] = (out[-1][0], i)
        else:
            out.append((i, i))
    texts = [f"{a:,}" if a == b else f"{a:,}–{b:,}" for a, b in out[:most]]
    return ", ".join(texts) + (", …" if len(out) > most else "")


def origin(state: DashboardState, view: RequestView) -> RequestView | None:
    """The earlier request that this prefix was read after: the one that computed it if it is known,
    else the latest that had it too."""
    found = None
    for other in _earlier(state, view):
        if other.hit_blocks * 2 < view.hit_blocks:
            return other
        found = found or other
    return found


def cold(state: DashboardState, view: RequestView) -> RequestView | None:
    """The latest earlier request over the same prefix that read nothing, where the two can be compared: what
    was read is at least half of either prompt, and both first words are measurements of computing."""
    read = view.cached_tokens
    if read * 2 < view.prompt_tokens or view.slow or view.preemptions:
        return None
    for other in _earlier(state, view):
        if other.is_cold and read * 2 >= other.prompt_tokens and _computed_at_once(other):
            return other
    return None


def _computed_at_once(view: RequestView) -> bool:
    """Its first word came after computing: no slow motion, no preemption, no others before it."""
    return view.t_first is not None and not (view.slow or view.preemptions or view.crowded)


def _earlier(state: DashboardState, view: RequestView) -> Iterable[RequestView]:
    n = view.hit_blocks
    if not n or len(view.lookup_hashes) < n:
        return
    mark, seen = view.lookup_hashes[n - 1], 0
    for rid in reversed(state.requests):
        other = state.requests[rid]
        if rid >= view.request_id:
            continue
        seen += 1
        if seen > _EARLIER:
            return
        if len(other.lookup_hashes) >= n and other.lookup_hashes[n - 1] == mark:
            yield other


def speedup(state: DashboardState, view: RequestView) -> str:
    """ "17×", or "" without a fair comparison."""
    other = cold(state, view)
    if other is None or not view.ttft or not other.ttft or other.ttft < 1.5 * view.ttft:
        return ""
    ratio = other.ttft / view.ttft
    return f"{ratio:.1f}×" if ratio < 10 else f"{ratio:.0f}×"


def prefix_name(view: RequestView) -> str:
    """What the hit part is: the attached page, or in which role its text stands."""
    best, name = 0, ""
    for start, end, role, label in view.spans:
        size = min(end, view.cached_tokens) - start
        if size > best:
            best, name = (
                size,
                safe_text(label)
                or {"system": "system text", "template": "chat template"}.get(role, "history"),
            )
    return name or "the beginning"


def whence(state: DashboardState, view: RequestView) -> str:
    """ "page.txt as in #1 → physical 1–62"; "" without a hit."""
    if not view.hit_blocks:
        return ""
    other = origin(state, view)
    seen = f" as in #{other.request_id}" if other is not None else ""
    return f"{prefix_name(view)}{seen} → physical {runs(view.hit_ids)}"


def miss(view: RequestView) -> str:
    """Why the look-up read no more; "" while that is not known."""
    return view.explanation.short if view.explanation is not None else ""


Words = list[tuple[str, str]]
"""(text, role), role one of verb, figure, words, time, cold."""


def sentence(state: DashboardState, view: RequestView) -> list[Words]:
    """THE sentence, in forms from long to short."""
    read, prompt = view.cached_tokens, view.prompt_tokens
    figures = f"{count(read)} of {count(prompt)}" if read else f"all {count(prompt)}"
    tail = " tokens from cache" if read else " tokens, none in the cache"
    verb = "READ " if read else "COMPUTING " if view.ttft is None else "COMPUTED "
    brief = f"{count(read)}/{count(prompt)}" if read else count(prompt)
    long, middle, short = _first_word(state, view)
    return [
        [(verb, "verb"), (figures, "figure"), (tail, "words"), *long],
        [(verb, "verb"), (figures, "figure"), (tail, "words"), *middle],
        [(verb, "verb"), (figures, "figure"), (" tokens", "words"), *short],
        [(verb, "verb"), (figures, "figure"), *short],
        [(verb, "verb"), (brief, "figure"), *short[:2]],
    ]


def _first_word(state: DashboardState, view: RequestView) -> tuple[Words, Words, Words]:
    """When the first word came, and the cold one, in three lengths. Before it came: how much is computed."""
    late = view.ttft
    if late is None:
        todo = view.prompt_tokens - view.cached_tokens
        done = max(0, view.num_computed - view.cached_tokens)
        words = " · waits for its turn" if view.phase == "queued" else " · first word …"
        if view.phase == "running" and done < todo:
            words = f" · {count(done)} of {count(todo)} computed …"
        return [(words, "words")], [(words, "words")], [(words, "words")]
    time = duration(late) + (" (slow motion)" if view.slow else "")
    other = cold(state, view)
    then = "" if other is None else duration(other.ttft)
    long: Words = [(" · first word after ", "words"), (time, "time")]
    middle: Words = [(" · first word ", "words"), (time, "time")]
    short: Words = [(" · ", "words"), (time, "time")]
    if other is not None:
        long.append((f" (#{other.request_id}, cold: {then})", "cold"))
        middle.append((f" (cold: {then})", "cold"))
        short.append((f" (cold {then})", "cold"))
    return long, middle, short


def physical(table: Sequence[int], indices: Iterable[int]) -> list[int]:
    """Physical ids of logical blocks, those without one left out."""
    return [table[i] for i in indices if 0 <= i < len(table) and table[i]]
