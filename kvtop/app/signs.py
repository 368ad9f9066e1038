"""Signs: what badges, key line, hint and caption say about the mode that the dashboard is in.

Owns the words; it reads a session and a Mode and touches no widget, so equal sessions in equal modes give equal
signs. Invariant: a key is named only while pressing it does what the line says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtop.options import VIEWS
from kvtop.text import safe_text
from kvtop.widgets.bars.header import Badge
from kvtop.widgets.bars.hint import Key

if TYPE_CHECKING:
    from kvtop.play.composer import SentPrompt
    from kvtop.play.session import Session

_HELP = Key("F1", "help", "f1")
_VIEW = Key("F2", "view " + "/".join(VIEWS), "f2")
_STEP = Key(".", "one step", "full_stop")
_QUIT = Key("q", "quit", "q")


@dataclass(frozen=True, slots=True)
class Mode:
    """What the screen knows and the session does not."""

    typing: bool = False
    """Letters go into the prompt."""
    typed: str = ""
    """What the prompt holds."""
    note: str = ""
    """What the last key did, while that is worth saying."""
    tiny: bool = False
    """There is room for one view only."""
    on_terminal: bool = True
    """Not a picture, which is of one moment anyway."""


@dataclass(frozen=True, slots=True)
class Signs:
    """All that is said."""

    badges: tuple[Badge, ...]
    """From the rare to the mode itself, which comes last."""
    keys: tuple[Key, ...]
    """What works now, the most useful first: a narrow line drops the rest."""
    hint: str
    """The line under the prompt."""
    why: str = ""
    """The reason that follows it."""
    warns: bool = False
    sent: tuple[SentPrompt, ...] = ()
    """Prompts that were sent and have not arrived."""
    topic: str | None = None
    """What the prompt is about; None without a prompt."""
    invites: tuple[str, ...] = ()
    """What to do first, while the chat is empty."""
    loading: str = ""
    """How far a recording's long seek is, as a sentence; empty when the state is whole."""
    caption: str = ""
    """A demo's text."""
    then: str = ""
    """What the reader of the caption may do."""
    judged: bool = False
    """The caption is the demo's verdict."""


def signs(session: Session, mode: Mode) -> Signs:
    """What to say now."""
    hint, why, warns = _hint(session, mode)
    caption, then, judged = _caption(session)
    loading = session.source.loading
    composer = session.composer
    topic, invites = None, tuple[str, ...]()
    if composer is not None:
        page, own = safe_text(composer.attached), "type a question of your own."
        topic = f"{page} attached" if page else "new conversation" if composer.anew else ""
        first = "Enter sends the first of five examples;"
        invites = (first, f"or {own}") if composer.examples else (own.capitalize(),)
    elif session.play is not None:
        invites = ("Enter begins the scene.",)
    return Signs(
        badges=tuple(_badges(session, mode)),
        keys=tuple(key for key in _keys(session, mode) if not (mode.tiny and key is _VIEW)),
        hint=hint,
        why=why,
        warns=warns,
        sent=() if composer is None else tuple(composer.sent(session.shown)),
        topic=topic,
        invites=invites,
        loading="" if loading is None else loading.says,
        caption=caption,
        then=then,
        judged=judged,
    )


def _badges(session: Session, mode: Mode) -> list[Badge]:
    state, found = session.shown, list[Badge]()
    if state.stream.losses:
        found.append(Badge(f"LOST {state.stream.losses}", "error"))
    if session.source.problem is not None:
        found.append(Badge("TRUNCATED", "warning"))
    if session.recording_failed is not None:
        found.append(Badge("REC FAILED", "error"))
    elif session.options.recording:
        found.append(Badge("REC", "error"))
    if session.slow:
        found.append(Badge(f"SLOW {session.slow:g} s", "warning"))
    if session.stepping:
        found.append(Badge("STEP", "warning"))
    if session.engine is None and not session.playing and mode.on_terminal:
        found.append(Badge("PAUSED", "warning"))
    last = _mode_badge(session)
    if state.started is not None and state.started.source == "simulated":
        speed = state.started.knobs.speed or 1
        found.append(Badge("SIMULATED" + (f" ×{speed:g}" if speed != 1 else ""), "warning"))
        if last.text == "LIVE":
            return found
    return [*found, last]


def _mode_badge(session: Session) -> Badge:
    state = session.shown
    if any(e.fatal for e in state.engine.errors):
        return Badge("FAILED", "error")
    if session.frozen:
        return Badge("FROZEN", "warning")
    if session.engine is None:
        return Badge(f"REPLAY {session.source.place}".rstrip(), "primary")
    if state.started is None:
        return Badge("LOADING", "warning")
    return Badge("DEMO" if session.play is not None else "LIVE", "success")


def _keys(session: Session, mode: Mode) -> list[Key]:
    slow = Key("F3", "run on" if session.stepping else "full speed" if session.slow else "slow motion", "f3")
    if session.play is not None:
        go_on = [Key("Enter", "go on", "enter")] if session.play.waiting else []
        return [*go_on, _HELP, _VIEW, slow, _STEP, _QUIT]
    if session.engine is None:
        return [
            Key("space", "pause" if session.playing else "play", "space"),
            Key(", .", "step", "full_stop"),
            Key("[ ]", "1 s", "right_square_bracket"),
            Key("{ }", "10 s", "right_curly_bracket"),
            Key("< >", "speed", "greater_than_sign"),
            _HELP,
            _VIEW,
            _QUIT,
        ]
    if mode.typing:
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
        Key("space", "go on" if session.frozen else "freeze", "space"),
        _STEP,
        slow,
        _HELP,
        _VIEW,
        _QUIT,
        Key("arrows", "walk", "right"),
        Key("tab", "next panel", "tab"),
    ]


def _hint(session: Session, mode: Mode) -> tuple[str, str, bool]:
    """(what to say, why, whether it warns)."""
    fatal = next((e for e in session.shown.engine.errors if e.fatal), None)
    if mode.note:
        return mode.note, "", fatal is not None
    if fatal is not None:
        return safe_text(fatal.message), "ctrl+q quits", True
    if session.stepping:
        step = "Esc, then . runs one step" if mode.typing else ". runs one step"
        return f"the engine stands still: {step}, F3 lets it run on", "", False
    if session.frozen:
        on = "Esc, then space catches up" if mode.typing else "space catches up"
        return f"the display is frozen, the engine runs on; {on}", "", False
    if session.composer is not None and mode.typing:
        enter = session.composer.next_enter(mode.typed)
        return enter.says, enter.why, False
    return "key mode: letters act; i or Enter goes back to the prompt", "", False


def _caption(session: Session) -> tuple[str, str, bool]:
    """(a demo's text, what the reader may do, whether it is the verdict)."""
    play = session.play
    if play is None:
        return "", "", False
    if play.verdict is not None:
        return checked(play.verdict), "q quits", True
    return play.caption, "Enter goes on" if play.waiting else "", False


def checked(verdict: Mapping[str, Any]) -> str:
    """A demo's end: how many checks passed, then what was checked and found, failures first."""
    checks = sorted(verdict["checks"], key=lambda c: bool(c["ok"]))
    passed = sum(bool(c["ok"]) for c in checks)
    found = [
        f"✓ {c['name']}: {c['got']}" if c["ok"] else f"✗ {c['name']}: {c['got']}, not {c['want']}"
        for c in checks
    ]
    return f"{passed} of {len(checks)} checks passed   " + " · ".join(found)
