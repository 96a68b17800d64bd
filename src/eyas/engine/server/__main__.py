"""`python -m eyas.engine.server`: a server of the embedded engine, as `eyas serve` starts it."""

import sys

from eyas.imports import uncollected

with uncollected():
    from eyas.engine.server.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
