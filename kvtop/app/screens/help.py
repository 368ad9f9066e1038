"""Help: what the keys do, how to read the map, and what each figure means.

F1 opens it; with a panel focused that panel's own figures come first. Owns no definition: a widget's
FIGURES (or kvtop.app.screens.figures) hold its own, the bindings hold the keys. Invariant: the text is read from
the widgets and bindings of the screen below, so it is never out of date.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rich.style import Style
from textual.app import App, ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Input

from kvtop.app.screens.figures import FIGURES, Definition
from kvtop.terminal.textual_door import draw_frames
from kvtop.widgets.base.lines import Part, Row
from kvtop.widgets.base.panel import Scrolling

if TYPE_CHECKING:
    from textual.binding import ActiveBinding

    from kvtop.state.dashboard import DashboardState

MAP: tuple[tuple[str, str, str], ...] = (
    ("free", "·", "free: it holds nothing that a later prompt could use; it is given out first"),
    ("filling", "▁▃▅", "filling: one request writes here; the height shows how many slots are written"),
    ("active", "█", "active: full, and one request refers to it"),
    ("shared", "2..9", "shared: this number of requests or branches refer to the same physical block"),
    ("hit", "◆", "hit: a running request read it from the cache instead of computing it"),
    ("cached", "▒", "cached: no request refers to it, but its content can still be found by its hash"),
    ("evicted", "×", "evicted: its content was just thrown out, because its memory was needed"),
)
"""(palette entry, glyph, meaning), in the order of a block's life."""

ABOUT_BLOCKS = (
    "A block is a fixed piece of memory for the keys and values of a few tokens (16 unless --block-size says "
    "otherwise). A prompt is cut into blocks; each full block gets a hash that covers its tokens and all "
    "before them. A new prompt asks for its hashes from the left: blocks that are found are read, and the "
    "first one that is missing is where computing starts. When a request ends its blocks become cached, not "
    "free; the one unused for longest goes first when memory is needed."
)


WORDS: tuple[Definition, ...] = (
    ("null block", "Block 0. It holds nothing and is never given out: 545 of 546 blocks can be used."),
    (
        "look-up",
        "A new prompt's search for its full blocks in the prefix cache, from the left to the first miss.",
    ),
    ("template", "What the model's chat template puts around the turns; the same tokens in every prompt."),
    ("history", "Earlier turns of the same conversation, which come before each new one."),
    ("chunk", "The part of a prompt that one step computes; long prompts take several (chunked prefill)."),
    ("decode, prefill", "Generating, one token a step; computing the prompt before that."),
    (
        "preempted",
        "The request lost its blocks because others needed the memory; it computes them again later.",
    ),
    (
        "salt",
        "A word in the hash of a prompt's first block: only prompts with the same salt share blocks.",
    ),
    ("cut at n tokens", "The answer reached max_tokens or the end of the context, not an end of its own."),
)
"""What the screen says without room to explain it."""


_FUNCTION = re.compile(r"f\d+")


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with definitions under it, or with a paragraph."""

    title: str
    entries: tuple[Definition, ...] = ()
    text: str = ""


class HelpScreen(ModalScreen[None]):
    """Over whatever is shown; Esc, q or F1 closes it."""

    DEFAULT_CSS = """
    HelpScreen { align: center middle; background: $background 60%; }
    HelpScreen > Vertical {
        width: 90%; height: 90%; max-width: 110;
        border: round $primary; border-title-color: $primary; border-subtitle-color: $text-muted;
        background: $surface; padding: 0 1;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,f1,question_mark", "dismiss", "Close", priority=True),
    ]

    def __init__(self, sections: Sequence[Section]) -> None:
        super().__init__()
        draw_frames(self)
        self.sections = tuple(sections)

    @classmethod
    def over(cls, screen: Screen[Any]) -> HelpScreen:
        """Help for what `screen` shows now, its focused widget first."""
        return cls(sections(screen))

    def compose(self) -> ComposeResult:
        """One scrolling list."""
        with Vertical() as frame:
            frame.border_title = "help"
            frame.border_subtitle = "↑ ↓ scroll   Esc close"
            yield HelpText(self.sections)

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close, if that has not happened yet."""
        return super().dismiss(result) if self.app.screen is self else AwaitComplete()

    def on_mount(self) -> None:
        """The list takes the arrow keys."""
        self.query_one(HelpText).focus()


class HelpText(Scrolling):
    """The sections, wrapped to the width. Nothing in it depends on the state, so it paints itself."""

    TITLE = "help"

    def __init__(self, sections: Sequence[Section]) -> None:
        super().__init__()
        self.sections = sections

    def on_mount(self) -> None:
        """First drawing."""
        self.call_after_refresh(self.draw)

    def on_resize(self) -> None:
        """Wrap anew."""
        self.draw()

    def forget(self) -> None:
        """Theme or size changed."""
        super().forget()
        if self.is_attached:
            self.call_after_refresh(self.draw)

    def changed(self) -> None:
        """Another place."""
        self.draw()

    def paint(self, state: DashboardState, now: float) -> None:
        """Not by the clock."""

    def draw(self) -> None:
        """Show the rows from `first` on."""
        width, height = self.size
        if width and height:
            text = list(self.all_rows(width))
            self.set_rows([text[i] for i in self.window(len(text), height)])

    def all_rows(self, width: int) -> Iterable[Row]:
        """Every row at this width."""
        title, plain = self.ink("primary") + Style(bold=True), Style.null()
        for place, section in enumerate(self.sections):
            if place:
                yield ()
            yield ((section.title, title),)
            for line in textwrap.wrap(section.text, max(10, width - 1)):
                yield ((line, plain),)
            yield from self._entries(section, width)

    def _entries(self, section: Section, width: int) -> Iterable[Row]:
        column = min(max((len(name) for name, _ in section.entries), default=0) + 2, max(6, width // 3))
        looks = {glyph: self.ink(name) for name, glyph, _ in MAP}
        key = self.ink("accent")
        for name, meaning in section.entries:
            lines = textwrap.wrap(meaning, max(10, width - column)) or [""]
            label: Part = (name.ljust(column), looks.get(name, key))
            if len(name) >= column:
                yield ((name, label[1]),)
                label = (" " * column, label[1])
            yield (label, (lines[0], Style.null()))
            for line in lines[1:]:
                yield ((" " * column + line, Style.null()),)


def sections(screen: Screen[Any]) -> list[Section]:
    """The focused widget's figures, the map, the keys that work now, then all figures on the screen."""
    focused = screen.focused
    out: list[Section] = []
    if focused is not None and _figures(focused):
        out.append(Section(f"{_title(focused)} (focused)", _figures(focused)))
    out.append(Section("How to read the map", tuple((glyph, text) for _, glyph, text in MAP), ABOUT_BLOCKS))
    out.append(Section("Keys", tuple(keys(screen))))
    own = tuple(keys(screen, editing=True))
    if own:
        out.append(Section("Keys while typing", own))
    seen: set[type] = (
        {type(focused)} if out[0].entries and focused is not None and _figures(focused) else set()
    )
    for widget in screen.walk_children(Widget):
        if _figures(widget) and type(widget) not in seen:
            seen.add(type(widget))
            out.append(Section(_title(widget), _figures(widget)))
    return [*out, Section("Words", WORDS)]


def keys(screen: Screen[Any], editing: bool = False) -> list[Definition]:
    """(keys, what they do) for each action that can be run now: function keys, then the dashboard's own, then
    those of the focused widget; `editing`: instead of these those of a line of input."""
    found: dict[str, tuple[list[str], str]] = {}
    active_now = [a for a in screen.active_bindings.values() if isinstance(a.node, Input) == editing]
    for active in sorted(active_now, key=_rank):
        binding = active.binding
        if not active.enabled or not (binding.description or binding.tooltip):
            continue
        names, _ = found.setdefault(binding.action, ([], binding.tooltip or binding.description))
        name = screen.app.get_key_display(binding)
        names.append(name.upper() if _FUNCTION.fullmatch(name) else name)
    return [(" ".join(dict.fromkeys(names)), text) for names, text in found.values()]


def _rank(active: ActiveBinding) -> int:
    if _FUNCTION.fullmatch(active.binding.key):
        return 0
    return 1 if isinstance(active.node, App | Screen) else 2


def _figures(widget: Widget) -> tuple[Definition, ...]:
    own: tuple[Definition, ...] = getattr(widget, "FIGURES", ())
    return own or FIGURES.get(type(widget), ("", ()))[1]


def _title(widget: Widget) -> str:
    return getattr(widget, "TITLE", "") or FIGURES.get(type(widget), ("", ()))[0]
