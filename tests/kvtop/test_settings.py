"""Settings: where files lie, what the config file may say, and how a wrong one is reported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Knob, SetupError, settings_of
from kvtop import settings


@dataclass
class Some:
    """A few settings, one of each kind."""

    model: Annotated[str | None, Knob("A model.", "model")] = None
    num_blocks: Annotated[int | None, Knob("Blocks.", "model")] = None
    temperature: Annotated[float, Knob("Heat.", "model")] = 0.0
    motion: Annotated[bool, Knob("Motion.", "model")] = True
    kv_cache_memory: Annotated[int | None, Knob("Memory.", "model", unit="bytes")] = None


OPTIONS = {s.name: s for s in settings_of(Some)}


def read(path: Path, text: str) -> dict[str, Any]:
    path.write_text(text, "utf-8")
    return settings.load_settings(OPTIONS, path)


def test_values_by_option_name(tmp_path: Path) -> None:
    text = 'model = "Qwen/Qwen3-8B"\nnum-blocks = 64\ntemperature = 1\nmotion = false\n'
    assert read(tmp_path / "config.toml", text + "kv_cache_memory = 1048576\n") == {
        "model": "Qwen/Qwen3-8B",
        "num_blocks": 64,
        "temperature": 1.0,
        "motion": False,
        "kv_cache_memory": 1048576,
    }


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("\nnum_block = 3\n", "c.toml:2: num_block: no such option; did you mean num_blocks?"),
        ("zzz = 3\n", "c.toml:1: zzz: no such option; `kvtop config default` lists all"),
        ("num-blocks = '3'\n", "c.toml:1: num-blocks: must be a whole number, not '3'"),
        ("num-blocks = true\n", "must be a whole number, not True"),
        ("motion = 1\n", "motion: must be true or false, not 1"),
        ("[model]\nx = 1\n", "c.toml:1: model: must be a text, not {"),
        ("model = [\n", "c.toml"),
        ("x = 1\nx = 2\n", "c.toml:2: is not TOML: Cannot overwrite a value"),
        (f"model = {'9' * 5000}\n", "c.toml"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, want: str) -> None:
    with pytest.raises(SetupError) as error:
        read(tmp_path / "c.toml", text)
    assert want in str(error.value)
    assert len(str(error.value)) <= 200
    assert str(error.value).isprintable()


@given(st.text(max_size=60))
def test_any_text_is_settings_or_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        settings.load_settings(OPTIONS, path)
    except SetupError as error:
        assert len(str(error)) <= 200
        assert str(error).isprintable()


def test_no_file_is_no_settings_but_a_named_one_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "config_folder", lambda: tmp_path)
    monkeypatch.delenv("KVTOP_CONFIG", raising=False)
    assert settings.load_settings(OPTIONS) == {}
    (tmp_path / "config.toml").write_text("num-blocks = 9")
    assert settings.load_settings(OPTIONS) == {"num_blocks": 9}
    monkeypatch.setenv("KVTOP_CONFIG", str(tmp_path / "other.toml"))
    with pytest.raises(SetupError, match=r"other.toml: cannot be read: No such file"):
        settings.load_settings(OPTIONS)


def test_a_long_folder_never_hides_the_files_name(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["a" * 60] * 4)
    folder.mkdir(parents=True)
    with pytest.raises(SetupError) as error:
        read(folder / "config.toml", f"{'k' * 300} = 1")
    assert "/config.toml:1: kkk" in str(error.value)
    assert len(str(error.value)) == 200


def test_data_lies_beside_the_package_only_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    assert settings.data_folder("themes") == root / "themes"
    package = tmp_path / "kvtop"
    (tmp_path / "themes").mkdir()  # a stranger's top-level folder
    monkeypatch.setattr(settings, "__file__", str(package / "settings.py"))
    assert settings.data_folder("themes") == package / "themes"
    (tmp_path / "pyproject.toml").touch()
    assert settings.data_folder("themes") == tmp_path / "themes"


def test_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "c"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "s"))
    monkeypatch.delenv("KVTOP_CONFIG", raising=False)
    assert settings.config_file() == tmp_path / "c" / "kvtop" / "config.toml"
    assert settings.log_file() == tmp_path / "s" / "kvtop" / "kvtop.log"
