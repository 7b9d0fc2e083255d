"""The documentation as a whole: its groups, its links, and the site built from it. Needs no mkdocs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import site_hooks

from tests.support.places import DOCS

ROOT = DOCS.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


def text_of(page: Path) -> str:
    """Return a page without its code, where brackets mean other things."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site both make them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.M)
    words = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in words}


def leaves(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    for inside in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from leaves(inside)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_link_is_dead(page):
    for target in LINK.findall(text_of(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {file.name} has no heading #{anchor}"


def test_every_page_is_in_one_group_of_the_site_and_of_the_index():
    groups = [name for part in SITE["nav"] for name in part]
    assert groups == ["Everloop", "Tutorial", "How to", "Reference", "Explanation"]
    listed = list(leaves(SITE["nav"]))
    assert sorted(listed) == sorted({*(page.name for page in DOCS.glob("*.md")), *site_hooks.PAGES})
    index = (DOCS / "index.md").read_text()
    assert re.findall(r"^## (.+)$", index, re.M) == groups[1:]
    for part in SITE["nav"][1:]:
        for name, pages in part.items():
            section = index.partition(f"## {name}\n")[2].partition("\n## ")[0]
            linked = {Path(target).name for target in LINK.findall(section)}
            assert linked == set(leaves(pages)), f"the group {name} of docs/index.md and of mkdocs.yml"


def test_the_readme_links_to_every_page():
    linked = {target.removeprefix("docs/") for target in LINK.findall(text_of(ROOT / "README.md"))}
    assert {page.name for page in DOCS.glob("*.md")} - linked == {"index.md"}


def test_links_between_the_root_and_the_pages_work_on_the_site():
    class Page:
        class file:
            src_uri = ""

    def rewritten(source: str, text: str) -> str:
        Page.file.src_uri = source
        return site_hooks.on_page_markdown(text, Page, None, None)

    assert rewritten("index.md", "[a](../CHANGELOG.md#x) [b](tools.md)") == "[a](CHANGELOG.md#x) [b](tools.md)"
    assert rewritten("CONTRIBUTING.md", "[a](docs/tools.md)") == "[a](tools.md)"
    assert rewritten("tools.md", "the [code](../src/everloop/bus.py)") == "the code"


def test_the_site_loads_nothing_from_a_network():
    assert SITE["theme"]["font"] is False
    assert SITE["plugins"] == ["search"]
    assert not re.search(r"https?://", (ROOT / "mkdocs.yml").read_text())
    assert not {"extra_javascript", "extra_css"} & SITE.keys()


def test_every_package_of_the_site_is_pinned_with_its_hash():
    lock = (ROOT / "requirements-docs.lock").read_text()
    names = re.findall(r"^([a-z0-9-]+)==", lock, re.M)
    assert "mkdocs-material" in names
    assert all("--hash=sha256:" in part for part in re.split(r"^(?=[a-z0-9-]+==)", lock, flags=re.M) if part.strip())
    assert "://" not in lock


def test_every_finding_of_doctor_is_explained():
    source = (ROOT / "src" / "everloop" / "cli" / "doctor.py").read_text()
    names = set(re.findall(r'Check\(\s*"([a-z]+)"', source)) | set(re.findall(r'_missing\("([a-z]+)"', source))
    assert len(names) >= 12
    page = (DOCS / "faq.md").read_text()
    explained = set(re.findall(r"`(?:✗ )?([a-z]+)`", "\n".join(re.findall(r"^### .*$", page, re.M))))
    assert names - {"everloop"} == explained


def test_no_page_has_stray_blank_lines():
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        text = FENCED.sub("```", page.read_text())
        assert "\n\n\n" not in text, page.name
        assert not text.startswith("\n"), page.name
        assert text.endswith("\n"), page.name
        assert not text.endswith("\n\n"), page.name
