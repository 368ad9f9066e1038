"""Themes: every file is complete, its states can be reported apart by every eye, and a wrong one says where."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from textual.app import App, ComposeResult
from textual.color import Color
from textual.widgets import Static

from engine import SetupError
from kvtop.paint import themes
from kvtop.paint.palette import BLOCKS, VARIABLES, contrast
from kvtop.settings import data_folder

FILES = sorted(data_folder("themes").glob("*.toml"))
STATES = ("free", "cached", "active", "shared", "evicted")

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
EYES = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE_D65 = np.array([0.95047, 1.0, 1.08883])

LEAST_STATES = 30.0
"""Two block states, as CIE76 distance under any of EYES. Just noticeable is 2.3; half cells need far more."""
LEAST_ALL = 20.0
"""As LEAST_STATES, with the two that have a glyph of their own wherever they show: filling and hit."""
LEAST_GREY = 9.0
"""Between neighbours in lightness L*, for paper, greyscale and NO_COLOR's greys."""


def lab(css: str, eye: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIE L*a*b* of a colour as an eye sees it."""
    rgb = np.array(Color.parse(css).rgb) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(eye @ linear, 0, 1) / WHITE_D65
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def least(colours: dict[str, str]) -> tuple[float, str]:
    return min(
        (float(np.linalg.norm(lab(colours[a], eye) - lab(colours[b], eye))), f"{a}/{b} under {name}")
        for name, eye in EYES.items()
        for a, b in combinations(colours, 2)
    )


def grey_gap(colours: dict[str, str]) -> float:
    return float(np.diff(sorted(lab(css, EYES["all cones"])[0] for css in colours.values())).min())


def states(path: Path) -> dict[str, str]:
    variables = themes.load(path).variables
    return {name: variables[f"block-{name}"] for name in STATES}


def test_there_are_the_four() -> None:
    assert {path.stem for path in FILES} >= {"kvtop-dark", "kvtop-light", "mono", "ansi"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_packaged_files_are_complete(path: Path) -> None:
    theme = themes.load(path)
    assert theme.name == path.stem
    assert set(VARIABLES) <= set(theme.variables)


COLOURFUL = [path for path in FILES if not themes.load(path).ansi and path.stem != "mono"]


@pytest.mark.parametrize("path", COLOURFUL, ids=lambda path: path.stem)
def test_every_eye_tells_the_states_apart(path: Path) -> None:
    colours = states(path)
    distance, pair = least(colours)
    assert distance >= LEAST_STATES, pair
    variables = themes.load(path).variables
    more = colours | {"filling": variables["block-filling"], "hit": variables["mark-hit"]}
    distance, pair = least(more)
    assert distance >= LEAST_ALL, pair
    assert grey_gap(colours) >= LEAST_GREY


def test_the_default_keeps_the_measured_ramp() -> None:
    path = data_folder("themes") / "kvtop-dark.toml"
    assert list(states(path).values()) == ["#1f232a", "#2a5db0", "#4cc3d9", "#fff2a8", "#e0592a"]
    assert least(states(path))[0] >= 37
    assert grey_gap(states(path)) >= 14.9


def test_mono_is_grey_in_even_steps() -> None:
    path = data_folder("themes") / "mono.toml"
    theme = themes.load(path)
    assert all(len(set(Color.parse(css).rgb)) == 1 for css in theme.variables.values())
    assert grey_gap(states(path)) >= 18


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_ink_can_be_read(path: Path) -> None:
    palette = themes.palette(themes.load(path))
    background = palette.colour("background")
    for name in (
        *BLOCKS,
        "evicted",
        "hit",
        "copy",
        "ttft",
        "itl",
        "decode",
        "prefill",
        "device",
        "muted",
        "error",
    ):
        ink = palette[name]
        if palette.native:
            assert ink.color is None or ink.color.is_default or ink.color.number is not None
        else:
            assert ink.color is not None
            assert contrast(background, Color.from_rich_color(ink.color)) >= (
                2.4 if name == "free" else 3.5
            ), name


def test_areas_and_pairs_are_the_exact_colours() -> None:
    palette = themes.palette(themes.find("kvtop-dark"))
    pair = palette.pair("free", "shared")
    assert pair.color is not None
    assert pair.bgcolor is not None
    assert (pair.color.name, pair.bgcolor.name) == ("#1f232a", "#fff2a8")
    assert palette.area("evicted").bgcolor == palette.colour("evicted").rich_color
    assert palette["hit"] == palette["mark-hit"]
    assert palette["ttft"] == palette["graph-ttft"]


def test_textuals_own_themes_borrow_the_states_of_their_lightness() -> None:
    dark, light = themes.palette(themes.find("nord")), themes.palette(themes.find("textual-light"))
    assert dark.colour("active") == Color.parse("#4cc3d9")
    assert light.colour("active") == Color.parse("#0b559e")


def test_without_any_colour_weight_is_left() -> None:
    assert themes.default_name(no_color=True) == "ansi"
    palette = themes.palette(themes.find("ansi"), no_color=True)
    assert palette.colourless
    assert palette["free"].dim
    assert palette["shared"].bold
    assert palette.on("select").reverse


# ------------------------------------------------------------------------------------- files


GOOD = 'name = "mine"\n[colors]\nprimary = "#ff0000"\n[blocks]\nactive = "rgb(1,2,3)"\n'


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('name = "x"\n[colors]\nprimary = "blu"\n', "t.toml:3: colors.primary: 'blu' is no colour"),
        (
            '[colors]\nprimary = "#fff"\n[blocks]\n\nactiv = "#fff"\n',
            "t.toml:5: blocks.activ: unknown; there are free, ",
        ),
        ("[colors]\nprimary = 7\n", "t.toml:2: colors.primary: 7 is no colour"),
        ('[colors]\nprimary = "#ffffff80"\n', "t.toml:2: colors.primary: '#ffffff80' is no colour"),
        ("[colors]\nsecondary = '#fff'\n", "t.toml:1: colors.primary: is missing"),
        ("name = 'x'\n", "t.toml: colors.primary: is missing"),
        ("dark = 'yes'\n", "t.toml:1: dark: must be true or false"),
        ("colors = 3\n", "t.toml:1: colors: must be a table"),
        ("marks = []\n", "t.toml:1: marks: must be a table: [marks]"),
        ("author = 7\n", "t.toml:1: author: must be text in quotes"),
        ("ansi = 1\n", "t.toml:1: ansi: must be true or false"),
        ("name = 'a\\nb'\n", "t.toml:1: name: must be letters"),
        ('name = "mine\\n"\n', "t.toml:1: name: must be letters"),
        ("'a`b.c' = 1\n", "a`b.c: unknown; there are name"),
        ("nam = 'x'\n", "t.toml:1: nam: unknown; there are name, dark"),
        ("name = '\x7f'\n", "t.toml:1: is not TOML"),
        ("name = 'a b'\n", "t.toml:1: name: must be letters"),
        ("a = 1\nb = \n", "t.toml:2: is not TOML: Invalid value"),
        (
            '[colors]\nprimary = "#fff"\n[variables]\nborder = "red; }"\n',
            "t.toml:4: variables.border: must be",
        ),
        ("[" * 3000, "t.toml"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, want: str) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(SetupError) as error:
        themes.load(path)
    line = str(error.value)
    assert want in line
    assert len(line) <= 200
    assert line.isprintable()


def test_bytes_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SetupError, match="UTF-8"):
        themes.load(path)
    with pytest.raises(SetupError, match="No such file"):
        themes.find(str(tmp_path / "none.toml"))


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "themes"
    folder.mkdir()
    monkeypatch.setattr(themes, "user_folder", lambda: folder)
    return folder


def test_search_order(user: Path) -> None:
    (user / "mine.toml").write_text(GOOD)
    (user / "mono.toml").write_text(GOOD.replace("mine", "mono"))
    (user / "bad.toml").write_text("dark = 1\n")
    assert themes.find("mine").primary == "#ff0000"
    assert themes.find(str(user / "mine.toml")).name == "mine"
    assert themes.find("mono").primary == "#ff0000"
    assert themes.find("kvtop-dark").primary == "#4cc3d9"
    assert themes.find("dracula").name == "dracula"
    found, problems = themes.all_themes()
    assert [theme.name for theme in found] == ["kvtop-dark", "kvtop-light", "mono", "ansi", "mine"]
    assert len(problems) == 1
    assert "bad.toml:1: dark" in problems[0]
    with pytest.raises(SetupError, match=r"bad.toml:1: dark"):
        themes.find("bad")
    with pytest.raises(
        SetupError, match=r"no theme nope; there are kvtop-dark, kvtop-light, mono, ansi, mine"
    ):
        themes.find("nope")


async def test_live_switch_through_every_theme() -> None:
    class Small(App[None]):
        CSS = "Static { color: $block-active; background: $mark-select; border: solid $graph-ttft; }"

        def get_theme_variable_defaults(self) -> dict[str, str]:
            return themes.defaults(self.current_theme.dark)

        def compose(self) -> ComposeResult:
            yield Static("x")

    app = Small()
    found, _ = themes.all_themes()
    async with app.run_test(size=(20, 5)) as pilot:
        for theme in found:
            app.register_theme(theme)
        for name in app.available_themes:
            app.theme = name
            await pilot.pause()
            await pilot.pause()  # the stylesheet is refreshed one turn later
            active = themes.palette(app.current_theme).colour("active")
            assert app.query_one(Static).styles.color == active, name


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_selected_text_can_be_read(path: Path) -> None:
    found = themes.palette(themes.load(path))
    style = found.on("select")
    if found.native:
        assert style.reverse, "the terminal's own colours, exchanged"
    else:
        ink, area = (Color.from_rich_color(c) for c in (style.color, style.bgcolor))
        assert contrast(ink, area) >= 4.5
        assert contrast(area, found.colour("background")) >= 3, "and the selection can be seen"
