"""Converts an HTML page to Markdown, as a separate program: a malicious page can only harm this process.

It reads a line of JSON with the page's `url`, `charset` and `plain`, followed by the page, from standard input, and
writes JSON with `title`, `text` and `cut`. `web.py` starts it, and kills it if it takes too long. It is self-contained:
it runs as a file, and imports nothing from Everloop.
"""

from __future__ import annotations

import codecs
import html
import json
import re
import sys
from typing import Any
from urllib.parse import urljoin

MISSING = 3  # exit status: the packages for reading HTML are not installed
MAX_ARTICLE, MAX_TAGS = 1_500_000, 60_000  # limits for article extraction, which takes more than linear time
MAX_TEXT = 2_000_000  # characters of output
SHORT_ARTICLE = 300  # characters: a shorter article may be a teaser or a notice, so that the whole page is better
MEMORY = 2_000_000_000
CPU_SECONDS = 60

_CHARSET = re.compile(rb"<meta[^>]{0,300}?charset\s{0,9}=\s{0,9}[\"']?([A-Za-z0-9_:.-]{1,40})", re.I)
_TITLE = re.compile(r"<title[^>]{0,300}>([^<]{0,2000})", re.I)
# Character sets of the web. Python supports codecs that are not character sets, some of which take quadratic time.
_IS_CHARSET = re.compile(
    r"utf-(8|16|32)(-[bl]e)?|ascii|iso8859-\d+|cp\d+|koi8-\w|mac-\w+|tis-620"
    r"|gb\w+|big5\w*|hz|euc_\w+|shift_ji\w+|iso2022_\w+|johab"
)
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_EMPTY_LINK = re.compile(r"\[ ?\](\([^()\s]*\))?")
_SKIPPED = frozenset({"script", "style", "noscript", "template", "svg", "iframe", "object", "head", "select", "button"})
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "br", "dd", "details", "dialog", "div", "dl", "dt",
     "fieldset", "figcaption", "figure", "footer", "form", "header", "hr", "html", "main", "nav", "ol", "p", "pre",
     "section", "summary", "table", "tbody", "thead", "tr", "ul"}
)  # fmt: skip


def decode(data: bytes, charset: str = "") -> str:
    """Decode the bytes according to their byte order mark, the server's or the page's declaration, or else as UTF-8."""
    for mark, name in _BOMS:
        if data.startswith(mark):
            return data[len(mark) :].decode(name, "replace")
    said = _CHARSET.search(data[:4096]) if not charset else None
    for name in (charset, said[1].decode() if said else ""):
        try:
            known = codecs.lookup(name).name if name else ""
        except (LookupError, ValueError):
            continue
        if _IS_CHARSET.fullmatch(known):
            return data.decode(known, "replace")
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data)  # the last character may be truncated
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")


def read_page(source: str, url: str, plain: bool = False) -> tuple[str, str]:
    """Return the title and text of a page: its article if it has one, otherwise the whole page."""
    title = _TITLE.search(source[:200_000])
    huge = len(source) > MAX_ARTICLE or source.count("<") > MAX_TAGS
    tiny = len(source) < SHORT_ARTICLE  # to import what finds articles takes longer than all else
    article = "" if plain or huge or tiny else _article(source, url)
    if len(article) < SHORT_ARTICLE:
        article = _whole(source, url) or article
    return " ".join(html.unescape(title[1]).split()) if title else "", article


def _article(source: str, url: str) -> str:
    import trafilatura

    found = trafilatura.extract(
        source,
        url=url,
        fast=True,
        output_format="markdown",
        include_links=True,
        include_formatting=True,
        include_tables=True,
        include_comments=False,
    )
    return (found or "").strip()


def _whole(source: str, url: str) -> str:
    """Return everything that a page shows, in order: blocks as lines, headings and list items marked, links kept."""
    import lxml.html  # type: ignore[import-untyped]

    parser = lxml.html.HTMLParser(remove_comments=True, remove_pis=True)
    try:
        root = lxml.html.document_fromstring(source, parser=parser)
    except (lxml.etree.ParserError, lxml.etree.XMLSyntaxError, ValueError):
        return ""
    pieces: list[str] = []
    stack: list[tuple[Any, bool]] = [(root, False)]
    room = MAX_TEXT * 2  # many short links on a page with a long address expand to a lot of text
    while stack and room > 0:
        element, left = stack.pop()
        tag = element.tag if isinstance(element.tag, str) else ""
        if left:
            pieces += [_after(element, tag, url), _spaced(element.tail)]
            room -= len(pieces[-2]) + len(pieces[-1])
            continue
        if tag in _SKIPPED or not tag:
            pieces.append(_spaced(element.tail))
            continue
        pieces += [_before(tag), _spaced(element.text)]
        room -= len(pieces[-1])
        stack.append((element, True))
        stack += [(child, False) for child in reversed(element)]
    lines = (" ".join(_EMPTY_LINK.sub("", line).split()) for line in "".join(pieces).split("\n"))
    return "\n".join(line for line in lines if line.strip("-#| "))


def _before(tag: str) -> str:
    if tag in _HEADINGS:
        return f"\n\n{_HEADINGS[tag]}"
    if tag == "a":
        return "["
    if tag == "li":
        return "\n- "
    return "\n" if tag in _BLOCKS else " | " if tag in ("td", "th") else ""


def _after(element: Any, tag: str, url: str) -> str:
    if tag == "a":
        target = (element.get("href") or "").strip()
        if not target or target.startswith(("#", "javascript:")):
            return "]"
        try:
            return f"]({urljoin(url, target)})"
        except ValueError:
            return "]"
    return "\n" if tag in _BLOCKS or tag in _HEADINGS or tag == "li" else ""


def _spaced(text: str | None) -> str:
    return re.sub(r"\s+", " ", text) if text else ""


def _limit_itself() -> None:
    """Limit resources even if no process is left to kill this one."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> int:
    _limit_itself()
    asked = json.loads(sys.stdin.buffer.readline())
    try:
        source = decode(sys.stdin.buffer.read(), asked["charset"])
        title, text = read_page(source, asked["url"], asked["plain"])
    except ImportError:
        return MISSING
    answer = json.dumps({"title": title, "text": text[:MAX_TEXT], "cut": len(text) > MAX_TEXT}, ensure_ascii=False)
    sys.stdout.buffer.write(answer.encode("utf-8", "replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
