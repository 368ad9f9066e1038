"""`kvtop size`: the pinned JSON, the table that people read, and one line for whatever is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engine import sizing
from kvtop.cli.program import invoke
from kvtop.cli.size_table import amount


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert invoke(["size", *words]) == code
    out, err = capsys.readouterr()
    if code:
        assert not out
        assert len(err) <= 201
        assert err.count("\n") == 1
        return err
    assert not err
    return out


def test_the_pinned_object(capsys: pytest.CaptureFixture[str]) -> None:
    reported = json.loads(said(capsys, "llama-3.1-70b", "--json"))
    assert reported["model"] == "llama-3.1-70b"
    assert (reported["bytes_per_token"], reported["bytes_per_block"], reported["block_size"]) == (
        327_680,
        5_242_880,
        16,
    )
    assert list(reported["contexts"]) == ["4096", "32768", "131072"]
    assert [row["bytes"] for row in reported["contexts"].values()] == [5 << 28, 10 << 30, 40 << 30]
    assert {"bytes", "requests_naive", "requests_paged"} <= reported["contexts"]["4096"].keys()


def test_the_articles_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = "llama-3.1-70b --memory 80GB --weights int4 --overhead 3GB --avg-tokens 500 --context 2048 --json"
    reported = json.loads(said(capsys, *words.split()))
    assert reported["memory"] == {
        "bytes": 80 * 10**9,
        "overhead_bytes": 3 * 10**9,
        "kv_bytes": 41_723_146_752,
    }
    assert reported["contexts"] == {
        "2048": {"bytes": 640 << 20, "requests_naive": 62, "requests_paged": 248, "naive_used": 0.244141}
    }


def test_options_change_what_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("qwen3-8b", "--kv-cache-dtype", "fp8", "--block-size", "32", "--max-num-batched-tokens", "512")
    more = ("--overhead", "0", "--weights", "10GiB", "--memory", "24GiB", "--gpu-hour", "2", "--itl", "20")
    reported = json.loads(said(capsys, *words, *more, "--json"))
    assert reported["bytes_per_token"] == 147_456 // 2
    assert reported["bytes_per_block"] == 32 * 147_456 // 2
    assert reported["chunk"] == {"tokens": 512, "bytes": 512 * 147_456 // 2}
    assert reported["memory"]["kv_bytes"] == 14 << 30
    row = reported["contexts"]["4096"]
    assert row["dollars_naive"] == pytest.approx(2e6 / (row["requests_naive"] * 50 * 3600), abs=1e-6)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "llama-3.1-70b", "--weights", "int4", "--gpu-hour", "2.5")
    assert (
        out
        == """\
llama-3.1-70b · llama, grouped-query attention: 80 layers, 8 kv heads of 64, 128 wide

a token             327,680 B    320 KiB  = 80 layers × 8 kv heads × 128 × 2 (K and V) × 2 bytes
a block           5,242,880 B      5 MiB  16 tokens; the last block of a request leaves at most 15 empty, 4.69 MiB
full heads        2,621,440 B    2.5 MiB  a token if every head had its own K and V: 8 ×
a chunk         671,088,640 B    640 MiB  2,048 tokens of prefill, held before the next

memory       85,899,345,920 B     80 GiB
  weights    35,276,853,248 B   32.9 GiB  70.55 B parameters, in int4
  overhead    3,221,225,472 B      3 GiB  activations, graphs, libraries
  KV         47,401,267,200 B   44.1 GiB  9,041 blocks, one of them the null block

requests that fit, 500 tokens on average
  context  a request  reserved whole  of it used  in blocks  $ reserved  $ in blocks
    4,096   1.25 GiB              35      12.2 %        282       0.992        0.123
   32,768     10 GiB               4      1.53 %        282        8.68        0.123
  131,072     40 GiB               1     0.382 %        282       34.72        0.123
$: a million tokens at $2.5 an hour, if each request gets one every 50 ms
"""
    )


def test_the_documentation_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "models-and-memory.md").read_text("utf-8")
    (words, shown) = re.search(r"```\n\$ kvtop size (.*)\n([^`]*)```", page).groups()
    assert said(capsys, *words.split()) == shown
    rows = {name: json.loads(said(capsys, name, "--json")) for name in sizing.known_models()}
    for name, title in (
        ("llama-3.1-70b", "Llama 3.1 70B"),
        ("qwen3-235b-a22b", "Qwen3-235B-A22B"),
        ("minimax-m2.5", "MiniMax M2.5"),
        ("gemma-3-27b", "Gemma 3 27B"),
        ("deepseek-v3", "DeepSeek-V3"),
    ):
        r = rows[name]
        full = f"{r['full_attention_bytes_per_token'] / r['bytes_per_token']:.3g} ×"
        sizes = [r["bytes_per_token"], r["contexts"]["4096"]["bytes"], r["contexts"]["131072"]["bytes"]]
        line = next(line for line in page.splitlines() if line.startswith(f"| {title} ("))
        assert line.endswith(f") | {' | '.join(amount(n) for n in sizes)} | {full} |")


def test_what_is_special_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "past 1,024 tokens: the 52 layers with a window grow no more" in said(capsys, "gemma-3-27b")
    latent = said(capsys, "deepseek-ai/DeepSeek-V3", "--memory", "640GiB")
    assert "one latent of 576 values for 128 heads" in latent
    assert "= 61 layers × 576 values × 2 bytes" in latent
    assert "37.6 B of them for one token" in latent
    assert "more than there are" in said(capsys, "deepseek-v3")


def test_a_config_of_an_unknown_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    shape = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "head_dim": 24,
        "v_head_dim": 16,
    }
    path.write_text(json.dumps({"model_type": "new\x1b[31m", **shape}))
    out = said(capsys, str(path))
    assert "\x1b" not in out
    assert "= 320 values × 2 bytes" in out
    assert "--weights SIZE" in out
    assert "in blocks" not in out


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(said(capsys, "list", "--json"))
    assert [row["model"] for row in rows] == list(sizing.known_models())
    head, *lines = said(capsys, "list").splitlines()
    assert [line.split()[0] for line in lines] == [row["model"] for row in rows]
    assert head.split()[:3] == ["model", "parameters", "active"]
    assert len({len(line) for line in (head, *lines)}) == 1


@pytest.mark.parametrize(
    ("words", "said_"),
    [
        ("llama-3.1-7b", "did you mean llama-3.1"),
        ("nothing.json", "kvtop size list"),
        ("llama-3.1-8b --memory much", "--memory"),
        ("llama-3.1-8b --weights int3", "--weights int3"),
        ("llama-3.1-8b --weights 3furlongs", "--weights"),
        ("llama-3.1-8b --block-size 24", "power of two"),
        ("llama-3.1-8b --avg-tokens 0", "--avg-tokens"),
        ("llama-3.1-8b --context 0", "--context"),
        ("llama-3.1-8b --gpu-hour -1", "--gpu-hour"),
        ("llama-3.1-8b --itl 0", "--itl"),
        ("llama-3.1-8b --kv-cache-dtype int9", "--kv-cache-dtype"),
        ("", "MODEL"),
    ],
)
def test_one_line_for_what_is_wrong(words: str, said_: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said_ in said(capsys, *words.split(), code=2)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1 << 20, "1 MiB"),
        (5 << 28, "1.25 GiB"),
        (1 << 50, "1,024 TiB"),
    ],
)
def test_amounts(size: int, text: str) -> None:
    assert amount(size) == text
