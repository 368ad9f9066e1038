"""Pictures: the right size, the right pixels, the same bytes every time."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import pytest
from PIL import Image
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from textual.app import App, ComposeResult
from textual.strip import Strip
from textual.widgets import Static

from kvtop.picture.cells import CELL, PictureError
from kvtop.picture.frame import grid_of, render, to_txt
from kvtop.picture.glyphs import Polygon, Rect, Shade, Stroke, shapes
from kvtop.picture.png import to_png
from kvtop.picture.svg import to_svg

W, H = CELL
BG, FG, RED, BLUE = (10, 20, 30), (200, 210, 220), (255, 0, 0), (0, 0, 255)
ANSI = [(i, i, i) for i in range(16)]
THEME = TerminalTheme(BG, FG, ANSI[:8], ANSI[8:])
RED_ON_BLUE = Style(color="#ff0000", bgcolor="#0000ff")


def png(*rows: list[tuple[str, Style]], width: int = 4) -> Image.Image:
    strips = [Strip([Segment(text, style) for text, style in row]) for row in rows]
    return Image.open(io.BytesIO(to_png(grid_of(strips, THEME, width, len(rows)))))


def cell(image: Image.Image, x: int, y: int) -> Image.Image:
    return image.crop((x * W, y * H, (x + 1) * W, (y + 1) * H))


def colours(image: Image.Image) -> dict[tuple[int, ...], int]:
    found = image.getcolors(10_000)
    assert found is not None
    return {colour: n for n, colour in found}  # type: ignore[misc]


def test_a_cell_is_a_cell() -> None:
    image = png([("ab", RED_ON_BLUE)], [], width=7)
    assert image.size == (7 * W, 2 * H)
    assert colours(cell(image, 6, 0)) == {BG: W * H}
    assert colours(cell(image, 0, 1)) == {BG: W * H}


@pytest.mark.parametrize(
    ("glyph", "box"),
    [
        ("█", (0, 0, W, H)),
        ("▀", (0, 0, W, H // 2)),
        ("▄", (0, H // 2, W, H)),
        ("▌", (0, 0, W // 2, H)),
        ("▐", (W // 2, 0, W, H)),
        ("▁", (0, H - 2, W, H)),
        ("▆", (0, H - 15, W, H)),
        ("▗", (W // 2, H // 2, W, H)),
        ("─", (0, 9, W, 10)),
        ("━", (0, 9, W, 11)),
        ("│", (4, 0, 5, H)),
        ("⠁", (1, 1, 3, 3)),
        ("⢀", (6, 16, 8, 18)),
    ],
)
def test_blocks_are_drawn_exactly(glyph: str, box: tuple[int, int, int, int]) -> None:
    image = png([(glyph, RED_ON_BLUE)], width=1)
    area = (box[2] - box[0]) * (box[3] - box[1])
    assert colours(image) == {RED: area} | ({BLUE: W * H - area} if area < W * H else {})
    assert colours(image.crop(box)) == {RED: area}


def test_shades_cover_their_quarters_without_a_seam() -> None:
    for glyph, quarters in (("░", 1), ("▒", 2), ("▓", 3)):
        image = png([(glyph * 2, RED_ON_BLUE)], width=2)
        assert colours(image)[RED] == 2 * W * H * quarters // 4
        assert cell(image, 0, 0).tobytes() == cell(image, 1, 0).tobytes()


def test_boxes_meet_at_the_cells_edges() -> None:
    image = png([("╭╮", RED_ON_BLUE)], [("╰╯", RED_ON_BLUE)], width=2)
    assert image.getpixel((W - 1, 9)) == RED == image.getpixel((W, 9))
    assert image.getpixel((4, H - 1)) == RED == image.getpixel((4, H))
    cross = png([("╬┼", RED_ON_BLUE)], width=2)
    assert cross.getpixel((W - 1, 8)) == RED == cross.getpixel((W - 1, 10))
    assert cross.getpixel((W + 4, 0)) == RED == cross.getpixel((W + 4, H - 1))


def test_looks_of_a_style() -> None:
    swapped = png([("█", Style(color="#ff0000", bgcolor="#0000ff", reverse=True))], width=1)
    assert colours(swapped) == {BLUE: W * H}
    dim = png([("█", Style(color="#ff0000", bgcolor="#0000ff", dim=True))], width=1)
    assert colours(dim) == {(127, 0, 127): W * H}
    lined = png([("  ", Style(color="#ff0000", bgcolor="#0000ff", underline=True))], width=2)
    assert colours(lined)[RED] == 2 * W
    native = png([("█", Style(color="color(3)"))], width=1)
    assert colours(native) == {(3, 3, 3): W * H}
    plain = png([("█", Style())], width=1)
    assert colours(plain) == {FG: W * H}


def test_letters_stay_in_their_cells() -> None:
    image = png([(" ", RED_ON_BLUE), ("M", RED_ON_BLUE), (" ", RED_ON_BLUE)], width=3)
    assert colours(cell(image, 0, 0)) == {BLUE: W * H} == colours(cell(image, 2, 0))
    assert len(colours(cell(image, 1, 0))) > 2
    bold = png([("M", RED_ON_BLUE + Style(bold=True))], width=1)
    assert bold.tobytes() != cell(image, 1, 0).tobytes()


def test_wide_and_unknown_characters_keep_the_grid() -> None:
    image = png([("日█", RED_ON_BLUE)], width=3)
    assert colours(cell(image, 2, 0)) == {RED: W * H}
    assert len(colours(png([("\U0010fff0", RED_ON_BLUE)], width=1))) > 1


def test_every_block_box_and_braille_glyph_has_a_shape() -> None:
    for code in (*range(0x2580, 0x25A0), *range(0x2800, 0x2900)):
        drawn = shapes(chr(code), W, H)
        assert drawn is not None
        assert all(isinstance(s, Rect | Shade) for s in drawn)
        for s in drawn:
            if isinstance(s, Rect):
                assert 0 <= s.x0 < s.x1 <= W
                assert 0 <= s.y0 < s.y1 <= H
    known = [shapes(chr(code), W, H) for code in range(0x2500, 0x2580)]
    assert sum(s is not None for s in known) >= 60
    assert isinstance(shapes("◆", W, H)[0], Polygon)  # type: ignore[index]
    assert isinstance(shapes("×", W, H)[0], Stroke)  # type: ignore[index]
    assert shapes("a", W, H) is None


def test_text_has_lines_without_trailing_blanks() -> None:
    strips = [Strip([Segment("ab  ", Style()), Segment("c ", Style())]), Strip([Segment("  ", Style())])]
    assert to_txt(grid_of(strips, THEME, 6, 2)) == b"ab  c\n\n"


def test_svg_is_wellformed_and_keeps_the_grid() -> None:
    strips = [Strip([Segment("a<&b ██▒◆", RED_ON_BLUE), Segment("日", Style(bold=True, italic=True))])]
    root = ET.fromstring(to_svg(grid_of(strips, THEME, 12, 1)))
    assert (root.get("width"), root.get("height")) == (str(12 * W), str(H))
    space = "{http://www.w3.org/2000/svg}"
    texts = root.findall(f"{space}text")
    assert [(t.text, t.get("x"), t.get("textLength")) for t in texts] == [
        ("a<&b", "0", str(4 * W)),
        ("日", str(9 * W), str(2 * W)),
    ]
    assert (texts[1].get("font-weight"), texts[1].get("font-style")) == ("bold", "italic")
    paths = [p.get("d") or "" for p in root.findall(f"{space}path")]
    assert paths[0] == "M50 0h20v20h-20z"  # two full blocks are one box
    assert paths[1] == "M70 0h10v20h-10z"
    assert paths[2].startswith("M85 4l")
    assert len(paths) == 3


class Screen(App[None]):
    def compose(self) -> ComposeResult:
        yield Static("◆◆▒▒██ [b]bold[/] · first word after 41 ms")


@pytest.mark.parametrize("kind", ["txt", "svg", "png"])
async def test_the_same_screen_gives_the_same_bytes(kind: str) -> None:
    seen = set()
    for _ in range(2):
        app = Screen()
        async with app.run_test(size=(50, 4)) as pilot:
            await pilot.pause()
            seen.add(render(app, kind))
    assert len(seen) == 1


async def test_an_unknown_format_is_one_line() -> None:
    app = Screen()
    async with app.run_test(size=(5, 2)) as pilot:
        await pilot.pause()
        with pytest.raises(PictureError, match="no such picture format: 'gif'; take one of txt, svg, png"):
            render(app, "gif")
