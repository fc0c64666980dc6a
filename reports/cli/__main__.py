"""Entry point of `python -m reports.cli`, which is the same as `megalodon-numerics`."""

import sys

from parity.executors.supervision import supervised
from reports.cli.program import main

if __name__ == "__main__":
    sys.exit(supervised(main))
