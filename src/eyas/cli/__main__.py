"""`python -m eyas.cli` is `eyas`."""

from eyas.cli.program import main

main()
