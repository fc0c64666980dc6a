"""`python -m reports.cli` is `megalodon-numerics`."""

import sys

from parity.executors.supervision import supervised
from reports.cli.program import main

if __name__ == "__main__":
    sys.exit(supervised(main))
