"""The text of one document, or one picture made fit to be shown: run as a program of its own, with the file as its
standard input.

    python -I extract.py KIND SECONDS BYTES-OF-MEMORY BYTES-OF-OUTPUT [EDGE]

Exit status: 0, 3 for a missing package, 4 for a file that cannot be read (the reason is the output), and anything
else, or a signal, where it wanted too much. It imports nothing of the package, so that it starts fast.
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
    logging.disable()  # the readers complain at length about broken documents
    warnings.simplefilter("ignore")
    try:
        file = io.BytesIO(sys.stdin.buffer.read())
        return _say(READERS[kind](file), most) if kind in READERS else _show(file, kind, edge, most)
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


def _show(file: BinaryIO, kind: str, edge: int, most: int) -> int:
    """Write the media type in a line, then a picture with no side longer than `edge` in at most so many bytes."""
    picture = _plain(file, kind, edge)
    transparent = "A" in picture.getbands()
    drawn = transparent or kind in ("PNG", "GIF", "BMP")  # not a photo, as far as one can tell
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
    """The first frame, upright, small enough, in 8 bits a channel, and with nothing but its pixels: no place, no name
    of a camera, no comment."""
    from PIL import Image, ImageOps

    if kind == "HEIF":
        from pillow_heif import register_heif_opener  # type: ignore[import-not-found]

        register_heif_opener()
    Image.MAX_IMAGE_PIXELS = None  # the limit of memory holds
    # Only the decoder of what the file begins like: of the others, some start programs.
    with Image.open(file, formats=[kind]) as opened:
        opened.draft("RGB", (edge, edge))  # a JPEG is made smaller while it is decoded
        picture = ImageOps.exif_transpose(opened)
        if picture.mode.startswith("I;16"):  # Pillow would cut off all but the darkest tones
            picture = picture.convert("I").point(lambda value: value / 256).convert("L")
        transparent = picture.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in picture.info
        picture = picture.convert("RGBA" if transparent else "RGB")
        picture.thumbnail((edge, edge))
        clean = Image.new(picture.mode, picture.size)
        clean.paste(picture)
        return clean


def _opaque(picture: Image, form: str) -> Image:
    """For a form without transparency, the picture on white."""
    if form != "JPEG" or picture.mode == "RGB":
        return picture
    from PIL import Image

    white = Image.new("RGB", picture.size, "white")
    white.paste(picture, mask=picture.getchannel("A"))
    return white


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
