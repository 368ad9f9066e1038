"""NO_COLOR: not one colour leaves the program, under any theme, and the states can still be read."""

from __future__ import annotations

import pytest
from rich.segment import Segment

from kvtop.paint import themes
from kvtop.terminal.textual_door import shown_strips
from tests.kvtop.screen import Show, show
from tests.kvtop.stage import Stage

PAGE = " ".join(f"note{i} on the engine" for i in range(250))


def coloured(shown: Show) -> list[Segment]:
    """Segments of the screen, after Textual's filters, that bring a colour of their own."""
    return [
        segment
        for strip in shown_strips(shown.app)
        for segment in strip
        if segment.style
        for colour in (segment.style.color, segment.style.bgcolor)
        if colour is not None and not colour.is_default
    ]


@pytest.fixture(scope="module")
def stage() -> Stage:
    stage = Stage()
    for question in ("who was she?", "what did she write?"):
        stage.submit(question, PAGE)
        stage.run()
    return stage


@pytest.mark.parametrize("theme", [None, "kvtop-dark", "kvtop-light", "mono", "dracula"])
async def test_no_colour_is_sent(monkeypatch: pytest.MonkeyPatch, stage: Stage, theme: str | None) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with show((100, 30), stage.batches, theme=theme) as shown:
        assert shown.app.theme == (theme or "ansi")
        assert coloured(shown) == []
        assert "READ 992 of 1,006 tokens from cache" in shown.text
        assert "▒" in shown.text


async def test_small_terminals_keep_one_glyph_a_cell(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    """Two pixels in a cell need two colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    async with show((80, 24), stage.batches) as shown:
        assert "▀" not in shown.text
        assert "▒" in shown.text


async def test_with_colour_there_is_some(stage: Stage) -> None:
    async with show((100, 30), stage.batches) as shown:
        assert shown.app.theme == themes.DEFAULT
        assert coloured(shown)
