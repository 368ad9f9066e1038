"""`python -m kvtop`."""

from kvtop.cli.commands import main

main()
