"""The entry point of `python -m evaluation`."""

import sys

from .command import main

sys.exit(main())
