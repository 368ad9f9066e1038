"""Whatever is pressed, clicked, pasted and resized, in whatever bursts: nothing raises, and the screen is whole."""

from __future__ import annotations

import random

import pytest
from textual import events
from textual.geometry import Size
from textual.message import Message

from tests.kvtop.app.test_live import Live, live

KEYS = (
    "enter escape tab shift+tab up down left right home end pageup pagedown backspace delete space f1 f2 f3 f4 "
    "ctrl+p ctrl+t ctrl+n ctrl+l ctrl+u ctrl+a ctrl+w question_mark full_stop comma x e s L i j k h l plus minus "
    "left_square_bracket right_curly_bracket less_than_sign slash"
).split()
"""Not those that leave: q, ctrl+q, ctrl+c, ctrl+z."""
TEXTS = ("help", "theme", "/n 3 why?", "a\u202eb\x9bc", "", "view", "x" * 300)


def mouse(kind: type[events.MouseEvent], x: int, y: int, button: int) -> events.MouseEvent:
    """One report of the mouse."""
    return kind(None, x, y, 0, 0, button, False, False, False)


def burst(chance: random.Random, width: int, height: int) -> list[Message]:
    """What may come in one read."""
    x, y = chance.randrange(width), chance.randrange(height)
    match chance.randrange(8):
        case 0:
            clicks = [mouse(events.MouseDown, x, y, 1), mouse(events.MouseUp, x, y, 1)]
            return clicks * chance.randint(1, 3)
        case 1:
            far = mouse(events.MouseMove, chance.randrange(width), chance.randrange(height), 1)
            return [mouse(events.MouseDown, x, y, 1), far, mouse(events.MouseUp, far.x, far.y, 1)]
        case 2:
            wheel = chance.choice([events.MouseScrollUp, events.MouseScrollDown])
            return [mouse(events.MouseMove, x, y, 0), *[mouse(wheel, x, y, 0) for _ in range(3)]]
        case 3:
            return [events.Paste(chance.choice(TEXTS))]
        case 4:
            text = chance.choice(TEXTS)
            return [events.Key("space" if c == " " else c, c) for c in text if c.isprintable()]
        case 5:
            key = chance.choice(["enter", "enter", "pageup", "pagedown", "home", "end", "up"])
            return [events.Key("ctrl+p", None), *[events.Key(key, None)] * chance.randint(1, 3)]
        case _:
            key = chance.choice(KEYS)
            character = {"space": " ", "slash": "/"}.get(key, key if len(key) == 1 else None)
            return [events.Key(key, character) for _ in range(chance.choice([1, 1, 2, 5]))]


async def play(shown: Live, seed: int, rounds: int) -> None:
    """Bursts and changes of size."""
    chance, app = random.Random(seed), shown.app
    width, height = 120, 40
    for n in range(rounds):
        for message in burst(chance, width, height):
            message.set_sender(app)
            app.post_message(message)
        if chance.random() < 0.1:
            width, height = chance.choice([(1, 1), (20, 5), (80, 24), (120, 40), (200, 60)])
            app.post_message(events.Resize(Size(width, height), Size(width, height)))
            await shown.pilot.resize_terminal(width, height)
        if n % 4 == 0:
            await shown.pilot.pause(0.02)
            app.tick()
        assert app.is_running and app.return_code is None, (n, app.crash)


@pytest.mark.parametrize("seed", [1, 2])
async def test_many_bursts(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("pictures"))
    async with live() as shown:
        for name in ("action_quit", "exit"):  # the palette offers it, a click may hit it
            monkeypatch.setattr(shown.app, name, _stay)
        await play(shown, seed, 80)
        assert shown.app.crash is None
        monkeypatch.undo()


@pytest.mark.parametrize("key", ["pageup", "pagedown", "home", "end", "up", "down"])
async def test_a_key_comes_before_the_palette_has_a_list(key: str) -> None:
    async with live() as shown:
        for name in ("ctrl+p", key, key):
            shown.app.post_message(events.Key(name, None))
        await shown.pilot.pause(0.3)
        await shown.pilot.press(*"zzzzqq", key, key)
        await shown.pilot.pause(0.3)
        assert shown.app.is_running and shown.app.crash is None


async def _stay(*_: object, **__: object) -> None:
    """Not now."""
