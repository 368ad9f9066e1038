"""The command line from outside: exit codes, one-line errors, precedence, what is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtop import __version__
from kvtop.cli import program as cli
from kvtop.record.recorder import Recorder
from tests.kvtop.streams import rich_stream

ROOT = Path(__file__).resolve().parents[3]


def kvtop(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "kvtop", *args],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        timeout=120,
        check=False,
    )


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    recorder = Recorder(tmp_path / "run.jsonl")
    for batch in rich_stream(40):
        recorder(batch)
    recorder.close()
    return tmp_path / "run.jsonl"


def invoke(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """In this process: (exit code, stdout, stderr)."""
    code = cli.invoke(args)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["run"],
        ["bogus"],
        ["--bogus"],
        ["run", "--bogus"],
        ["verify"],
        ["verify", "/no/such/file"],
        ["replay", "/no/such/file"],
        ["explain", "/no/such/file", "--json"],
        ["shot", "/no/such/file", "-o", "x.txt"],
        ["shot", "/no/such/file"],
        ["demo", "no-such-demo"],
        ["demo"],
        ["--num-blocks", "many", "--prompt", "x"],
        ["--num-blocks", "1", "--prompt", "x"],
        ["--block-size", "7", "--prompt", "x"],
        ["--dtype", "int3", "--prompt", "x"],
        ["--kv-cache-memory", "much", "--prompt", "x"],
        ["--temperature", "-1", "--prompt", "x"],
        ["--system", "@/no/such/file", "--prompt", "x"],
        ["--prompts", "/no/such/file"],
        ["--model", "/no/such/folder", "--prompt", "x"],
        ["--record", "/no/such/folder/x.jsonl", "--prompt", "x"],
        ["--view", "sideways"],
        ["--redact", "--prompt", "x"],
        ["--headless", "--theme", "nosuch", "--prompt", "x"],
        ["--slow", "-1"],
        ["--prompt"],
        ["--theme", "\x1b[31mred\nnews", "--bogus"],
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    code, out, err = invoke(capsys, *args)
    assert code == 2
    assert out == ""
    assert err.endswith("\n")
    line = err[:-1].split("\n")[-1]
    assert err.count("\n") == 1, err
    assert 10 < len(line) <= 200
    assert line.startswith("kvtop: ")
    assert "\x1b" not in line


def test_no_terminal_and_no_prompt_is_exit_2_with_a_hint() -> None:
    done = kvtop()
    assert done.returncode == 2
    assert "--prompt" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_help_and_the_list_of_demos_start_fast_and_import_neither_torch_nor_textual() -> None:
    wrong_path = ["run", "--headless", "--once", "--prompt", "x", "--model", "./no/such/model"]
    for args in (
        ["--help"],
        ["demo", "list"],
        ["run", "--help"],
        ["--version"],
        ["verify", "/nope"],
        wrong_path,
    ):
        code = (
            "import sys; from kvtop.cli.program import invoke; invoke(sys.argv[1:]); "
            "bad = {'torch', 'textual', 'transformers'} & set(sys.modules); "
            "sys.exit(f'imported {bad}' if bad else 0)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert done.returncode == 0, done.stderr


def test_headless_never_imports_textual() -> None:
    code = (
        "import sys; from kvtop.cli.headless import *; from kvtop.cli.prompts import *; "
        "from tests.demos.toy import build; from engine import EngineConfig\n"
        "run(EngineConfig(), Job([Prompt('x')], as_json=True, once=True), build=build)\n"
        "assert 'textual' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"][0]["output_tokens"] > 0


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(capsys, "--version")[:2] == (0, f"kvtop {__version__}\n")
    code, out, _ = invoke(capsys, "--help")
    assert code == 0
    for name in ("run", "replay", "demo", "shot", "verify", "explain", "bench"):
        assert f"\n  {name}" in out
    code, out, _ = invoke(capsys, "run", "--help")
    for name in ("--prompt", "--num-blocks", "--record", "--redact", "--kv-cache-memory", "KVTOP_MODEL"):
        assert name in out


def test_every_option_has_its_variable() -> None:
    for name, sub in cli.program().commands.items():
        for parameter in sub.params:
            if parameter.param_type_name == "option":
                long = next(o for o in reversed(parameter.opts) if o.startswith("--"))
                assert parameter.envvar == "KVTOP_" + long[2:].replace("-", "_").upper(), (name, long)


def test_verify_says_ok_or_what_is_wrong(capsys: pytest.CaptureFixture[str], recorded: Path) -> None:
    code, out, _ = invoke(capsys, "verify", str(recorded))
    assert code == 0
    assert out.startswith("ok: ")
    code, out, _ = invoke(capsys, "verify", str(recorded), "--json")
    reported = json.loads(out)
    assert (code, reported["ok"], reported["violations"]) == (0, True, [])
    lines = recorded.read_bytes().splitlines(keepends=True)
    recorded.write_bytes(b"".join(lines[:9] + lines[10:]))
    code, out, _ = invoke(capsys, "verify", str(recorded), "--json")
    reported = json.loads(out)
    assert (code, reported["ok"]) == (1, False)
    assert reported["violations"]
    assert invoke(capsys, "verify", str(recorded))[0] == 1


def test_explain_and_replay_without_a_dashboard(capsys: pytest.CaptureFixture[str], recorded: Path) -> None:
    code, out, _ = invoke(capsys, "explain", str(recorded), "--json")
    rows = json.loads(out)["requests"]
    assert code == 0
    assert {"id", "hit_blocks", "queried_blocks", "reason", "missing_tokens"} <= set(rows[0])
    code, out, _ = invoke(capsys, "explain", str(recorded))
    assert len(out.splitlines()) == len(rows)
    code, out, _ = invoke(capsys, "replay", str(recorded), "--json")
    assert json.loads(out)["type"] == "summary"
    assert "terminal" in invoke(capsys, "replay", str(recorded))[2]


def test_flag_over_environment_over_file_over_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("kvtop.cli.headless.run", lambda config, job: seen.append(config) or 0)

    def blocks(*args: str) -> Any:
        assert invoke(capsys, "--prompt", "x", *args)[0] == 0
        return seen[-1].num_blocks, seen[-1].kv_cache_memory, seen[-1].enable_prefix_caching

    assert blocks() == (None, None, True)
    file = tmp_path / "config.toml"
    file.write_text('num_blocks = 30\nkv-cache-memory = "1M"\nenable-prefix-caching = false\n')
    monkeypatch.setenv("KVTOP_CONFIG", str(file))
    assert blocks() == (30, 1 << 20, False)
    monkeypatch.setenv("KVTOP_NUM_BLOCKS", "40")
    monkeypatch.setenv("KVTOP_ENABLE_PREFIX_CACHING", "true")
    assert blocks() == (40, 1 << 20, True)
    assert blocks("--num-blocks", "50", "--no-enable-prefix-caching") == (50, 1 << 20, False)
    monkeypatch.setenv("KVTOP_NUM_BLOCKS", "lots")
    code, _, err = invoke(capsys, "--prompt", "x")
    assert code == 2
    assert "KVTOP_NUM_BLOCKS" in err
    file.write_text("num_blocs = 3\n")
    code, _, err = invoke(capsys, "run", "--prompt", "x")
    assert code == 2
    assert "config.toml:1" in err
    assert "num_blocks" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-tokens", "abc"), "--max-tokens must be a whole number, not 'abc'"),
        (("--max-tokens", "1.5"), "--max-tokens must be a whole number, not '1.5'"),
        (("--watermark", "x"), "--watermark must be a number, not 'x'"),
        (("--ops", "foo"), "--ops must be auto, reference, cpu or triton, not 'foo'"),
    ],
)
def test_a_value_of_another_kind_is_told_in_words_of_our_own(
    words: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(capsys, "--prompt", "x", *words) == (2, "", f"kvtop: {said}\n")


def test_settings_for_other_runs_do_not_stop_this_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtop.cli.headless.run", lambda config, job: 0)
    monkeypatch.setenv("KVTOP_REDACT", "1")
    monkeypatch.setenv("KVTOP_THEME", "nosuch")
    assert invoke(capsys, "--prompt", "x")[0] == 0
    assert invoke(capsys, "--prompt", "x", "--redact")[0] == 2


def test_a_prompt_in_the_environment_is_one_prompt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("kvtop.cli.headless.run", lambda config, job: seen.append(job.prompts) or 0)
    monkeypatch.setenv("KVTOP_PROMPT", "Who was Ada?")
    monkeypatch.setenv("KVTOP_STOP", "The end")
    assert invoke(capsys)[0] == 0
    assert [(a.prompt, a.params.stop) for a in seen[0]] == [("Who was Ada?", ("The end",))]


def test_plain_kvtop_takes_the_options_of_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("kvtop.cli.headless.run", lambda config, job: seen.append((config, job)) or 0)
    for words in (["--prompt", "a", "--prompt", "b"], ["run", "--prompt", "a", "-p", "b"]):
        code, _, _ = invoke(
            capsys, *words, "--max-tokens", "7", "--temperature", "0", "--seed", "3", "--json", "--once",
            "--concurrent", "--max-num-batched-tokens", "100", "--max-num-seqs", "4", "--system", "S",
            "--dtype", "float32", "--ops", "reference", "--redact", "--record", "r.jsonl",
        )  # fmt: skip
        assert code == 0
    assert seen[0] == seen[1]
    config, job = seen[0]
    first = job.prompts[0]
    assert [p.prompt for p in job.prompts] == ["a", "b"]
    assert (first.params.max_tokens, first.params.temperature, first.system) == (7, 0, "S")
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.seed) == (100, 4, 3)
    assert (config.dtype, config.ops) == ("float32", "reference")
    assert (job.as_json, job.once, job.concurrent, job.redact) == (True, True, True, True)
    assert job.record == Path("r.jsonl")


def test_the_environment_is_set_before_torch_can_be_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    reported: list[Any] = []
    monkeypatch.setattr(
        "kvtop.cli.headless.run",
        lambda *a: (
            reported.append((os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))) or 0
        ),
    )
    invoke(capsys, "--prompt", "x")
    assert reported == [("2000", None)]


def test_a_reader_that_closes_the_pipe_is_quiet(recorded: Path) -> None:
    code = f"{sys.executable} -m kvtop explain {recorded} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)


@pytest.mark.parametrize("command", ["replay", "explain"])
@pytest.mark.parametrize("lines_left", [-1, -2, -3])
def test_of_a_truncated_recording_the_readable_part_is_shown(
    capsys: pytest.CaptureFixture[str], recorded: Path, command: str, lines_left: int
) -> None:
    whole = recorded.read_bytes().splitlines(keepends=True)
    ends = b"" if lines_left == -1 else whole[lines_left][:-20]
    kept = whole[:lines_left]
    recorded.write_bytes(b"".join(kept) + ends)
    code, out, err = invoke(capsys, command, str(recorded), "--json")
    assert code == 1
    assert json.loads(out)["requests"]
    assert err.count("\n") == 1
    assert f"run.jsonl: line {len(kept) + 1:,}: " in err
    assert ("the end is missing" if not ends else "is cut off, the rest of the recording is missing") in err
    assert len(err) <= 201


def test_of_a_recording_without_a_whole_batch_nothing_is_shown(
    capsys: pytest.CaptureFixture[str], recorded: Path
) -> None:
    whole = recorded.read_bytes().splitlines(keepends=True)
    for data in (whole[0], whole[0] + whole[1][:-9]):
        recorded.write_bytes(data)
        code, out, err = invoke(capsys, "explain", str(recorded), "--json")
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_recording_is_not_overwritten(capsys: pytest.CaptureFixture[str], recorded: Path) -> None:
    before = recorded.read_bytes()
    code, out, err = invoke(
        capsys,
        "run",
        "--headless",
        "--simulate",
        "llama-3.1-8b",
        "--on",
        "H100",
        "--prompt",
        "x",
        "--record",
        str(recorded),
    )
    assert (code, out) == (2, "")
    assert err == "kvtop: run.jsonl: exists already; record to another name, or remove it first\n"
    assert recorded.read_bytes() == before
