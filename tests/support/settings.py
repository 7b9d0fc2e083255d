"""Settings of the home that a test's processes use."""

from __future__ import annotations

import os
from pathlib import Path

ASK_BEFORE_WRITING = """
[[policy]]
tool = "write_file"
do = "ask"
why = "writing is dear"
"""


def home_with(settings: str) -> Path:
    """Make the test's home, with these settings."""
    home = Path(os.environ["EVERLOOP_HOME"])
    home.mkdir(parents=True)
    (home / "config.toml").write_text(settings)
    return home
