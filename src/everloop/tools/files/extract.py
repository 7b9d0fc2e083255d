"""Extract the text of a document, or convert a picture for a model. Runs as a separate program that reads the file
from standard input.

    python -I extract.py KIND SECONDS BYTES-OF-MEMORY BYTES-OF-OUTPUT [EDGE]

Exit status: 0, 3 for a missing package, 4 for an unreadable file (the reason is the output); anything else, or a
signal, means that it exceeded a limit. It imports nothing from the package, so that it starts fast.
"""

from __future__ import annotations

import io
import logging
import resource
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from PIL.Image import Image

MISSING, UNREADABLE, TOO_MUCH = 3, 4, 5


def main(kind: str, seconds: int, memory: int, most: int, edge: int = 0) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable()  # the readers log verbosely about broken documents
    warnings.simplefilter("ignore")
    try:
        file = io.BytesIO(sys.stdin.buffer.read())
        return _say(READERS[kind](file), most) if kind in READERS else _show(file, kind, edge, most)
    except ImportError:
        return MISSING
    except (MemoryError, RecursionError):
        return TOO_MUCH
    except Exception as error:  # a crafted document can trigger any exception
        sys.stdout.buffer.write(f"{type(error).__name__}: {error}"[:300].replace("\n", " ").encode("utf-8", "replace"))
        return UNREADABLE


def _say(lines: Iterator[str], most: int) -> int:
    """Write the whole text, or nothing if it cannot be read to its end: the output is then the reason."""
    room, text = most, bytearray()
    for line in lines:
        data = line.encode("utf-8", "replace")
        room -= len(data) + 1
        if room < 0:
            text += b"[the rest of the document is omitted: it is too long]\n"
            break
        text += data + b"\n"
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
    return 0


def pdf(file: BinaryIO) -> Iterator[str]:
    """Yield the text page by page."""
    from pypdf import PdfReader

    for number, page in enumerate(PdfReader(file).pages, 1):
        yield f"[page {number}]"
        yield from page.extract_text().splitlines()


def docx(file: BinaryIO) -> Iterator[str]:
    """Yield paragraphs and tables in order; cells are separated by tabs."""
    from docx import Document
    from docx.table import Table

    for block in Document(file).iter_inner_content():
        if isinstance(block, Table):
            for row in block.rows:
                yield "\t".join(cell.text.replace("\n", " ") for cell in row.cells)
        else:
            yield from block.text.splitlines() or [""]


def xlsx(file: BinaryIO) -> Iterator[str]:
    """Yield rows sheet by sheet; values are separated by tabs, and empty rows are omitted."""
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


def _show(file: BinaryIO, kind: str, edge: int, most: int) -> int:
    """Write the media type and a newline, then a picture of at most `edge` pixels per side and `most` bytes."""
    picture = _plain(file, kind, edge)
    transparent = "A" in picture.getbands()
    drawn = transparent or kind in ("PNG", "GIF", "BMP")  # probably not a photo
    forms = [("PNG", 0)] * drawn + [("JPEG", 85), ("JPEG", 65)]
    for share in (1, 0.7, 0.5, 0.35, 0.25):
        smaller = (
            picture
            if share == 1
            else picture.resize((max(1, int(picture.width * share)), max(1, int(picture.height * share))))
        )
        for form, quality in forms:
            buffer = io.BytesIO()
            _opaque(smaller, form).save(buffer, form, quality=quality)
            if buffer.tell() <= most:
                sys.stdout.buffer.write(f"image/{form.lower()}\n".encode() + buffer.getvalue())
                sys.stdout.buffer.flush()
                return 0
    return TOO_MUCH


def _plain(file: BinaryIO, kind: str, edge: int) -> Image:
    """Return the first frame upright, scaled down, in 8 bits per channel and without any metadata."""
    from PIL import Image, ImageOps

    if kind == "HEIF":
        from pillow_heif import register_heif_opener  # type: ignore[import-not-found]

        register_heif_opener()
    Image.MAX_IMAGE_PIXELS = None  # the memory limit applies
    # Only the decoder of the detected kind: some of the others start programs.
    with Image.open(file, formats=[kind]) as opened:
        opened.draft("RGB", (edge, edge))  # scales a JPEG down while decoding
        picture = ImageOps.exif_transpose(opened)
        if picture.mode.startswith("I;16"):  # Pillow would clip all but the darkest tones
            picture = picture.convert("I").point(lambda value: value / 256).convert("L")
        transparent = picture.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in picture.info
        picture = picture.convert("RGBA" if transparent else "RGB")
        picture.thumbnail((edge, edge))
        clean = Image.new(picture.mode, picture.size)
        clean.paste(picture)
        return clean


def _opaque(picture: Image, form: str) -> Image:
    """Return the picture on a white background, for formats without transparency."""
    if form != "JPEG" or picture.mode == "RGB":
        return picture
    from PIL import Image

    white = Image.new("RGB", picture.size, "white")
    white.paste(picture, mask=picture.getchannel("A"))
    return white


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
