"""Help: the focused panel first, the map, the keys that work now, every figure on the screen."""

from __future__ import annotations

from typing import ClassVar

import pytest
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType

from kvtop.app.app import KvtopApp
from kvtop.app.screens.help import MAP, HelpScreen, HelpText, sections
from kvtop.options import Options
from kvtop.paint import themes
from kvtop.paint.palette import Palette
from kvtop.picture.shot import _Nothing
from kvtop.play.session import Session
from kvtop.widgets.map.block_map import GLYPHS
from kvtop.widgets.ops.budget import BudgetPanel
from kvtop.widgets.ops.device import DevicePanel
from kvtop.widgets.ops.latency import TtftPanel
from tests.kvtop.app.test_live import live


class Under(App[None]):
    """Three panels and some keys."""

    AUTO_FOCUS = None
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "explain", "Help"),
        Binding("space,p", "pause", "Pause", tooltip="Freeze the display; the engine runs on"),
        Binding("ctrl+y", "secret", "", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        chosen = themes.find("kvtop-dark")
        self.palette: Palette = themes.palette(chosen)
        self.register_theme(chosen)
        self.theme = chosen.name

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.defaults(True)

    def compose(self) -> ComposeResult:
        yield BudgetPanel()
        yield TtftPanel()
        yield DevicePanel()

    def action_explain(self) -> None:
        self.push_screen(HelpScreen.over(self.screen))

    def action_pause(self) -> None:
        """Nothing."""

    def action_secret(self) -> None:
        """Nothing."""


async def test_the_focused_panel_comes_first_and_only_once() -> None:
    app = Under()
    async with app.run_test(size=(100, 30)) as pilot:
        app.query_one(TtftPanel).focus()
        await pilot.pause()
        found = sections(app.screen)
        assert found[0].title == "TTFT · time to first token (focused)"
        assert found[0].entries == TtftPanel.FIGURES
        assert [s.title for s in found[1:]] == [
            "How to read the map",
            "Keys",
            BudgetPanel.TITLE,
            DevicePanel.TITLE,
            "Words",
        ]


async def test_without_a_focused_panel_the_map_comes_first() -> None:
    app = Under()
    async with app.run_test(size=(100, 30)):
        titles = [s.title for s in sections(app.screen)]
        assert titles[:2] == ["How to read the map", "Keys"]
        assert TtftPanel.TITLE in titles


async def test_keys_are_those_that_work_now() -> None:
    app = Under()
    async with app.run_test(size=(100, 30)) as pilot:
        keys = dict(next(s.entries for s in sections(app.screen) if s.title == "Keys"))
        assert keys["space p"] == "Freeze the display; the engine runs on"
        assert keys["F1"] == "Help"
        assert "l" not in keys
        assert not any("secret" in text for text in keys.values())
        app.query_one(TtftPanel).focus()
        await pilot.pause()
        keys = dict(next(s.entries for s in sections(app.screen) if s.title == "Keys"))
        assert keys["l"] == "log axis"


async def test_f1_opens_and_esc_closes() -> None:
    app = Under()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("f1")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)
        text = app.screen.query_one(HelpText)
        assert text.lines[0].startswith("How to read the map")
        before = text.lines[0]
        await pilot.press("end")
        await pilot.pause()
        assert text.lines[0] != before
        assert "from the driver" in "\n".join(text.lines)
        await pilot.press("home")
        await pilot.pause()
        assert text.lines[0] == before
        await pilot.press("escape")
        await pilot.pause()
        assert not isinstance(app.screen, HelpScreen)


@pytest.mark.parametrize("size", [(1, 1), (12, 4), (50, 15), (80, 24), (200, 60)])
async def test_help_fits_every_size(size: tuple[int, int]) -> None:
    app = Under()
    async with app.run_test(size=size) as pilot:
        await pilot.press("f1")
        await pilot.pause()
        text = app.screen.query_one(HelpText)
        width = text.size.width
        if width >= 20:
            for row in text.all_rows(width):
                assert sum(len(part) for part, _ in row) <= width
        await pilot.press("down", "pagedown", "escape")


async def test_every_figure_of_the_default_view_is_defined() -> None:
    app = KvtopApp(Session(_Nothing("0 s"), Options()))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("f1")
        await pilot.pause()
        screen = app.screen
        assert isinstance(screen, HelpScreen)
        assert screen.sections[0].title == "KV pool (focused)"
        titles = [s.title for s in screen.sections]
        assert {"top line", "chat", "lookup", "step", "queues", "prefix cache"} <= set(titles)
        assert len(titles) == len(set(titles))
        named = {name for s in screen.sections for name, _ in s.entries}
        assert {"hit", "tok/s", "READ n of m", "first word", "ITL", "next out"} <= named


def test_the_legend_is_the_maps() -> None:
    known = set(GLYPHS.values())
    for name, glyphs, meaning in MAP:
        assert meaning.startswith(name)
        assert all(g in known or g in "2..9" for g in glyphs)


async def test_keys_begin_with_function_keys_and_editing_comes_last() -> None:
    """Not with thirty keys that move a cursor."""
    async with live() as shown:
        found = sections(shown.app.screen)
        titles = [section.title for section in found]
        keys_, editing = (found[titles.index(t)].entries for t in ("Keys", "Keys while typing"))
        assert [name for name, _ in keys_[:4]] == ["F1", "F2", "F3", "F4"], (
            "letters act once Esc has left the prompt"
        )
        assert len(editing) > 5
        assert not {text for _, text in keys_} & {text for _, text in editing}
        words = dict(found[titles.index("Words")].entries)
        assert {"null block", "template", "salt"} <= set(words)
