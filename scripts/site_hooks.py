"""Hooks of mkdocs: pages of the repository's root become pages of the site, and links to them and from them follow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
OUTWARD = re.compile(r"\]\(\.\./(" + "|".join(map(re.escape, PAGES)) + r")")  # from docs/ to the root
INWARD = re.compile(r"\]\(docs/")  # from the root to docs/
ELSEWHERE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?!CHANGELOG|CONTRIBUTING)[^)]*\)"
)  # to code, which is not on the site


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File  # type: ignore[import-not-found,unused-ignore]

    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri in PAGES:
        return INWARD.sub("](", markdown)
    return ELSEWHERE.sub(r"\1", OUTWARD.sub(r"](\1", markdown))
