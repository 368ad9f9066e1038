"""The command line, one command a file."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `kvtop` script; exits."""
    from kvtop.cli.commands import main as run

    run()
