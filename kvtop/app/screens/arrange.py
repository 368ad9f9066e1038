"""Which panels fit into a terminal, and how large each one is.

A pure function of the terminal's size, the view and what is switched on; the screen applies its answer. NEEDS says
how many rows a panel takes, and the lists in `_arrange_side`, `_arrange_stack` and `_fill_left` who gets them first.
Invariants: a panel has at least its smallest height or is left out whole; the cells of one row of panels add up to
the terminal's width and all rows to its height; any size, down to 1 x 1, has an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtop.options import View

ALL = 10_000
"""Rows that a panel wants which can use every one."""


class Need(NamedTuple):
    """Rows of a panel, its frame included."""

    least: int
    """With fewer it is left out."""
    good: int
    """What it gets before those that come later in its list get any."""
    wants: int
    """More than this does not help it."""


NEEDS: dict[str, Need] = {
    "chat-box": Need(5, 7, ALL),
    "map-box": Need(6, 8, ALL),
    "queues-box": Need(5, 8, ALL),
    "strip-box": Need(3, 4, 5),
    "detail-box": Need(5, 7, 9),
    "log-box": Need(4, 6, 10),
    "graphs": Need(6, 7, 8),
    "budget-box": Need(4, 4, 7),
    "memory-box": Need(7, 7, 11),
    "tables": Need(5, 7, 10),
    "kernels-box": Need(11, 11, 15),
}
"""Panels, and rows of panels. Where there are too few rows, the last of a list are left out first."""

FIRST = frozenset({"chat-box", "map-box", "queues-box", "strip-box", "detail-box", "log-box"})
"""These join as soon as they have their least; the others wait until those before them have what is good for them."""

PLACED = frozenset(NEEDS) | frozenset(
    ("header", "keys", "step", "ask", "hint", "caption", "top", "left", "pool", "side", "memory-low-box")
    + ("ttft-box", "itl-box", "throughput-box", "device-box")
    + ("cache-box", "table-box", "evictions-box", "events-box")
)
"""Ids of all that an arrangement may show."""

NARROW, SMALL_ROWS, SMALL_OPS_ROWS = 60, 20, 12
"""Below these columns and rows there is only the chat; view ops, which has none, needs fewer rows."""
SIDE_BY_SIDE = 100
"""From this number of columns on, chat, map and queues are next to each other."""
WIDE = 140
_TOP_GOOD = {"chat": 12, "ops": 12, "all": 18}
"""Rows of chat, map and queues before graphs and tables get any, if the three are next to each other."""
_TOP_WANTS = 21


@dataclass(frozen=True, slots=True)
class Asked:
    """What the arrangement depends on."""

    width: int
    height: int
    view: View
    live: bool = True
    """There is a prompt."""
    selected: bool = False
    """A block's details are shown."""
    logs: bool = False
    profiled: bool = False
    """There are figures of kernels."""
    caption: int = 0
    """Rows of a demo's caption."""


@dataclass(slots=True)
class Plan:
    """Where everything goes."""

    tiny: bool = False
    """No frames, and of all panels only the chat and the look-up, or what was asked for instead."""
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(columns, rows) of every widget that is shown, by its id; what is not in here is hidden."""
    stacked: frozenset[str] = frozenset()
    """Containers whose members are one above the other."""


def is_tiny(width: int, height: int, view: View) -> bool:
    """The terminal is too small for this view's panels."""
    return width < NARROW or height < (SMALL_OPS_ROWS if view == "ops" else SMALL_ROWS)


def arrange(asked: Asked) -> Plan:
    """The plan for this size, view and so on."""
    width, height = max(1, asked.width), max(1, asked.height)
    plan = Plan(is_tiny(width, height, asked.view))
    lines = _tiny_lines(asked, height) if plan.tiny else _lines(asked, width, height)
    for name, rows in lines.items():
        plan.sizes[name] = width, rows
    rows = height - sum(lines.values())
    if plan.tiny:
        _arrange_tiny(plan, asked, width, rows)
    elif width >= SIDE_BY_SIDE:
        _arrange_side(plan, asked, width, rows)
    else:
        _arrange_stack(plan, asked, width, rows)
    return plan


# ------------------------------------------------------------------------------------- single lines


def _lines(asked: Asked, width: int, height: int) -> dict[str, int]:
    lines = {"header": 1, "keys": 1}
    if asked.view != "ops":
        lines["step"] = 1
    if asked.live:
        talkative = height >= 28 and width >= SIDE_BY_SIDE and asked.view == "chat"
        lines |= {"ask": 1, "hint": 2 if height >= 32 or talkative else 1}
    if asked.caption and height >= SMALL_ROWS:
        lines["caption"] = asked.caption if height >= 24 else min(3, asked.caption)
    return lines


def _tiny_lines(asked: Asked, height: int) -> dict[str, int]:
    lines: dict[str, int] = {"ask": 1} if asked.live else {}
    if height >= 8:
        lines |= {"header": 1, "keys": 1}
        if asked.live:
            lines["hint"] = 1
    if asked.caption and height >= 12:
        lines["caption"] = min(3, asked.caption)
    return lines


# ------------------------------------------------------------------------------------- arrangements


def _arrange_tiny(plan: Plan, asked: Asked, width: int, rows: int) -> None:
    strip = min(3 if asked.height >= 8 else 2, max(0, rows - (rows > 2)))
    rows -= strip
    if strip:
        plan.sizes["strip-box"] = width, strip
    if asked.logs and rows >= 2:
        log = max(1, rows // 2) if rows < 8 else min(10, rows - 4)
        plan.sizes["log-box"] = width, log
        rows -= log
    if rows:
        plan.sizes |= {"top": (width, rows), "left": (width, rows)}
        detail = asked.selected and rows >= 2
        plan.sizes["detail-box" if detail else "chat-box"] = width, rows
    plan.stacked = frozenset({"top"})


def _arrange_side(plan: Plan, asked: Asked, width: int, rows: int) -> None:
    """Chat, map and queues next to each other; look-up, graphs and tables below."""
    view, chatty = asked.view, asked.view != "ops"
    queues, graphs = view != "chat", view != "chat"
    least = max(NEEDS[name].least for name in ("chat-box", "map-box", "queues-box"))
    if asked.logs or asked.selected:
        good = max(least, NEEDS["detail-box"].good)
    else:
        good = max(least, min(_TOP_GOOD[view], rows))
    bands = [("top", Need(least, good, _TOP_WANTS))]
    strip = NEEDS["strip-box"]
    if rows >= least + strip.wants:
        strip = strip._replace(least=strip.good)
    bands += [("strip-box", strip)] * chatty
    bands += [("log-box", NEEDS["log-box"])] * asked.logs
    bands += [(name, NEEDS[name]) for name in ("graphs", "tables") if graphs]
    given = share(rows, bands)
    top = given["top"]
    columns = {"left": (4, 2)[view == "ops"], "map-box": (5, 3)[view == "ops"], "side": (4, 2)[view == "ops"]}
    if not queues:
        columns = {"left": 2, "map-box": 3}
    elif not chatty and not asked.selected:
        del columns["left"]
    widths = split(width, columns.values())
    if view == "chat" and width < WIDE:
        widths = [42, width - 42]  # the map's 56 columns at 100
    wide = dict(zip(columns, widths, strict=True))
    plan.sizes["top"] = width, top
    plan.sizes["pool"] = width - wide.get("left", 0), top
    plan.sizes["map-box"] = wide["map-box"], top
    if "left" in wide:
        _fill_left(plan, asked, wide["left"], top)
    memory_below = False
    if queues:
        side = [("queues-box", NEEDS["queues-box"]), ("budget-box", NEEDS["budget-box"])]
        side.append(("memory-box", NEEDS["memory-box"]))
        if asked.profiled:
            side.append(("kernels-box", NEEDS["kernels-box"]))
        _stack(plan, "side", wide["side"], share(top, side))
        memory_below = "memory-box" not in plan.sizes
    if "graphs" in given:
        names = ["ttft-box", "itl-box", "memory-low-box" if memory_below else "throughput-box"]
        _row(plan, "graphs", names + ["device-box"] * (width >= WIDE), width, given["graphs"])
    if "tables" in given:
        names = ["cache-box", *["table-box"] * (width >= WIDE), "evictions-box", "events-box"]
        _row(plan, "tables", names, width, given["tables"])
    _bars(plan, given, width)


def _arrange_stack(plan: Plan, asked: Asked, width: int, rows: int) -> None:
    """One above the other. In view all, and where rows are few, the queues are next to the map."""
    chatty, queues = asked.view != "ops", asked.view != "chat"
    narrow_queues = queues and (chatty or rows < NEEDS["map-box"].least + NEEDS["queues-box"].least)
    bands = [("map-box", NEEDS["map-box"])]
    bands += [("left", NEEDS["detail-box" if asked.selected else "chat-box"])] * (chatty or asked.selected)
    bands += [("queues-box", NEEDS["queues-box"])] * (queues and not narrow_queues)
    bands += [("strip-box", NEEDS["strip-box"])] * chatty
    bands += [("log-box", NEEDS["log-box"])] * asked.logs
    bands += [(name, NEEDS[name]) for name in ("graphs", "tables") if queues]
    given = share(rows, bands)
    pool = given["map-box"]
    if narrow_queues:
        left, right = split(width, (1, 1))
        plan.sizes["map-box"] = left, pool
        _stack(plan, "side", right, {"queues-box": pool})
    else:
        plan.sizes["map-box"] = width, pool
        if "queues-box" in given:
            _stack(plan, "side", width, {"queues-box": given["queues-box"]})
            pool += given["queues-box"]
        plan.stacked |= {"pool"}
    plan.sizes["pool"] = width, pool
    plan.sizes["top"] = width, pool + given.get("left", 0)
    plan.stacked |= {"top"}
    if "left" in given:
        box = "detail-box" if asked.selected else "chat-box"
        _stack(plan, "left", width, {box: given["left"]})
    if "graphs" in given:
        _row(plan, "graphs", ["ttft-box", "itl-box"], width, given["graphs"])
    if "tables" in given:
        _row(plan, "tables", ["cache-box", "events-box"], width, given["tables"])
    _bars(plan, given, width)


# ------------------------------------------------------------------------------------------ parts


def _fill_left(plan: Plan, asked: Asked, width: int, rows: int) -> None:
    """The chat and a block's details; the details alone where there is no chat, or no room for both."""
    if not asked.selected:
        members = [("chat-box", NEEDS["chat-box"])]
    elif asked.view == "ops" or rows < NEEDS["chat-box"].good + NEEDS["detail-box"].good:
        members = [("detail-box", NEEDS["detail-box"]._replace(least=1))]
    else:
        members = [("chat-box", NEEDS["chat-box"]), ("detail-box", NEEDS["detail-box"])]
    _stack(plan, "left", width, share(rows, members))


def _stack(plan: Plan, container: str, width: int, heights: dict[str, int]) -> None:
    plan.sizes[container] = width, sum(heights.values())
    plan.sizes |= {name: (width, height) for name, height in heights.items()}


def _row(plan: Plan, container: str, names: Sequence[str], width: int, height: int) -> None:
    plan.sizes[container] = width, height
    for name, columns in zip(names, split(width, [1] * len(names)), strict=True):
        plan.sizes[name] = columns, height


def _bars(plan: Plan, given: dict[str, int], width: int) -> None:
    for name in ("strip-box", "log-box"):
        if name in given:
            plan.sizes[name] = width, given[name]


def share(rows: int, members: Sequence[tuple[str, Need]]) -> dict[str, int]:
    """Rows for each member that fits, all `rows` together. The first member is always there; FIRST says
    when another one joins."""
    first, need = members[0]
    given = {first: min(rows, need.least)}
    left = rows - given[first]
    needs = dict(members)
    for name, need in members[1:]:
        wished = sum(max(0, needs[other].good - given[other]) for other in given)
        if left - (0 if name in FIRST else wished) >= need.least:
            given[name] = need.least
            left -= need.least
        elif name not in FIRST:
            break
    for name in given:
        more = max(0, min(left, needs[name].good - given[name]))
        given[name] += more
        left -= more
    for name in given:
        more = max(0, min(left, needs[name].wants - given[name])) if needs[name].wants < ALL else 0
        given[name] += more
        left -= more
    growing = [name for name in given if needs[name].wants == ALL] or [first]
    for name, more in zip(growing, split(left, [1] * len(growing)), strict=True):
        given[name] += more
    return given


def split(cells: int, parts: Iterable[int]) -> list[int]:
    """`cells` in proportion to `parts`, all of them given out."""
    parts = list(parts)
    out: list[int] = []
    for place, part in enumerate(parts):
        out.append(cells * part // sum(parts[place:]))
        cells -= out[-1]
    return out
