"""One table of knobs: a field of a dataclass is an option, a variable, a key, an error, a line of `config` and a row of
docs/options.md."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest

from engine import EngineConfig, Knob
from kvtop.cli import commands, program
from kvtop.cli.commands import COMMANDS, config, run
from kvtop.cli.reference import page

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class MoreConfig(EngineConfig):
    """An engine with one knob more."""

    cool_down: Annotated[int, Knob("Steps of rest after each step.", "scheduling", ge=0, le=9)] = 2


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engine configs of headless runs, with MoreConfig in place of EngineConfig."""
    configs: list[Any] = []
    takes = tuple(MoreConfig if cls is EngineConfig else cls for cls in run.COMMAND.takes)
    more = replace(run.COMMAND, takes=takes)
    others = [more if c is run.COMMAND else c for c in COMMANDS if c.name != "config"]
    for module in (commands, program):
        monkeypatch.setattr(module, "COMMANDS", (*others, config.command(others)))
    monkeypatch.setattr("kvtop.cli.headless.run", lambda config, job: configs.append(config) or 0)
    return configs


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("KVTOP_CONFIG", str(path))
    path.touch()
    return path


def invoke(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = program.invoke(words)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_new_field_is_an_option_a_variable_a_key_and_an_error(
    seen: list[Any], file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cool_down(*words: str) -> Any:
        code, _, err = invoke(capsys, "--prompt", "x", *words)
        return seen[-1].cool_down if code == 0 else err

    def shown() -> list[str]:
        _, out, _ = invoke(capsys, "config", "show")
        return next(line for line in out.splitlines() if line.startswith("cool_down")).split(maxsplit=2)[1:]

    says = "must be between 0 and 9, not"
    assert (cool_down(), shown()) == (2, ["2", "default"])
    file.write_text("cool_down = 3\n")
    assert (cool_down(), shown()) == (3, ["3", f"file {file}"])
    file.write_text("\ncool-down = 10\n")
    assert f"config.toml:2: cool-down: {says} 10\n" in cool_down()
    file.write_text("cool_down = 3\n")
    monkeypatch.setenv("KVTOP_COOL_DOWN", "4")
    assert (cool_down(), shown()) == (4, ["4", "variable KVTOP_COOL_DOWN"])
    monkeypatch.setenv("KVTOP_COOL_DOWN", "11")
    assert cool_down() == f"kvtop: KVTOP_COOL_DOWN {says} 11\n"
    assert cool_down("--cool-down", "5") == 5
    assert cool_down("--cool-down", "-1") == f"kvtop: --cool-down {says} -1\n"
    _, out, _ = invoke(capsys, "config", "show", "--cool-down", "6")
    assert ["cool_down", "6", "flag"] in [line.split() for line in out.splitlines()]


def test_a_new_field_is_in_help_in_the_default_file_and_on_the_page(
    seen: list[Any], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = invoke(capsys, "run", "--help")
    scheduling = out[out.index("\nScheduling:") : out.index("\nSampling:")]
    assert "--cool-down N " in scheduling
    assert "Steps of rest after each step.  [2]" in scheduling
    _, out, _ = invoke(capsys, "config", "default")
    assert "# Steps of rest after each step.\n# Takes between 0 and 9.\n# cool_down = 2\n" in out
    row = "| `--cool-down N` | between 0 and 9 | 2 | run | Steps of rest after each step. |"
    assert row in page(commands.COMMANDS[:-1])


def test_the_page_of_options_is_what_the_code_makes() -> None:
    made = page(COMMANDS[:-1])
    assert (ROOT / "docs" / "options.md").read_text("utf-8") == made, "run `make options`"


def test_every_key_of_the_default_file_reads_back(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = invoke(capsys, "config", "default")
    file.write_text(out)
    assert program._from_file(["run"]) == {"run": {}}
    lines = [line[2:] for line in out.splitlines() if line.startswith("# ") and " = " in line]
    keys = {line.split(" = ")[0] for line in lines}
    assert keys == set(commands.all_settings())
    for line in lines:
        assert len(tomllib.loads(line)) == 1
        file.write_text(line)
        for command in COMMANDS[:-1]:
            if line.split(" = ")[0] in command.settings:
                assert program._from_file([command.name])[command.name]
                break
        else:
            raise AssertionError(line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('view = "sideways"', "config.toml:1: view: must be chat, ops or all, not 'sideways'"),
        ("max_num_seqs = 0", "config.toml:1: max_num_seqs: must be between 1 and 65,536, not 0"),
        ("temperature = -1", "config.toml:1: temperature: must be between 0 and 100, not -1"),
        ("stop = 4", "config.toml:1: stop: must be a list of texts, not 4"),
        ("stop_token_ids = [1.5]", "config.toml:1: stop_token_ids: must be a list of whole numbers, not 1.5"),
        ('memory = "lots"', "config.toml:1: memory: must be a size like 192MiB, 2G or 1.5GiB, not 'lots'"),
        (
            "max-num-batched-tokens = 9",
            "max-num-batched-tokens in config.toml (9) must exceed --max-num-seqs (64)",
        ),
        ("min_tokens = 300", "min-tokens in config.toml must be from 0 to --max-tokens (256), not 300"),
        ('load = "nosuch"', "load in config.toml 'nosuch': no such load"),
        ('prompts = "/no/such"', "prompts in config.toml: /no/such: No such file"),
        ("num_blocks = 3\nnum-blocks = 4", "config.toml:2: num-blocks: is set twice"),
    ],
)
def test_a_wrong_key_is_blamed_on_the_file(
    line: str, said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(line)
    code, out, err = invoke(capsys, "run", "--headless", "--prompt", "x")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_lists_choices_and_what_belongs_to_one_call_may_be_set_in_the_file(
    seen: list[Any], file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Any] = []
    monkeypatch.setattr("kvtop.cli.headless.run", lambda config, job: jobs.append((config, job)) or 0)
    file.write_text("""
        view = "ops"
        quantization = "int8"
        load = "chat"
        simulate = "llama-3.1-8b"
        on = "h100"
        stop = "END"
        stop_token_ids = [3, 4]
        bad_words = ["a", "b"]
        early_stopping = "never"
        prompt = ["one", "two words"]
        kv-cache-memory = 1000
        once = true
    """)
    assert invoke(capsys)[0] == 0
    config, job = jobs[-1]
    assert (config.quantization, config.kv_cache_memory, job.simulation.machine) == ("int8", 1000, "h100")
    assert (job.load.name, job.once, [p.prompt for p in job.prompts]) == ("chat", True, ["one", "two words"])
    params = job.prompts[0].params
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("END",), (3, 4), ("a", "b"))
    assert params.early_stopping == "never"


def test_options_of_a_simulation_in_the_file_do_not_stop_a_live_run(
    seen: list[Any], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text('on = "h100"\nspeed = 2\nweights = "bf16"\nmodel = "some/model"\n')
    assert invoke(capsys, "--prompt", "x")[0] == 0
    assert invoke(capsys, "--prompt", "x", "--simulate", "llama-3.1-8b")[0] == 0
    code, _, err = invoke(capsys, "--prompt", "x", "--speed", "3")
    assert (code, err) == (2, "kvtop: --speed goes with --simulate MODEL --on DEVICE\n")


def test_config_prints_without_reading_a_broken_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("= nonsense")
    assert invoke(capsys, "config", "path") == (0, f"{file}\n", "")
    assert invoke(capsys, "config", "default")[0] == 0
    assert invoke(capsys, "config", "show")[0] == 2


def test_help_needs_no_terminal_colours_and_groups_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = invoke(capsys, "run", "--help")
    heads = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads == [
        *("Model:", "Memory and cache:", "Scheduling:", "Sampling:", "Prompts and loads:", "Simulation:"),
        *("Display:", "Output:", "Help:"),
    ]
    assert "Exit codes: 0 ok" in out
    assert max(map(len, out.splitlines())) <= 100
