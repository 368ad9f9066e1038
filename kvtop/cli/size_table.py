"""`kvtop size`: what a model's cache takes and how many requests fit, as a table for people or as JSON.

Owns the wording and the layout; every figure is engine.sizing's. Reads no weights and loads neither torch nor
textual.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import sizing
from kvtop.text import safe_text
from kvtop.values import parse_size

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked for. weights: a format, or a SIZE as it was typed."""

    model: str
    revision: str | None = None
    memory: int = 80 << 30
    weights: str | None = None
    overhead: int = 3 << 30
    avg_tokens: int = 500
    contexts: Sequence[int] = ()
    chunk: int = 2048
    gpu_hour: float | None = None
    itl_ms: float = 50.0
    block_size: int = 16
    kv_cache_dtype: str = "auto"


def answer(question: Question, as_json: bool) -> int:
    """Print the report; `list` as the model prints all known ones. Raises SetupError."""
    if question.model == "list":
        rows = [ask(question, name) for name in sizing.known_models()]
        print(json.dumps(rows) if as_json else "\n".join(overview(rows)))
        return 0
    report = ask(question, question.model)
    print(json.dumps(report) if as_json else "\n".join(safe_text(line) for line in lines(report)))
    return 0


def ask(question: Question, model: str) -> dict[str, Any]:
    """The report of one model."""
    q = question
    weights: str | int | None = q.weights
    if q.weights is not None and q.weights[:1].isdigit():
        weights = parse_size(q.weights, "--weights")
    plan = sizing.Plan(
        memory=q.memory,
        weights=weights,
        overhead=q.overhead,
        avg_tokens=q.avg_tokens,
        contexts=tuple(dict.fromkeys(q.contexts)) or sizing.CONTEXTS,
        chunk=q.chunk,
        gpu_hour=q.gpu_hour,
        itl=q.itl_ms / 1e3,
    )
    name, config = sizing.load(model, revision=q.revision)
    shape = sizing.KvShape.from_config(config)
    return plan.report(name, config, sizing.Sizing(shape, sizing.KV_DTYPES[q.kv_cache_dtype], q.block_size))


# ------------------------------------------------------------------------------------------ for people


def lines(r: Report) -> list[str]:
    """One model's report."""
    heads = f"{r['kv_heads']} kv heads of {r['heads']}, {r['head_dim']} wide"
    if r["attention"] == "latent":
        heads = f"one latent of {r['head_dim']} values for {r['heads']} heads"
    out = [
        f"{r['model']} · {r['model_type'] or 'model'}, {r['attention']} attention: {r['layers']} layers, {heads}",
        "",
        _row("a token", r["bytes_per_token"], _product(r)),
    ]
    if "window" in r:
        grow = f"past {r['window']:,} tokens: the {r['window_layers']} layers with a window grow no more"
        out.append(_row("", r["bytes_per_token_past_window"], grow))
    size = r["block_size"]
    spare = f"{size} tokens; the last block of a request leaves at most {size - 1} empty, "
    full = r["full_attention_bytes_per_token"]
    out += [
        _row("a block", r["bytes_per_block"], spare + amount(r["last_block_waste_bytes"])),
        _row(
            "full heads",
            full,
            f"a token if every head had its own K and V: {full / r['bytes_per_token']:.3g} ×",
        ),
        _row(
            "a chunk",
            r["chunk"]["bytes"],
            f"{r['chunk']['tokens']:,} tokens of prefill, held before the next",
        ),
        "",
        *_memory(r),
        *_contexts(r),
    ]
    if "cost" in r:
        price, itl = r["cost"]["gpu_hour"], r["cost"]["itl_s"] * 1e3
        out.append(f"$: a million tokens at ${price:g} an hour, if each request gets one every {itl:g} ms")
    return [*out, *(f"note: {note}" for note in r["notes"])]


def _row(name: str, size: int, text: str) -> str:
    return f"{name:<10}{size:>17,} B  {amount(size):>9}  {text}".rstrip()


def _product(r: Report) -> str:
    """The formula, where it is one product."""
    layers, width = r.get("holding_layers", r["layers"]), r["value_bytes"]
    if r["attention"] == "latent":
        return f"= {layers} layers × {r['head_dim']} values × {width} bytes"
    product = layers * r["kv_heads"] * r["head_dim"] * 2 * width
    if product != r["bytes_per_token"]:
        return f"= {r['bytes_per_token'] // width:,} values × {width} bytes"
    return f"= {layers} layers × {r['kv_heads']} kv heads × {r['head_dim']} × 2 (K and V) × {width} bytes"


def _memory(r: Report) -> list[str]:
    memory, weights = r["memory"], r["weights"]
    parts = [f"{weights['parameters'] / 1e9:.4g} B parameters"] if "parameters" in weights else []
    if "active_parameters" in weights and weights["active_parameters"] < weights["parameters"]:
        parts.append(f"{weights['active_parameters'] / 1e9:.3g} B of them for one token")
    parts += [f"in {weights['format']}"] if "format" in weights else []
    out = [_row("memory", memory["bytes"], "")]
    if "bytes" in weights:
        out.append(_row("  weights", weights["bytes"], ", ".join(parts)))
    out.append(_row("  overhead", memory["overhead_bytes"], "activations, graphs, libraries"))
    if "kv_bytes" in memory:
        blocks = f"{r['num_blocks']:,} blocks, one of them the null block" if "num_blocks" in r else ""
        out.append(_row("  KV", memory["kv_bytes"], blocks))
    return [*out, ""]


def _contexts(r: Report) -> list[str]:
    fits = "avg_tokens" in r
    head = f"{'context':>9}  {'a request':>9}"
    if fits:
        head += f"  {'reserved whole':>14}  {'of it used':>10}  {'in blocks':>9}"
        head += f"  {'$ reserved':>10}  {'$ in blocks':>11}" if "cost" in r else ""
    out = [head]
    if fits:
        out.insert(0, f"requests that fit, {r['avg_tokens']:,} tokens on average")
    for tokens, row in r["contexts"].items():
        line = f"{int(tokens):>9,}  {amount(row['bytes']):>9}"
        if fits:
            line += f"  {row['requests_naive']:>14,}  {100 * row['naive_used']:>8.3g} %  {row['requests_paged']:>9,}"
        if "cost" in r:
            line += "".join(
                f"  {_dollars(row.get(key)):>{width}}"
                for key, width in (("dollars_naive", 10), ("dollars_paged", 11))
            )
        out.append(line)
    return out


def overview(reports: Sequence[Report]) -> list[str]:
    """A line a known model."""
    shown = list(reports[0]["contexts"]) if reports else []
    head = f"{'model':<18}{'parameters':>11}{'active':>9}  {'attention':<14}{'a token':>11}{'full heads':>11}"
    out = [head + "".join(f"{f'at {_short(int(n))}':>11}" for n in shown)]
    for r in reports:
        weights = r["weights"]
        active = weights["active_parameters"]
        some = f"{active / 1e9:.3g} B" if active < weights["parameters"] else ""
        line = f"{r['model']:<18}{weights['parameters'] / 1e9:>9.4g} B{some:>9}  {r['attention']:<14}"
        line += f"{amount(r['bytes_per_token']):>11}"
        line += f"{f'''{r['full_attention_bytes_per_token'] / r['bytes_per_token']:.3g} ×''':>11}"
        out.append(line + "".join(f"{amount(row['bytes']):>11}" for row in r["contexts"].values()))
    return out


def amount(size: int) -> str:
    """Bytes in binary units with three digits: 1.25 GiB, 320 KiB, 4.69 MiB."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    digits = f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits} {unit}"


def _short(tokens: int) -> str:
    return f"{tokens // 1024:,}K" if tokens % 1024 == 0 else f"{tokens:,}"


def _dollars(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if value >= 0.995 else f"{value:.3f}"
