"""`make bench`: this engine and other engines with the same work, as a table and as results/<cpu>.json.

Columns: work, peer, ours, theirs, unit, ratio (larger is better for us), target, of_limit (part of the read
bandwidth of all threads). The targets are what vLLM reached on one CPU: eager, bfloat16, two threads of an EPYC
9005. On another machine they are only a rough guide.
"""

from __future__ import annotations

import os

# Read once, when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.pop("OMP_WAIT_POLICY", None)

import argparse
import json
import platform
import re
from pathlib import Path
from typing import Any

from engine.bench import Bench, read_bandwidth
from engine.config import EngineConfig
from engine.files import hub
from engine.machine import cores
from tests.benchmarks import peers

TARGETS = {"decode-1": 68.0, "decode-8": 430.0, "prefill": 2390.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub id, folder or .gguf; default: the built-in model")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--out", type=Path, help="default: results/<cpu>.json beside this file")
    args = parser.parse_args()
    config = EngineConfig(model=args.model, device="cpu", threads=args.threads)
    bandwidth = read_bandwidth(config)
    print(f"{cpu()}, {args.threads} threads, {bandwidth / 1e9:.1f} GB/s read\n")
    ours, limits, first = measure(config, bandwidth)
    rows = [row("first-token-cached", "first-token-cold", first[1], first[0], "ms", first[0] / first[1])]
    files = hub.resolve(args.model)
    for name, peer in (("transformers", peers.transformers), ("llama.cpp", peers.llama_cpp)):
        theirs = peer(files, args.threads)
        if theirs is None:
            print(f"{name}: not installed, left out")
            continue
        for work, rate in theirs.items():
            rows.append(row(work, name, ours[work], rate, "tok/s", ours[work] / rate, limits.get(work)))
    show(rows)
    out = args.out or Path(__file__).parent / "results" / f"{slug(cpu())}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"\n{out}")


def measure(
    config: EngineConfig, bandwidth: float
) -> tuple[dict[str, float], dict[str, float], tuple[float, float]]:
    """Our rates, the part of the bandwidth that each uses, and the first token cold and cached in milliseconds."""
    bench = Bench(config)
    try:
        rates, limits = {}, {}
        for n in (1, 8):
            rates[f"decode-{n}"], read = bench.decode(n)
            limits[f"decode-{n}"] = read / bandwidth
        rates["prefill"] = bench.prefill()
        cold, hit = bench.first_token()
    finally:
        bench.close()
    return rates, limits, (cold * 1000, hit * 1000)


def row(
    work: str, peer: str, ours: float, theirs: float, unit: str, ratio: float, of_limit: float | None = None
) -> dict[str, Any]:
    numbers = {"ours": round(ours, 1), "theirs": round(theirs, 1)}
    more = {"target": TARGETS.get(work), "of_limit": None if of_limit is None else round(of_limit, 3)}
    return {"work": work, "peer": peer, **numbers, "unit": unit, "ratio": round(ratio, 2), **more}


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as a table."""
    print(
        f"{'work':<20}{'peer':<18}{'ours':>10}{'theirs':>10}  {'unit':<7}{'ratio':>6}{'target':>9}{'of limit':>10}"
    )
    for r in rows:
        target = "" if r["target"] is None else f"{r['target']:,.0f}"
        limit = "" if r["of_limit"] is None else f"{r['of_limit']:.0%}"
        print(
            f"{r['work']:<20}{r['peer']:<18}{r['ours']:>10,.1f}{r['theirs']:>10,.1f}  "
            f"{r['unit']:<7}{r['ratio']:>6.2f}{target:>9}{limit:>10}"
        )


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    main()
