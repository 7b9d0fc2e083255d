"""Renew the JavaScript libraries of the web page and of its tests: `python scripts/vendor_web.py`.

Each package is fetched by npm in the version below and refused if its hash is another one. To move to a
new version, change the version and the hash (`npm view NAME@VERSION dist.integrity`). The files are used as published,
apart from their imports: the page's Content-Security-Policy allows no import map, so names become relative paths.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "src" / "everloop" / "server" / "web" / "vendor"
TESTS = ROOT / "tests" / "server" / "axe"
IMPORTS = {"preact": "./preact.js", "preact/hooks": "./hooks.js", "@preact/signals-core": "./signals-core.js"}


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    licence: str
    integrity: str
    files: dict[str, str]  # in the package, and here


PACKAGES = (
    Package(
        "preact",
        "11.2.0",
        "MIT",
        "sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "hooks.js"},
    ),
    Package(
        "@preact/signals",
        "2.11.4",
        "MIT",
        "sha512-Rb+5RPo9gWSaHtzJeauhHxiC8KP/IF2DEPkHPEOGOnuy2wnJzRqyeLRankUCYd6ADqtxS6GnWGv6Ie343d8aYw==",
        {"dist/signals.mjs": "signals.js"},
    ),
    Package(
        "@preact/signals-core",
        "1.14.5",
        "MIT",
        "sha512-vcRv7Ityz5JVmeiVqIluLFzT/PDS/AlhHUpw3/aUWqcVUs6bDGIPXE/6RSC4evBNWYvnniozg5Syfj33al3gkg==",
        {"dist/signals-core.mjs": "signals-core.js"},
    ),
    Package(
        "htm",
        "3.1.1",
        "Apache-2.0",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"dist/htm.mjs": "htm.js"},
    ),
    Package(
        "marked",
        "18.2.0",
        "MIT",
        "sha512-KaeL+tAbtvI930q7HE2PN5lYXYdT8EiSmxHlN6F3rsfb57wd5mp5W5TLazpdj4inTQBJdgjYwbs40W/0VUGU+Q==",
        {"lib/marked.esm.js": "marked.js"},
    ),
    Package(
        "streaming-markdown",
        "0.2.15",
        "MIT",
        "sha512-eSWjdvLSTznl2+FIzuxw1TRXwhjZiY1RfSygGCMpcNY8CrsaUM2zHtxe/JFcPoXCQxeO3TSJ72QMDIN5B/Ui1w==",
        {"smd.min.js": "streaming-markdown.js"},
    ),
)

AXE = Package(
    "axe-core",
    "4.14.0",
    "MPL-2.0",
    "sha512-9WTZxEjsZ7b13TH8JPmbV2z8CHbl80/2hm3XPEG4JgNdQLK81IBRXmSxHfMAOkSqQeRxT/0dwNDz2GOm3zzpcQ==",
    {"axe.min.js": "axe.min.js"},
)


def fetch(package: Package) -> tarfile.TarFile:
    """Fetch a package and check its hash."""
    with tempfile.TemporaryDirectory() as folder:
        pack = ["npm", "pack", "--silent", "--pack-destination", folder, f"{package.name}@{package.version}"]
        subprocess.run(pack, stdout=subprocess.DEVNULL, check=True, timeout=120)
        (packed,) = Path(folder).iterdir()
        data = packed.read_bytes()
    found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != package.integrity:
        sys.exit(f"{package.name} {package.version} has the hash {found}, which is not the one in this script")
    return tarfile.open(fileobj=io.BytesIO(data))


def read(archive: tarfile.TarFile, name: str) -> str | None:
    try:
        file = archive.extractfile(f"package/{name}")
    except KeyError:
        return None
    return file.read().decode() if file is not None else None


def with_relative_imports(source: str) -> str:
    source = re.sub(r"\n//# sourceMappingURL=\S+\s*$", "\n", source)
    return re.sub(r'(from|import)\s*"([^".][^"]*)"', lambda found: f'{found[1]}"{IMPORTS[found[2]]}"', source)


def vendor(folder: Path, packages: Sequence[Package]) -> None:
    """Write the files of these packages, a list of them with their hashes, and their licences."""
    folder.mkdir(parents=True, exist_ok=True)
    listed, texts = [], []
    for package in packages:
        archive = fetch(package)
        hashes = {}
        for name, target in package.files.items():
            source = read(archive, name)
            if source is None:
                sys.exit(f"{package.name} {package.version} has no file {name}")
            data = (with_relative_imports(source) if folder == PAGE else source).encode()
            (folder / target).write_bytes(data)
            hashes[target] = hashlib.sha256(data).hexdigest()
        listed.append(
            {
                "name": package.name,
                "version": package.version,
                "licence": package.licence,
                "integrity": package.integrity,
                "files": hashes,
            }
        )
        names = ("LICENSE", "LICENSE.md", "LICENSE.txt", "license")
        text = next(filter(None, (read(archive, name) for name in names)), None)
        if text is None:
            sys.exit(f"{package.name} {package.version} has no licence file")
        texts.append(f"{package.name} {package.version} ({package.licence})\n\n{text}\n")
    (folder / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")
    (folder / "LICENSES.txt").write_text(f"\n{'-' * 80}\n\n".join(texts))


if __name__ == "__main__":
    vendor(PAGE, PACKAGES)
    vendor(TESTS, [AXE])
