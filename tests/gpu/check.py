"""`make gpu-check`: is it right on this card, and how fast? One command, one table, under ten minutes.

Needs torch, triton, transformers, numpy, safetensors, xxhash and msgspec, no network and no model files.
Owns the measurements: times are medians of CUDA events with a cold L2, bandwidth is set against a copy that
is measured in the same run; what is asked of an H200 stands beside, met or not. `--dry-run` goes through every
line on a CPU with tiny shapes under Triton's interpreter and stand-ins for what is not installed: it proves that
this program runs, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tests.gpu.machine import Machine, Table

RESULTS = Path(__file__).parent / "results"


def main(words: list[str] | None = None) -> int:
    """0: all is right; 1: something is wrong on this card; 2: there is no card."""
    parser = argparse.ArgumentParser(prog="make gpu-check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--dry-run", action="store_true", help="on a CPU, tiny, interpreted: times mean nothing"
    )
    parser.add_argument(
        "--only", default="", help="one part: correct, attention, linears, sampling, model, vllm"
    )
    args = parser.parse_args(words)
    if args.dry_run:
        if os.environ.get("TRITON_INTERPRET") != "1":
            print("gpu-check: --dry-run needs TRITON_INTERPRET=1 in the environment", file=sys.stderr)
            return 2
    elif not torch.cuda.is_available():
        print("gpu-check: no CUDA GPU here; it needs one and a torch built with CUDA", file=sys.stderr)
        return 2

    # Only now: importing the kernels without a GPU or the interpreter would be for nothing.
    if args.dry_run:
        from tests.gpu.stand_ins import install

        install()
    from tests.gpu import attention, correct, engine, linears, model, peers, sampling

    machine = Machine(torch.device("cpu" if args.dry_run else "cuda"))
    tables: list[Table] = []
    parts: list[tuple[str, Callable[[Machine], list[Table]]]] = [
        ("correct", correct.run), ("attention", attention.run), ("linears", linears.run),
        ("sampling", sampling.run), ("model", model.run), ("engine", engine.run), ("vllm", peers.run),
    ]  # fmt: skip
    print(machine.heading(), flush=True)
    with torch.inference_mode():
        for name, part in parts:
            if args.only in ("", name):
                found = part(machine)
                tables += found
                print("\n" + "\n\n".join(map(str, found)), flush=True)
    if machine.targets.rows:
        tables.append(machine.targets)
        print(f"\n{machine.targets}", flush=True)
    wrong = [row[0] for t in tables for row in t.rows if row[-1] == "WRONG"]
    if not args.dry_run and not args.only:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{machine.slug}.md"
        path.write_text("\n\n".join([machine.heading(), *map(str, tables)]) + "\n", "utf-8")
        print(f"\nwritten: tests/gpu/results/{path.name}")
    if wrong:
        print(f"\nwrong on this card: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
