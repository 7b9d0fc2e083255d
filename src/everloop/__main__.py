"""`python -m everloop` is the command `everloop`."""

from __future__ import annotations

import sys

from everloop.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
