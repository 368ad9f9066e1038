"""The command line: one command a file in `commands`, their options made from the knobs of dataclasses."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `kvtop` script; exits."""
    from kvtop.cli.program import main as run

    run()
