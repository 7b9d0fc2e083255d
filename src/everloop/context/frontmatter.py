"""Read Markdown with front matter: `---`, YAML, `---`, body.

The file may come from anywhere, so only plain data is accepted in the YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import EverloopError

if TYPE_CHECKING:
    import yaml

MAX_LENGTH = 16_000  # maximum characters of front matter
MAX_DEPTH = 20  # maximum levels of nested lists and mappings
FIRST_LINE = 2  # line of the file in which the YAML begins

_FENCE = re.compile(r"^---[ \t]*$", re.MULTILINE)
_UNREADABLE = re.compile("[^\t\n\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|\ufeff")
_SIMPLE = re.compile(r"""([A-Za-z][A-Za-z0-9_-]{0,63}): +(?:([^\W\d_].*?)|"([^"\\]*)"|'([^']*)'|(\{.*\})) *""")
_NOT_CLOSED = re.compile("end of stream|expected ',' or|expected ':'")
_WORD = "[A-Za-z_][A-Za-z0-9_-]*"
_WORDS = re.compile(rf"({_WORD}): \[({_WORD}(?:, {_WORD})*)\]")
_MAPPING = re.compile(rf"\{{{_WORDS.pattern}(?:, {_WORDS.pattern})*\}}")
_NOT_TEXT = frozenset({"yes", "no", "on", "off", "true", "false", "null"})  # in YAML, whatever their case


class FrontMatterError(EverloopError):
    """Invalid front matter: what is wrong, and in which line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
        self.message = message


class FrontMatter(msgspec.Struct, frozen=True):
    """The values, the text below the front matter, and the line of each key."""

    values: dict[str, Any]  # plain data: texts, numbers, booleans, None, lists, and mappings by text
    body: str
    lines: dict[tuple[str, ...], int] = {}

    def line(self, *path: str) -> int:
        """Return the line of a key, or of the nearest enclosing key."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_front_matter(text: str) -> FrontMatter:
    """Parse a text; the FrontMatterError for an invalid one says what is wrong and where."""
    header, body = _split(text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n"))
    if (simple := read_simple(header)) is not None:
        return FrontMatter(simple[0], body, simple[1])
    if found := _UNREADABLE.search(header):
        line = _line(header, found.start())
        raise FrontMatterError(line, f"the character U+{ord(found[0]):04X} is not allowed in front matter")
    values, lines = read_yaml(header)
    return FrontMatter(values, body, lines)


def _split(text: str) -> tuple[str, str]:
    """Return the front matter and the body."""
    start = _FENCE.match(text)
    if start is None:
        raise FrontMatterError(1, "the file must begin with a line --- and its front matter")
    begin = start.end() + 1
    end = _FENCE.search(text, begin, begin + MAX_LENGTH + 1000)
    if end is not None and end.start() - begin <= MAX_LENGTH:
        return text[begin : end.start()], text[end.end() + 1 :]
    if len(text) - begin > MAX_LENGTH:
        raise FrontMatterError(1, f"the front matter is longer than {MAX_LENGTH} characters, or no line --- ends it")
    raise FrontMatterError(1, "no line --- ends the front matter")


def _line(header: str, position: int) -> int:
    """Return the line in the file. Counted here, because YAML knows more line breaks than editors do."""
    return FIRST_LINE + header.count("\n", 0, position)


# ---------------------------------------------------------------------------------------------- without YAML


def read_simple(header: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]] | None:
    """Parse front matter of `key: text` lines exactly as YAML would; None if it needs a YAML parser.

    Every start reads the shipped skills, and importing PyYAML would cost more than everything else done for them.
    """
    values: dict[str, Any] = {}
    lines: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(header.split("\n"), start=FIRST_LINE):
        if not line:
            continue
        found = _SIMPLE.fullmatch(line)
        if found is None or not line.isprintable():
            return None
        key, plain = found[1], found[2]
        if key in values or key.lower() in _NOT_TEXT:
            return None
        if found[5] is not None:
            if (mapping := _simple_mapping(found[5])) is None:
                return None
            values[key] = mapping
            lines |= {(key, inner): number for inner in mapping}
        elif plain is None:
            values[key] = found[3] if found[3] is not None else found[4]
        elif plain in ("true", "false"):
            values[key] = plain == "true"
        elif plain.lower() in _NOT_TEXT or ": " in plain or " #" in plain or plain.endswith(":"):
            return None
        else:
            values[key] = plain
        lines[key,] = number
    return values, lines


def _simple_mapping(text: str) -> dict[str, list[str]] | None:
    """Parse `{bins: [git, ssh], env: [TOKEN]}`; None if it is anything else."""
    if _MAPPING.fullmatch(text) is None or any(word.lower() in _NOT_TEXT for word in re.findall(_WORD, text)):
        return None
    pairs = _WORDS.findall(text)
    mapping = {key: words.split(", ") for key, words in pairs}
    return mapping if len(mapping) == len(pairs) else None


# ---------------------------------------------------------------------------------------------- with YAML


def read_yaml(header: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Parse any front matter with PyYAML, but reject anchors, tags and merges, which can expand a small file hugely."""
    import yaml

    loader_class: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check(header, yaml.parse(header, Loader=loader_class))
        loader = loader_class(header)
        try:
            root = loader.get_single_node()
            return _Builder(header, loader).mapping(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise _explain(error, header) from None
    except yaml.YAMLError as error:
        raise FrontMatterError(1, f"this is not valid YAML: {error}") from None


def _check(header: str, events: Iterator[Any]) -> None:
    """Reject unbounded growth and nesting before any value is built."""
    import yaml

    depth = 0
    for event in events:
        place: int = event.start_mark.index
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise FrontMatterError(_line(header, place), "anchors and aliases (& and *) are not supported")
        if getattr(event, "tag", None):
            raise FrontMatterError(_line(header, place), f"tags like {event.tag[:60]} are not supported")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise FrontMatterError(_line(header, place), f"more than {MAX_DEPTH} nested lists and mappings")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _explain(error: yaml.MarkedYAMLError, header: str) -> FrontMatterError:
    problem = error.problem or str(error)
    mark = error.problem_mark
    if error.context_mark is not None and _NOT_CLOSED.search(problem):
        mark = error.context_mark  # where a quote or list begins is more useful than where the text ends
    place: int = getattr(mark, "index", 0)
    message = f"this is not valid YAML: {', '.join(filter(None, (error.context, problem)))}"
    if "mapping values are not allowed" in problem:
        message = 'a text that contains ": " must be in quotes'
    elif header[place : place + 1] == "\t":
        message = "a tab is not allowed here: use spaces"
    elif "cannot start any token" in problem or "unknown escape" in problem:
        message = f"{problem}: put the text in single quotes"
    return FrontMatterError(_line(header, place), message)


class _Builder:
    """Converts YAML nodes to plain data, and records the lines of keys."""

    def __init__(self, header: str, loader: Any) -> None:
        self._header = header
        self._loader = loader
        self._lines: dict[tuple[str, ...], int] = {}

    def mapping(self, root: Any) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
        if root is None:
            return {}, {}
        if root.id != "mapping":
            raise FrontMatterError(self._line(root), "the front matter must be lines of the form `key: value`")
        values: dict[str, Any] = self._build(root, ())
        return values, self._lines

    def _build(self, node: Any, path: tuple[str, ...]) -> Any:
        if node.id == "sequence":
            return [self._build(item, path) for item in node.value]
        if node.id == "scalar":
            return self._scalar(node)
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key in values:
                raise FrontMatterError(self._line(key_node), f'the key "{key[:60]}" occurs twice')
            self._lines.setdefault((*path, key), self._line(key_node))
            values[key] = self._build(value_node, (*path, key))
        return values

    def _key(self, node: Any) -> str:
        if node.id != "scalar" or not node.tag.endswith(":str"):
            shown = f"{node.value[:60]} " if node.id == "scalar" else ""
            raise FrontMatterError(self._line(node), f"the key {shown}is not text: put it in quotes")
        return str(node.value)

    def _scalar(self, node: Any) -> Any:
        if node.tag.endswith((":timestamp", ":value", ":merge")):
            return node.value  # a date stays a text: plain data has no type for it
        try:
            return self._loader.construct_object(node)
        except (ValueError, OverflowError):
            raise FrontMatterError(self._line(node), f"{node.value[:60]} is not a number: put it in quotes") from None

    def _line(self, node: Any) -> int:
        return _line(self._header, node.start_mark.index)
