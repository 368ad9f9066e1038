"""The dashboard's keys and the commands of its palette, as data.

Owns the two tables; what an action does is in the application. Single letters act only while the prompt does not
have the focus: Textual offers a printable key to a focused line of input first.
"""

from __future__ import annotations

from textual.binding import Binding, BindingType

BINDINGS: list[BindingType] = [
    Binding("ctrl+q", "quit", "Quit", id="quit", priority=True, show=False),
    Binding(
        "ctrl+c",
        "interrupt",
        "Copy the selection; else clear the prompt, abort the answer, or quit (press it twice)",
        id="copy",
        priority=True,
        show=False,
    ),
    Binding("ctrl+l", "repaint", "Draw the whole screen again", id="repaint", priority=True, show=False),
    Binding(
        "ctrl+z",
        "stop_process",
        "Stop kvtop; `fg` in the shell goes on",
        id="stop",
        priority=True,
        show=False,
    ),
    Binding("f1,question_mark", "help", "Help", id="help"),
    Binding("f2", "next_view", "View chat, ops, all", id="view"),
    Binding("f3", "slow", "Slow motion", id="slow"),
    Binding("f4,L", "logs", "What was printed", id="logs"),
    Binding("ctrl+t", "next_theme", "Next theme", id="theme"),
    Binding("ctrl+n", "new_conversation", "New conversation", id="new"),
    Binding("space", "freeze", "Freeze the display (the engine runs on), or pause a replay", id="freeze"),
    Binding("full_stop", "step", "One engine step, or one batch of a replay", id="step"),
    Binding("comma", "step_back", "One batch back", id="step-back"),
    Binding("left_square_bracket", "seek(-1)", "1 s back", id="back-1"),
    Binding("right_square_bracket", "seek(1)", "1 s on", id="on-1"),
    Binding("left_curly_bracket", "seek(-10)", "10 s back", id="back-10"),
    Binding("right_curly_bracket", "seek(10)", "10 s on", id="on-10"),
    Binding("less_than_sign", "speed(-1)", "Slower", id="slower"),
    Binding("greater_than_sign", "speed(1)", "Faster", id="faster"),
    Binding("x", "abort", "Abort the newest running request", id="abort"),
    Binding("e", "unfold", "Unfold the attached page, or a long prompt", id="unfold"),
    Binding("s", "picture", "Save a picture (SVG)", id="picture"),
    Binding("q", "quit", "Quit", id="quit-q"),
]

COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("Help", "Keys, the map, every figure (F1)", "help"),
    ("Logs", "What the engine printed (F4)", "logs"),
    ("Picture", "Save the screen as SVG (s)", "picture"),
    ("Slow motion", "The engine waits between steps (F3)", "slow"),
    ("Freeze", "Stop the display, not the engine (space)", "freeze"),
    ("One step", "Run a single engine step (.)", "step"),
    ("New conversation", "The next prompt starts anew (ctrl+n)", "new_conversation"),
    ("Reset prefix cache", "Forget all hashes", "reset_cache"),
    ("Repaint", "Draw the whole screen again (ctrl+l)", "repaint"),
    ("Quit", "Leave (ctrl+q)", "quit"),
)
"""(title, about, action) in the command palette, where views and themes are too."""
