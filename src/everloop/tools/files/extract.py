"""The text of one document: run as a program of its own, with the document as its standard input.

    python -I extract.py KIND SECONDS BYTES-OF-MEMORY BYTES-OF-TEXT

Exit status: 0, 3 for a missing package, 4 for a document that cannot be read (the reason is the output), and anything
else, or a signal, where it wanted too much. It imports nothing of the package, so that it starts fast.
"""

from __future__ import annotations

import io
import logging
import resource
import sys
from collections.abc import Iterator
from typing import BinaryIO

MISSING, UNREADABLE, TOO_MUCH = 3, 4, 5


def main(kind: str, seconds: int, memory: int, most: int) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable()  # the readers complain at length about broken documents
    try:
        return _say(READERS[kind](io.BytesIO(sys.stdin.buffer.read())), most)
    except ImportError:
        return MISSING
    except (MemoryError, RecursionError):
        return TOO_MUCH
    except Exception as error:  # whatever a reader trips over in a document that somebody made up
        sys.stdout.buffer.write(f"{type(error).__name__}: {error}"[:300].replace("\n", " ").encode("utf-8", "replace"))
        return UNREADABLE


def _say(lines: Iterator[str], most: int) -> int:
    room = most
    for line in lines:
        data = line.encode("utf-8", "replace")
        room -= len(data) + 1
        if room < 0:
            sys.stdout.buffer.write(b"[the rest of the document is left out: it is too long]\n")
            break
        sys.stdout.buffer.write(data + b"\n")
    sys.stdout.buffer.flush()
    return 0


def pdf(file: BinaryIO) -> Iterator[str]:
    """Page by page."""
    from pypdf import PdfReader

    for number, page in enumerate(PdfReader(file).pages, 1):
        yield f"[page {number}]"
        yield from page.extract_text().splitlines()


def docx(file: BinaryIO) -> Iterator[str]:
    """Paragraphs and tables in their order; the cells of a row are parted by tabs."""
    from docx import Document
    from docx.table import Table

    for block in Document(file).iter_inner_content():
        if isinstance(block, Table):
            for row in block.rows:
                yield "\t".join(cell.text.replace("\n", " ") for cell in row.cells)
        else:
            yield from block.text.splitlines() or [""]


def xlsx(file: BinaryIO) -> Iterator[str]:
    """Sheet by sheet, the values of a row parted by tabs; rows without any are left out."""
    from openpyxl import load_workbook  # type: ignore[import-untyped]

    for sheet in load_workbook(file, read_only=True, data_only=True).worksheets:
        yield f"[sheet {sheet.title}]"
        for number, row in enumerate(sheet.iter_rows(values_only=True), 1):
            values = ["" if value is None else str(value).replace("\n", " ") for value in row]
            while values and not values[-1]:
                values.pop()
            if values:
                yield f"{number}\t" + "\t".join(values)


READERS = {"pdf": pdf, "docx": docx, "xlsx": xlsx}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
