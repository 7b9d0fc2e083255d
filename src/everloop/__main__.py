"""Entry point of `python -m everloop`: the `everloop` command."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python puts the current directory first on sys.path. That may be the workspace, where a tool could have written a
    # module that would shadow a real one.
    if sys.path[0] in ("", os.getcwd()) and not os.path.samefile(sys.path[0] or ".", f"{os.path.dirname(__file__)}/.."):
        del sys.path[0]
    from everloop.cli.main import main

    sys.exit(main())
