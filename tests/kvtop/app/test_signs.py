"""Signs: words from a session and a mode alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtop.app.signs import Mode, signs
from kvtop.options import Options
from kvtop.play.session import Session
from kvtop.sources import Loading
from tests.kvtop.screen import Feed
from tests.kvtop.stage import Stage


def replay(**options: object) -> Session:
    """A recording that stands at its end."""
    stage = Stage()
    stage.submit("why?", "w " * 100)
    stage.run()
    session = Session(Feed(stage.batches), Options(**options))  # type: ignore[arg-type]
    session.pull()
    return session


def test_equal_sessions_in_equal_modes_say_the_same() -> None:
    assert signs(replay(), Mode()) == signs(replay(), Mode())


def test_a_replay_names_its_keys_and_its_place() -> None:
    said = signs(replay(recording="a.jsonl"), Mode())
    assert [badge.text for badge in said.badges] == ["REC", "PAUSED", "REPLAY"]
    assert said.keys[0].press == "space" and said.keys[-1].press == "q"
    assert said.hint.startswith("key mode") and not said.warns and not said.sent and said.topic is None


def test_a_recording_that_loads_says_so_and_one_that_cannot_be_driven_offers_no_jumps() -> None:
    session = replay()
    assert not session.may("seek") and not session.playing
    assert signs(session, Mode()).loading == ""
    assert isinstance(session.source, Feed)
    session.source.loading = Loading("LOADING 35 %", "35 % of the way")
    session.source.problem = "a.jsonl: line 9: is cut off"
    said = signs(session, Mode())
    assert said.loading == "35 % of the way"
    assert [badge.text for badge in said.badges][:1] == ["TRUNCATED"]


@pytest.mark.parametrize(("mode", "badge"), [(Mode(), True), (Mode(on_terminal=False), False)])
def test_a_picture_is_not_paused(mode: Mode, badge: bool) -> None:
    assert ("PAUSED" in [b.text for b in signs(replay(), mode).badges]) == badge


def test_what_a_key_did_comes_first_and_a_tiny_screen_has_one_view() -> None:
    mode = Mode(note="copied", tiny=True)
    assert signs(replay(), mode).hint == "copied"
    assert "f2" not in [key.press for key in signs(replay(), mode).keys]
    assert "f2" in [key.press for key in signs(replay(), replace(mode, tiny=False)).keys]
