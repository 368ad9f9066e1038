"""`python -m kvtop`."""

from kvtop.cli import main

main()
