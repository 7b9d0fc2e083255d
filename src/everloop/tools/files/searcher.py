"""Find file names or lines below the working folder. Runs as a separate program, so that it can be killed.

    python -I -S searcher.py REQUEST

The request is JSON. Folders are opened by descriptor and never through a link, so nothing outside is ever read, not
even while links are being swapped. Each line of output is a path, a zero byte and, for grep, the line number, ":" (or
"-" for a context line) and the line. It imports nothing from the package, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import re
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any

UNREADABLE_PATTERN = 4
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
_MAX_DEPTH = 200
_FLUSH_AFTER = 50
Matches = Callable[[str], bool]


def main(request: dict[str, Any]) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (request["seconds"], request["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        found = find(request) if request["action"] == "find" else grep(request)
        for count, line in enumerate(found):
            sys.stdout.buffer.write(line + b"\n")
            if count % _FLUSH_AFTER == 0:
                sys.stdout.buffer.flush()
            if count == request["most"]:  # one more than is shown, to tell that there are more
                break
    except (re.error, RecursionError, OverflowError) as error:
        sys.stderr.write(str(error))
        return UNREADABLE_PATTERN
    sys.stdout.buffer.flush()
    return 0


def find(request: dict[str, Any]) -> Iterator[bytes]:
    """Yield the paths that match a glob."""
    wanted = glob(request["pattern"])
    for path, _, _ in walk(request):
        if wanted(os.fsdecode(path)):
            yield b"./" + path + b"\0"


def grep(request: dict[str, Any]) -> Iterator[bytes]:
    """Yield the lines that match a pattern, with context lines."""
    pattern = re.escape(request["pattern"]) if request["literal"] else request["pattern"]
    matches = re.compile(pattern, re.IGNORECASE if request["ignore_case"] else 0)
    if request["stdin"]:
        yield from lines(sys.stdin.buffer.read(request["file_bytes"]), b"", matches, request)
        return
    wanted = glob(request["glob"]) if request["glob"] else lambda path: True
    for path, folder, name in walk(request):
        if wanted(os.fsdecode(path)) and (data := load(folder, name, request)):
            try:
                yield from lines(data, b"./" + path + b"\0", matches, request)
            except MemoryError:
                continue


def walk(request: dict[str, Any]) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield (path, descriptor of its folder, name) for everything that is not a folder, sorted by name."""
    skipped = {os.fsencode(name) for name in request["skip"]}
    protected = {tuple(identity) for identity in request["protected"]}

    def below(folder: int, prefix: bytes, depth: int) -> Iterator[tuple[bytes, int, bytes]]:
        try:
            with os.scandir(folder) as entries:
                found = sorted((os.fsencode(each.name), each.is_dir(follow_symlinks=False)) for each in entries)
        except OSError:
            return
        for name, is_folder in found:
            if not is_folder:
                if not protected or _kept(folder, name) not in protected:
                    yield prefix + name, folder, name
            elif name not in skipped and depth < _MAX_DEPTH:
                yield from enter(folder, name, prefix + name + b"/", depth + 1)

    def enter(folder: int, name: bytes, prefix: bytes, depth: int) -> Iterator[tuple[bytes, int, bytes]]:
        try:
            inner = os.open(name, _FOLDER, dir_fd=folder)
        except OSError:
            return
        try:
            if _identity(os.fstat(inner)) not in protected:
                yield from below(inner, prefix, depth)
        finally:
            os.close(inner)

    root = os.open(".", _FOLDER)
    yield from below(root, b"", 0)


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _kept(folder: int, name: bytes) -> tuple[int, int] | None:
    try:
        return _identity(os.stat(name, dir_fd=folder, follow_symlinks=False))
    except OSError:  # it is gone
        return None


def load(folder: int, name: bytes, request: dict[str, Any]) -> bytes:
    """Return the content of a regular file within the size limit; otherwise nothing."""
    most = request["file_bytes"]
    try:
        descriptor = os.open(name, _FILE, dir_fd=folder)
    except OSError:
        return b""
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_size > most or [*_identity(info)] in request["protected"]:
            return b""
        return os.read(descriptor, info.st_size)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def lines(data: bytes, prefix: bytes, pattern: re.Pattern[str], request: dict[str, Any]) -> Iterator[bytes]:
    """Yield the matching lines of one file with the requested context."""
    utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    if b"\0" in data[:8192] and not utf16:
        return
    texts = [line.rstrip("\r") for line in data.decode("utf-16" if utf16 else "utf-8-sig", "replace").split("\n")]
    if texts[-1] == "":
        texts.pop()
    around, shown = request["context"], -1
    hits = [number for number, text in enumerate(texts) if pattern.search(text)]
    found = set(hits)
    for hit in hits:
        first = max(hit - around, shown + 1)
        if around and 0 <= shown < first - 1:
            yield b"--"
        for number in range(first, min(hit + around + 1, len(texts))):
            shown = number
            mark = ":" if number in found else "-"
            yield prefix + f"{number + 1}{mark}{texts[number][: request['line']]}".encode("utf-8", "replace")


def glob(pattern: str) -> Matches:
    """Compile a glob to a predicate on paths. Without a slash it matches the name alone; a leading "!" negates it."""
    wanted = not pattern.startswith("!")
    pattern = pattern.removeprefix("!")
    while pattern.startswith("./"):
        pattern = pattern[2:]
    by_name = "/" not in pattern
    regex = re.compile(_regex(pattern.lstrip("/")), re.DOTALL)
    return lambda path: (regex.fullmatch(path.rpartition("/")[2] if by_name else path) is not None) == wanted


_GLOB = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|\{[^{}]*\}|.", re.DOTALL)
_FIXED = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def _regex(pattern: str) -> str:
    parts = []
    for token in _GLOB.findall(pattern):
        if token in _FIXED:
            parts.append(_FIXED[token])
        elif token.startswith("{") and token.endswith("}"):
            parts.append("(?:" + "|".join(_regex(each) for each in token[1:-1].split(",")) + ")")
        elif token.startswith("[") and len(token) > 2:
            inside = token[1:-1].replace("\\", "\\\\").replace("[", "\\[")
            parts.append("[" + ("^" + inside[1:] if inside.startswith("!") else inside) + "]")
        else:
            parts.append(re.escape(token))
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
