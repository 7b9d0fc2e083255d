"""`python -m everloop` is the command `everloop`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python puts the current folder first on its path. That may be the workspace, where a tool may have written a
    # module that would then be loaded in the place of a real one.
    if sys.path[0] in ("", os.getcwd()) and not os.path.samefile(sys.path[0] or ".", f"{os.path.dirname(__file__)}/.."):
        del sys.path[0]
    from everloop.cli.main import main

    sys.exit(main())
