"""BlockDetail: everything that is known about one block.

Owns the wording of each figure. A block without content says so; a text that a redacted recording does not
have reads "not in this source".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.style import Style

from kvtop.state.blocks import BlockInfo, BlockState
from kvtop.text import cut, safe_text
from kvtop.units import NOT_HERE, count, span
from kvtop.widgets.base.lines import Lines, Part
from kvtop.wrap import wrap

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

_OWNERS = 4


class BlockDetail(Lines):
    """Shows block `block`, nothing while it is None."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.block: int | None = None

    @property
    def title(self) -> str:
        """For the border of the box around it."""
        return "block" if self.block is None else f"block {self.block:,}"

    def paint(self, state: DashboardState, now: float) -> None:
        """Names left, values right; the text takes what height is left."""
        width, height = self.size
        if self.block is None or not 0 < self.block < state.num_blocks or not width:
            self.set_rows([])
            return
        info = state.block(self.block)
        muted = self.ink("muted")
        rows: list[list[Part]] = []
        for name, value, style in self._figures(state, info, now):
            rows.append([(f"{name:<8}", muted), (cut(value, max(0, width - 8)), style)])
        text = self._text(state, info)
        lines = wrap(text, max(1, width - 8))
        for n, (start, end) in enumerate(lines[: max(0, height - len(rows))]):
            rows.append(
                [("text    " if n == 0 else " " * 8, muted), (text[start:end], Style(italic=not info.text))]
            )
        self.set_rows(rows)

    def _figures(self, state: DashboardState, info: BlockInfo, now: float) -> list[tuple[str, str, Style]]:
        text = Style.null()
        owners = ", ".join(f"#{rid if rid is not None else '?'}[{i}]" for rid, i in info.owners[:_OWNERS])
        if len(info.owners) > _OWNERS:
            owners += f" and {len(info.owners) - _OWNERS} more"
        if not owners and info.last_owner is not None and info.hash is not None:
            owners = f"last #{info.last_owner}"
        name = info.state.name.lower()
        refs = f"{info.ref} ref{'s' * (info.ref != 1)}" + (f" · {owners}" if owners else "")
        chain = "none yet: only full blocks have one" if info.hash is None else info.hash[:8]
        if info.hash is not None and info.parent is not None:
            chain += f"   after {info.parent[:8]}"
        empty = info.state == BlockState.FREE and info.hash is None
        age = f"{span(max(0.0, info.age_s + now - state.t))}   read {count(info.hits)}×"
        place = "in use: cannot be taken" if info.eviction_place is None else self._place(info)
        return [
            ("state", f"{name} · {info.fill} of {state.block_size} slots filled", self.ink(name)),
            ("refs", refs, text),
            ("hash", chain, text),
            ("age", "holds nothing that could be found" if empty else age, text),
            ("evict", place, text),
        ]

    def _place(self, info: BlockInfo) -> str:
        place = info.eviction_place or 0
        order = "next to go" if place == 0 else f"{count(place)} go first"
        return order + (", then it is lost" if info.hash is not None else "")

    def _text(self, state: DashboardState, info: BlockInfo) -> str:
        if info.text:
            return safe_text(info.text)
        if info.hash is not None and "text" not in (state.started.capabilities if state.started else ()):
            return NOT_HERE
        return NOT_HERE if info.hash is not None else "no content"
