"""`python -m reports.cli` is `megalodon-numerics`."""

import sys

from reports.cli.program import main

if __name__ == "__main__":
    sys.exit(main())
