"""kvtop shot: one moment of a recording as a picture, the same bytes every time."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from engine import SetupError
from engine.events import encode_batch
from kvtop.picture.cells import CELL
from kvtop.picture.shot import parse_size, picture, shot
from kvtop.record.recording import header_line
from tests.kvtop.stage import Stage

PAGE = " ".join(f"note{i} on the engine" for i in range(250))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """#1 cold from 0 to 0.65 s, #2 hits 62 blocks at 0.65 s."""
    stage = Stage()
    stage.submit("who was she?", PAGE, answer="one two three four")
    stage.run(prefill=0.3)
    stage.submit("what did she write?", PAGE, answer="one two three")
    stage.run(prefill=0.02)
    stage.t += 10
    stage.stop()
    path = tmp_path_factory.mktemp("shot") / "run.jsonl"
    path.write_bytes(header_line() + b"".join(encode_batch(b) + b"\n" for b in stage.batches))
    return path


def text(recording: Path, **what: object) -> str:
    return picture(recording, format="txt", **what).decode()  # type: ignore[arg-type]


def test_the_moment_asked_for_is_shown(recording: Path) -> None:
    early = text(recording, at=0.1, size=(100, 30))
    assert "#1" in early
    assert "#2" not in early
    assert "REPLAY 0.1 s" in early
    late = text(recording, size=(100, 30))
    assert "READ 992 of 1,006 tokens from cache · first word after 20 ms (#1, cold: 600 ms)" in late
    assert text(recording, at=1e9, size=(100, 30)) == late
    assert len(late.splitlines()) == 30
    assert max(map(len, late.splitlines())) <= 100


def test_marks_of_motion_stand_where_they_stood(recording: Path) -> None:
    sweeping = text(recording, at=0.75, size=(100, 30))
    assert sweeping.count("◆") > 0
    over = text(recording, at=9.0, size=(100, 30))
    assert over != sweeping


@pytest.mark.parametrize("kind", ["txt", "svg", "png"])
def test_the_same_recording_gives_the_same_bytes(recording: Path, kind: str) -> None:
    first, second = (picture(recording, at=0.75, size=(80, 24), format=kind) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("size", "view"), [((80, 24), "chat"), ((120, 40), "ops"), ((200, 60), "all")])
def test_every_view_has_its_size(recording: Path, tmp_path: Path, size: tuple[int, int], view: str) -> None:
    path = shot(recording, at=1.0, size=size, view=view, out=tmp_path / "a.png")  # type: ignore[arg-type]
    image = Image.open(io.BytesIO(path.read_bytes()))
    assert image.size == (size[0] * CELL[0], size[1] * CELL[1])


def test_views_and_themes_differ(recording: Path) -> None:
    assert "queues" in text(recording, size=(120, 40), view="ops")
    assert "queues" not in text(recording, size=(120, 40), view="chat")
    dark, light = (picture(recording, size=(40, 10), theme=t) for t in ("kvtop-dark", "kvtop-light"))
    assert dark != light


def test_a_picture_is_no_terminal(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = picture(recording, at=1.0, size=(60, 15))
    monkeypatch.setenv("NO_COLOR", "1")
    assert picture(recording, at=1.0, size=(60, 15)) == coloured


def test_a_recording_that_broke_off_shows_what_it_has(recording: Path, tmp_path: Path) -> None:
    cut_off = tmp_path / "cut.jsonl"
    cut_off.write_bytes(recording.read_bytes()[:-300])
    assert "READ 992" in text(cut_off, size=(100, 30))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"theme": "no-such"}, "no theme no-such"),
        ({"at": -1.0}, "--at counts seconds"),
        ({"at": float("nan")}, "--at counts seconds"),
        ({"out": "picture"}, "which format"),
        ({"out": "picture.gif"}, "which format"),
        ({"out": "missing/folder/a.png", "format": "txt"}, "cannot be written"),
    ],
)
def test_bad_input_is_one_line(
    recording: Path, tmp_path: Path, what: dict[str, object], message: str
) -> None:
    out = tmp_path / str(what.pop("out", "a.txt"))
    with pytest.raises(SetupError, match=message) as caught:
        shot(recording, size=(20, 5), out=out, **what)  # type: ignore[arg-type]
    assert len(str(caught.value)) <= 200
    assert "\n" not in str(caught.value)


def test_a_dash_is_stdout(recording: Path) -> None:
    for kind in ("txt", "svg", "png"):
        args = ["shot", str(recording), "-o", "-", "--format", kind, "--size", "20x5"]
        done = subprocess.run([sys.executable, "-m", "kvtop", *args], capture_output=True, check=True)
        assert done.stdout == picture(recording, size=(20, 5), format=kind)
        assert done.stderr == b""


def test_no_recording_is_one_line(tmp_path: Path) -> None:
    for content, message in ((b"hello\n", "is not a kvtop recording"), (header_line(), "holds no batch")):
        path = tmp_path / "x.jsonl"
        path.write_bytes(content)
        with pytest.raises(SetupError, match=message):
            picture(path)
    with pytest.raises(SetupError, match="cannot be opened"):
        picture(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("given", "size"), [("100x30", (100, 30)), (" 1 X 1 ", (1, 1)), ("500×500", (500, 500))]
)
def test_sizes(given: str, size: tuple[int, int]) -> None:
    assert parse_size(given) == size


@pytest.mark.parametrize("given", ["", "100", "0x5", "501x10", "-3x4", "axb", "9" * 5000 + "x1"])
def test_bad_sizes_are_one_line(given: str) -> None:
    with pytest.raises(SetupError, match="for example 100x30"):
        parse_size(given)
