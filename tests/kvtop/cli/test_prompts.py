"""Words of the command line: sizes, system texts, files of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import SamplingParams, SetupError
from kvtop.cli.prompts import Prompt, read_prompts, read_system
from kvtop.values import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("192MiB", 192 << 20),
        ("2G", 2 << 30),
        ("2g", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("300MB", 300_000_000),
        (" 512 k ", 512 << 10),
        ("1048576", 1 << 20),
        ("7b", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "x") == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "1e9", "3Q", "1 2", "9" * 18 + "T", "1.5.5M", "\x1b[31m"])
def test_a_bad_size_is_one_line_that_names_the_option(text: str) -> None:
    with pytest.raises(SetupError, match="kv") as info:
        parse_size(text, "kv")
    assert "\n" not in str(info.value)
    assert "\x1b" not in str(info.value)
    assert len(str(info.value)) <= 200


def test_system_is_a_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "page.txt").write_text("Über alles\n", "utf-8")
    assert read_system(None) == (None, "")
    assert read_system("Be brief.") == ("Be brief.", "")
    assert read_system(f"@{tmp_path / 'page.txt'}") == ("Über alles", "page.txt")
    for bad in (tmp_path / "none", tmp_path):
        with pytest.raises(SetupError, match="--system"):
            read_system(f"@{bad}")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(SetupError, match="not UTF-8"):
        read_system(f"@{tmp_path / 'latin'}")


LIKE = Prompt("", "the system", "s.txt", None, SamplingParams(max_tokens=9))


def prompts(tmp_path: Path, text: str, name: str = "p.txt") -> list[Prompt]:
    (tmp_path / name).write_text(text, "utf-8")
    return read_prompts(str(tmp_path / name), LIKE)


def test_prompts_one_a_line(tmp_path: Path) -> None:
    asks = prompts(tmp_path, "one\n\n  two words \n")
    assert [a.prompt for a in asks] == ["one", "two words"]
    assert all((a.system, a.params.max_tokens) == ("the system", 9) for a in asks)


def test_prompts_as_jsonl(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "a"}',
        '{"prompt": [1, 2], "max_tokens": 3, "temperature": 0, "salt": "s", "stop": ["x", "y"]}',
        '{"prompt": "c", "system": "other", "seed": 5, "stop": "z"}',
        '{"prompt": "d", "system": null}',
    ]
    a, b, c, d = prompts(tmp_path, "\n".join(lines))
    assert a == Prompt("a", "the system", "s.txt", None, LIKE.params)
    assert (b.prompt, b.params.max_tokens, b.params.temperature, b.salt) == ([1, 2], 3, 0, "s")
    assert b.params.stop == ("x", "y")
    assert (c.system, c.system_name, c.params.seed, c.params.stop) == ("other", "", 5, ("z",))
    assert d.system is None


def test_every_knob_of_sampling_is_a_field_of_jsonl(tmp_path: Path) -> None:
    line = """{"prompt": "a", "min_tokens": 2, "repetition_penalty": 1.2, "presence_penalty": 1, "frequency_penalty":
        -1, "logit_bias": {"42": -100}, "bad_words": "no", "bad_word_ids": [[1, 2]], "logprobs": 3, "stop_token_ids": 7,
        "priority": -2}"""
    (ask,) = prompts(tmp_path, " ".join(line.split()))
    assert ask.priority == -2
    assert ask.params == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        repetition_penalty=1.2,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias=((42, -100.0),),
        bad_words=("no",),
        bad_word_ids=((1, 2),),
        logprobs=3,
        stop_token_ids=(7,),
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "needs an object"),
        ("{}", "needs an object"),
        ('{"prompt": 5}', "needs an object"),
        ('{"prompt": [1.5]}', "needs an object"),
        ('{"prompt": [99999999999]}', "needs an object"),
        ('{"prompt": "a", "max_tokens": "many"}', "'max_tokens': must be a whole number, not 'many'"),
        ('{"prompt": "a", "max_tokens": 0}', "'max_tokens': must be at least 1"),
        ('{"prompt": "a", "stop": [1]}', "'stop'"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "'logit_bias': must be an object of token ids"),
        ('{"prompt": "a", "logit_bias": {"5": 101}}', "logit_bias must be between -100 and 100"),
        ('{"prompt": "a", "bad_word_ids": [1]}', "'bad_word_ids': must be a list of lists of token ids"),
        ('{"prompt": "a", "priority": 1.5}', "'priority': must be a whole number"),
        ('{"prompt": "a", "min_tokens": null}', "p.jsonl:3"),
        ('{"prompt": "a", "colour": 1}', "'colour': no such field"),
        ('{"prompt": "a", "\\u001b[31m": 1}', "no such field"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(SetupError) as info:
        prompts(tmp_path, '{"prompt": "fine"}\n\n' + line, "p.jsonl")
    text = str(info.value)
    assert "p.jsonl:3" in text
    assert says in text
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) <= 200


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="holds no prompt"):
        prompts(tmp_path, " \n\n")
