"""The wheel as a user gets it: its exact contents, and that it works outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from kvtop import __version__

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, without this checkout on its path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (path,) = folder.glob("*.whl")
    return path


def data_files(folder: str) -> set[str]:
    """Files of a data folder that git knows, as members of the wheel."""
    listed = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    files = listed.stdout.split() if listed.returncode == 0 else []
    return {f"kvtop/{name}" for name in files}


def test_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"kvtop_tui-{__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"kvtop", "engine", info}
    assert {"kvtop/cli/__init__.py", "kvtop/py.typed", "engine/events.py"} <= names
    assert f"{info}/licenses/LICENSE" in names
    assert {f"kvtop/themes/{name}.toml" for name in ("kvtop-dark", "kvtop-light", "mono", "ansi")} <= names
    assert "kvtop/demos/page.txt" in names
    assert {"engine/sizing/models.toml", "engine/sim/devices.toml", "engine/sim/loads/hour.toml"} <= names
    assert {"engine/ops/cpu/kernels_c/attention.c", "kvtop/app/screens/main.tcss"} <= names
    assert data_files("themes") | data_files("demos") <= names
    styles = {str(path.relative_to(ROOT)) for path in (ROOT / "kvtop").rglob("*.tcss")}
    assert styles <= names
    assert [name for name in names if "__pycache__" in name or name.startswith("tests")] == []


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"kvtop_tui-{__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert "Name: kvtop-tui\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Dist: torch<2.14,>=2.8\n" in metadata
    assert "kvtop = kvtop.cli:main" in scripts


def test_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """In an empty venv that borrows only the dependencies; the full install is for CI, it takes minutes."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"),
        *("--disable-pip-version-check", wheel),
        cwd=elsewhere,
    )
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    place = run(
        python, "-c", "import kvtop, engine; print(kvtop.__file__); print(engine.__file__)", cwd=elsewhere
    )
    assert all(line.startswith(str(site)) for line in place.split())
    names = {
        demo["name"]
        for demo in json.loads(run(home / "bin" / "kvtop", "demo", "list", "--json", cwd=elsewhere))
    }
    assert names >= {"cache-hit", "eviction"}
    assert "cache-hit" in run(home / "bin" / "kvtop", "demo", "list", cwd=elsewhere)
    assert "replay" in run(python, "-m", "kvtop", "--help", cwd=elsewhere)
    themes = "from kvtop.paint import themes; print(*(theme.name for theme in themes.all_themes()[0]))"
    assert run(python, "-c", themes, cwd=elsewhere).split()[:2] == ["kvtop-dark", "kvtop-light"]
