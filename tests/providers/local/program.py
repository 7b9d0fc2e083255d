"""The real `everloop` with a test's own catalogue: EVERLOOP_TEST_CATALOGUE names a file of cards."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

from everloop.cli.main import main
from everloop.providers.local import catalogue

if __name__ == "__main__":
    cards = json.loads(Path(os.environ["EVERLOOP_TEST_CATALOGUE"]).read_text())
    own = cast("dict[str, Any]", catalogue.CATALOGUE)
    own.clear()
    for card in cards:
        wheels = tuple(catalogue.Wheel(**wheel) for wheel in card.pop("wheels"))
        own[card["name"]] = catalogue.ModelCard(**card, wheels=wheels)
    sys.exit(main())
