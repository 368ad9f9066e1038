"""Signs: what the badges, the key line and the hint say about the mode that the dashboard is in.

Reads the application and writes only those three widgets. Invariant: a key is named only while pressing
it does what the line says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtop.options import VIEWS
from kvtop.text import safe_text
from kvtop.widgets.bars.header import Badge
from kvtop.widgets.bars.hint import Key

if TYPE_CHECKING:
    from kvtop.app.app import KvtopApp

_HELP = Key("F1", "help", "f1")
_VIEW = Key("F2", "view " + "/".join(VIEWS), "f2")
_STEP = Key(".", "one step", "full_stop")
_QUIT = Key("q", "quit", "q")


def badges(app: KvtopApp) -> list[Badge]:
    """From the rare to the mode itself, which always comes last."""
    state, told = app.state, list[Badge]()
    if state.stream.losses:
        told.append(Badge(f"LOST {state.stream.losses}", "error"))
    if getattr(app.session.source, "problem", None):
        told.append(Badge("TRUNCATED", "warning"))
    if app.session.options.recording:
        told.append(Badge("REC", "error"))
    if app.session.slow:
        told.append(Badge(f"SLOW {app.session.slow:g} s", "warning"))
    if app.session.stepping:
        told.append(Badge("STEP", "warning"))
    # A picture is of one moment anyway.
    if app.session.engine is None and not app.session.playing and not app.is_headless:
        told.append(Badge("PAUSED", "warning"))
    mode = _mode(app)
    if state.started is not None and state.started.source == "simulated":
        speed = state.started.knobs.get("speed") or 1
        told.append(Badge("SIMULATED" + (f" ×{speed:g}" if speed != 1 else ""), "warning"))
        if mode.text == "LIVE":
            return told
    told.append(mode)
    return told


def _mode(app: KvtopApp) -> Badge:
    if any(e.fatal for e in app.state.engine.errors):
        return Badge("FAILED", "error")
    if app.session.frozen:
        return Badge("FROZEN", "warning")
    if app.session.engine is None:
        return Badge(f"REPLAY {app.session.place}".rstrip(), "primary")
    if app.state.started is None:
        return Badge("LOADING", "warning")
    return Badge("DEMO" if app.session.play is not None else "LIVE", "success")


def keys(app: KvtopApp) -> list[Key]:
    """What works now, the most useful first: a narrow line drops the rest."""
    found = _keys(app)
    return found if app.main.has_room_for("ops") else [key for key in found if key is not _VIEW]


def _keys(app: KvtopApp) -> list[Key]:
    slow = Key(
        "F3", "run on" if app.session.stepping else "full speed" if app.session.slow else "slow motion", "f3"
    )
    if app.session.play is not None:
        go_on = [Key("Enter", "go on", "enter")] if app.session.play.waiting else []
        return [*go_on, _HELP, _VIEW, slow, _STEP, _QUIT]
    if app.session.engine is None:
        return [
            Key("space", "pause" if app.session.playing else "play", "space"),
            Key(", .", "step", "full_stop"),
            Key("[ ]", "1 s", "right_square_bracket"),
            Key("{ }", "10 s", "right_curly_bracket"),
            Key("< >", "speed", "greater_than_sign"),
            _HELP,
            _VIEW,
            _QUIT,
        ]
    if app.main.typing:
        return [
            Key("Esc", "keys", "escape"),
            Key("Enter", "send", "enter"),
            _HELP,
            _VIEW,
            slow,
            Key("ctrl+p", "commands", "ctrl+p"),
            Key("ctrl+q", "quit", "ctrl+q"),
        ]
    return [
        Key("i", "prompt", "i"),
        Key("space", "go on" if app.session.frozen else "freeze", "space"),
        _STEP,
        slow,
        _HELP,
        _VIEW,
        _QUIT,
        Key("arrows", "walk", "right"),
        Key("tab", "next panel", "tab"),
    ]


def checked(verdict: Mapping[str, Any]) -> str:
    """A demo's end: the sum, then what was checked and found, failures first."""
    checks = sorted(verdict["checks"], key=lambda c: bool(c["ok"]))
    passed = sum(bool(c["ok"]) for c in checks)
    told = [
        f"✓ {c['name']}: {c['got']}" if c["ok"] else f"✗ {c['name']}: {c['got']}, not {c['want']}"
        for c in checks
    ]
    return f"{passed} of {len(checks)} checks passed   " + " · ".join(told)


def tell_chat(app: KvtopApp) -> None:
    """What was sent and has not arrived, what the prompt is about, and what to do first."""
    main, composer = app.main, app.session.composer
    if composer is None:
        main.chat.invites = ("Enter begins the scene.",) if app.session.play is not None else ()
        return
    held = composer.held(app.state)
    main.chat.held, main.header.held, main.queues.held = held, len(held), len(held)
    page = safe_text(composer.attached)
    main.chat.topic = f"{page} attached" if page else "new conversation" if composer.anew else ""
    own = "type a question of your own."
    main.chat.invites = (
        ("Enter sends the first of five examples;", f"or {own}") if composer.examples else (own.capitalize(),)
    )


def tell_next(app: KvtopApp) -> None:
    """The hint under the prompt, and a demo's caption."""
    hint, typing = app.main.hint, app.main.typing
    fatal = next((e for e in app.state.engine.errors if e.fatal), None)
    hint.warns = fatal is not None
    if fatal is not None:
        hint.says, hint.why = safe_text(fatal.message), "ctrl+q quits"
    elif app.note:
        hint.says, hint.why = app.note, ""
    elif app.session.stepping:
        step = "Esc, then . runs one step" if typing else ". runs one step"
        hint.says, hint.why = f"the engine stands still: {step}, F3 lets it run on", ""
    elif app.session.frozen:
        on = "Esc, then space catches up" if typing else "space catches up"
        hint.says, hint.why = f"the display is frozen, the engine runs on; {on}", ""
    elif app.session.composer is not None and typing:
        told = app.session.composer.next_enter(app.main.prompt.value)
        hint.says, hint.why = told.says, told.why
    else:
        hint.says, hint.why = "key mode: letters act; i or Enter goes back to the prompt", ""
    if app.session.play is not None:
        caption = app.main.caption
        verdict = app.session.play.verdict
        caption.says = app.session.play.caption if verdict is None else checked(verdict)
        app.main.caption_rows = 3 if verdict is None else 6
        caption.then = (
            "q quits"
            if app.session.play.verdict is not None
            else "Enter goes on"
            if app.session.play.waiting
            else ""
        )
