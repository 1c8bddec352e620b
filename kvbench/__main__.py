"""`python -m kvbench` is the command `kvbench`."""

from kvbench.cli import main

main()
