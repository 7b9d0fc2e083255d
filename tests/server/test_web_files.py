"""The page's own files: what is in them, and that the libraries are the ones that are listed."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from everloop.server.web_files import FOLDER, files

VENDOR = FOLDER / "vendor"
OWN = sorted(path for path in FOLDER.glob("*.js"))


@pytest.mark.parametrize("folder", [VENDOR, Path(__file__).parent / "axe"], ids=["page", "tests"])
def test_the_libraries_are_the_listed_versions_with_their_licences(folder: Path):
    listed = json.loads((folder / "versions.json").read_text())
    hashes = {name: hash for package in listed for name, hash in package["files"].items()}
    assert {path.name for path in folder.glob("*.js")} == hashes.keys()
    for name, hash in hashes.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == hash
    licences = (folder / "LICENSES.txt").read_text()
    for package in listed:
        assert f"{package['name']} {package['version']} ({package['licence']})" in licences
        assert package["integrity"].startswith("sha512-")


def test_every_import_is_a_file_of_the_page_and_nothing_is_set_as_html():
    for path in (*OWN, *VENDOR.glob("*.js")):
        for target in re.findall(r'(?:from|import)\s*"([^"]+)"', path.read_text()):
            assert (path.parent / target).resolve() in {found.resolve() for found in FOLDER.rglob("*.js")}, path.name
    for path in OWN:
        source = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function", source)
        assert "http://" not in source
        assert len(source.splitlines()) < 600


def test_the_page_is_small_enough_to_be_read():
    assert sum(len(path.read_text().splitlines()) for path in OWN) <= 6_000


def test_scripts_are_sent_without_their_comments_and_otherwise_unchanged():
    for path in OWN:
        source, sent = path.read_text().splitlines(), files()[f"/web/{path.name}"].body.decode().splitlines()
        assert len(source) == len(sent)
        for before, after in zip(source, sent, strict=True):
            assert after == before or (not after and re.match(r"\s*(/\*\*|\*|//)", before)), (path.name, before)
    assert sum(len(files()[f"/web/{path.name}"].body) for path in OWN) < 0.9 * sum(
        len(path.read_bytes()) for path in OWN
    )


def test_the_page_loads_only_its_own_files():
    page = files()["/"].body.decode()
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(addresses) > 10
    assert set(addresses) <= files().keys()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style| on\w+=| style=", page)
