"""Palette: the colours of the current theme as Rich styles, for widgets that paint their own lines.

Owns how a name becomes a style. Invariants: an ink can be read on the theme's background, whatever colour the theme
gives. An area has exactly the theme's colour, so that the measured differences between states are kept. Without
colours (NO_COLOR) font weight is used instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.style import Style
from textual.color import BLACK, WHITE, Color

GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "blocks": ("block", ("free", "cached", "filling", "active", "shared", "evicted")),
    "marks": ("mark", ("hit", "copy", "select")),
    "graphs": ("graph", ("ttft", "itl", "decode", "prefill", "hit", "device")),
}
"""Tables of a theme file in addition to [colors]: prefix of the theme variables, and the keys."""

VARIABLES = tuple(f"{prefix}-{key}" for prefix, keys in GROUPS.values() for key in keys)
"""kvtop's own theme variables: `block-free`, …, written `$block-free` in tcss."""

BLOCKS = ("free", "cached", "filling", "active", "shared")
"""Names in the order of BlockState."""

_THEME = ("primary", "secondary", "accent", "warning", "error", "success", "background", "surface", "panel")
_READABLE = 3.5
"""Least contrast of an ink to its background. WCAG 2.1 requires 3 for graphics and 4.5 for text."""
_RECEDES = 2.4
"""The same for the dot of a free block. It may be weaker: there are hundreds, and they hold nothing."""

_DIM, _BOLD, _REVERSE = Style(dim=True), Style(bold=True), Style(reverse=True)
_WEIGHTS: Mapping[str, Style] = {
    "muted": _DIM,
    "free": _DIM,
    "cached": Style.null(),
    "active": _BOLD,
    "shared": _BOLD,
    "hit": _BOLD,
    "evicted": _BOLD,
}


def contrast(a: Color, b: Color) -> float:
    """WCAG 2 contrast ratio of two colours, 1 to 21."""

    def luminance(colour: Color) -> float:
        linear = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in colour.normalized)
        return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    lighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


class Palette:
    """Styles by name.

    Names: a key of the theme's tables (`free`, `hit`, `ttft`; the graph's colour is `graph-hit`, because `hit` is the
    mark), Textual's colours (`primary`, `error`, …), `text`, `muted` and `title` (bold).
    """

    def __init__(
        self, name: str, dark: bool, native: bool, variables: Mapping[str, str], no_color: bool
    ) -> None:
        """variables: CSS colours by theme variable. native: the colours are the terminal's own 16. no_color: NO_COLOR
        is set."""
        self.name = name
        self.dark = dark
        self.native = native
        self.colourless = no_color
        """There are no colours. Two states in one cell could not be distinguished, so a cell has one glyph."""
        self._colours = {name: _parse(variables[name]) for name in (*VARIABLES, *_THEME)}
        self.hueless = no_color or all(self._colours[f"block-{n}"].hsl.s < 0.1 for n in BLOCKS)
        """The states differ only in glyph and brightness, so a colour swatch does not show which state it is."""
        for prefix, keys in GROUPS.values():
            for key in keys:
                self._colours.setdefault(key, self._colours[f"{prefix}-{key}"])
        self._colours["text"] = _parse(variables["foreground"])
        self._colours["title"] = self._colours["primary"]
        self._colours["muted"] = _mix(self._colours["text"], self._colours["background"], 0.4)
        self._styles: dict[tuple[str, ...], Style] = {}
        self.blocks = tuple(self[name] for name in BLOCKS)
        """Inks by BlockState."""

    def __getitem__(self, name: str) -> Style:
        """A foreground colour that can be read on the background."""
        style = self._styles.get((name,))
        if style is None:
            style = Style(color=self._readable(name).rich_color)
            if name == "muted" and self.native:
                style = _DIM  # the terminal's grey may be its background
            if name == "title":
                style += _BOLD
            if self.colourless:
                style = _WEIGHTS.get(name, style)
            self._styles[name,] = style
        return style

    def area(self, name: str) -> Style:
        """A background of exactly the theme's colour. The foreground is not set."""
        return Style(bgcolor=self._colours[name].rich_color)

    def pair(self, top: str, bottom: str) -> Style:
        """Two pixels in one cell (`▀`), in exactly the theme's colours."""
        style = self._styles.get((top, bottom))
        if style is None:
            style = Style(color=self._colours[top].rich_color, bgcolor=self._colours[bottom].rich_color)
            self._styles[top, bottom] = style
        return style

    def on(self, name: str) -> Style:
        """Text that can be read on an area of this colour, for badges and selections."""
        if self.colourless:
            return _REVERSE
        colour = self._colours[name]
        if colour.ansi is not None:
            return Style(color=colour.rich_color, reverse=True)
        ink = max(WHITE, BLACK, key=lambda other: contrast(colour, other))
        return Style(color=ink.rich_color, bgcolor=colour.rich_color)

    def mix(self, name: str, other: str, share: float) -> Style:
        """A colour between two colours; share 0..1. Native colours switch in the middle."""
        return Style(color=_mix(self._colours[name], self._colours[other], share).rich_color)

    def colour(self, name: str) -> Color:
        """The theme's exact colour."""
        return self._colours[name]

    def _readable(self, name: str) -> Color:
        """The colour, moved towards the text colour until it has enough contrast to the background."""
        colour, background, text = (self._colours[key] for key in (name, "background", "text"))
        least = _RECEDES if name in ("free", "block-free") else _READABLE
        if any(c.ansi is not None for c in (colour, background, text)):
            return colour
        for step in range(11):
            moved = colour.blend(text, step / 10)
            if contrast(background, moved) >= least:
                return moved
        return text


def _parse(css: str) -> Color:
    colour = Color.parse(css)
    return Color.parse("ansi_default") if colour.a == 0 and colour.ansi is None else colour


def _mix(a: Color, b: Color, share: float) -> Color:
    if a.ansi is not None or b.ansi is not None:
        return a if share < 0.5 else b
    return a.blend(b, share)
