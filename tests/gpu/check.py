"""`make gpu-check`: are the results right on this card, and how fast is it? One command, under ten minutes.

Needs torch, triton, transformers, numpy, safetensors, xxhash and msgspec, but no network and no model files. Times are
medians of CUDA events with a cold L2. Bandwidth is compared with a copy that is measured in the same run. On an H200
each target is shown as met or not met. `--dry-run` runs every line on a CPU, with tiny shapes, Triton's interpreter and
stand-ins for what is not installed. It proves that this program runs; its times mean nothing.
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
    """Returns 0 if everything is right, 1 if something is wrong on this card, 2 if there is no card."""
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

    # Imported only now: without a GPU and without the interpreter the kernels are of no use.
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
