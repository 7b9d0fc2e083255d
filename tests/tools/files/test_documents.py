"""Documents as text, including those crafted to break parsers."""

from __future__ import annotations

import io
import resource
import sys
import time
import zipfile

import docx
import openpyxl  # type: ignore[import-untyped]
import pytest
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from everloop.tools.files import documents


def pdf(*pages: str, password: str = "") -> bytes:
    """A PDF with a line of text on each page."""
    writer = PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for text in pages:
        page = writer.add_blank_page(300, 300)
        page[NameObject("/Resources")] = DictionaryObject(
            {NameObject("/Font"): DictionaryObject({NameObject("/F"): font})}
        )
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F 12 Tf 20 200 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = writer._add_object(stream)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


def word(*paragraphs: str) -> bytes:
    document = docx.Document()
    for text in paragraphs:
        document.add_paragraph(text)
    table = document.add_table(1, 2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "left", "right"
    document.add_paragraph("after")
    buffer = io.BytesIO()
    document.save(buffer)
    return buffer.getvalue()


def sheet(rows: list[list[object]]) -> bytes:
    book = openpyxl.Workbook()
    assert book.active is not None
    book.active.title = "Beds"
    for row in rows:
        book.active.append(row)
    buffer = io.BytesIO()
    book.save(buffer)
    return buffer.getvalue()


# --- documents -----------------------------------------------------------------------------------------------------


async def test_a_pdf_is_read_page_by_page(desk, folder):
    (folder / "a.pdf").write_bytes(pdf("Water the beans", "Then rest"))
    assert await desk("read_file", path="a.pdf") == (
        "     1\t[page 1]\n     2\tWater the beans\n     3\t[page 2]\n     4\tThen rest"
    )
    page = await desk("read_file", path="a.pdf", offset=2, limit=1)
    assert page == "     2\tWater the beans\n[lines 2 to 2 of 4; continue with offset=3]"


async def test_a_document_is_parsed_once_for_all_pages_and_again_after_a_change(desk, folder, monkeypatch):
    (folder / "a.pdf").write_bytes(pdf("first"))
    assert "first" in await desk("read_file", path="a.pdf")
    with monkeypatch.context() as patched:
        patched.setattr(documents, "PYTHON", ("/nowhere/python",))
        assert "first" in await desk("read_file", path="a.pdf", offset=2)
    (folder / "a.pdf").write_bytes(pdf("second"))
    assert "second" in await desk("read_file", path="a.pdf")


async def test_a_word_document_is_read_in_order(desk, folder):
    (folder / "a.docx").write_bytes(word("Beans é", "Peas"))
    assert await desk("read_file", path="a.docx") == (
        "     1\tBeans é\n     2\tPeas\n     3\tleft\tright\n     4\tafter"
    )


async def test_a_workbook_is_read_sheet_by_sheet(desk, folder):
    (folder / "a.xlsx").write_bytes(sheet([["bed", "litres"], ["north", 7], [None, None], [None, 2.5]]))
    assert await desk("read_file", path="a.xlsx") == (
        "     1\t[sheet Beds]\n     2\t1\tbed\tlitres\n     3\t2\tnorth\t7\n     4\t4\t\t2.5"
    )


@pytest.mark.parametrize("name", ["a.pdf", "a.docx", "a.xlsx"])
async def test_a_broken_document_is_explained(desk, folder, name):
    start = b"%PDF-1.7\n" if name == "a.pdf" else b"PK\x03\x04"
    (folder / name).write_bytes(start + b"nonsense" * 50)
    message = await desk.fails("read_file", path=name)
    assert message.startswith(f"{name} cannot be read as")
    assert "Traceback" not in message


async def test_the_reason_why_a_document_cannot_be_read_holds_none_of_its_text_before(desk, folder):
    with (
        zipfile.ZipFile(io.BytesIO(sheet([["beans"], ["peas"]]))) as source,
        zipfile.ZipFile(folder / "a.xlsx", "w") as copy,
    ):
        for name in source.namelist():
            copy.writestr(name, source.read(name).replace(b'<row r="2"', b'<row r="second"'))
    message = await desk.fails("read_file", path="a.xlsx")
    assert message.startswith("a.xlsx cannot be read as XLSX: ValueError: ")
    assert "beans" not in message


async def test_a_locked_pdf_is_explained(desk, folder):
    (folder / "a.pdf").write_bytes(pdf("secret", password="x"))
    assert "a.pdf cannot be read as PDF" in await desk.fails("read_file", path="a.pdf")


async def test_a_missing_package_is_named_with_what_to_do(desk, folder, monkeypatch):
    monkeypatch.setattr(documents, "PYTHON", (sys.executable, "-I", "-S"))  # without any installed package
    for name, data in {"a.pdf": pdf("x"), "a.docx": word("x"), "a.xlsx": sheet([[1]])}.items():
        (folder / name).write_bytes(data)
        assert 'pip install "everloop[documents]"' in await desk.fails("read_file", path=name)


async def test_other_archives_are_binary_files(desk, folder):
    (folder / "a.zip").write_bytes(sheet([[1]]))
    assert "binary" in await desk.fails("read_file", path="a.zip")


async def test_a_module_in_the_workspace_is_not_imported(desk, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in ("pypdf", "sitecustomize", "usercustomize", "io", "logging"):
        (folder / f"{name}.py").write_text(f"open({str(folder.parent / 'escaped')!r}, 'w')\n")
    (folder / "a.pdf").write_bytes(pdf("fine"))
    assert "fine" in await desk("read_file", path="a.pdf")
    assert not (folder.parent / "escaped").exists()


# --- documents crafted to break parsers ----------------------------------------------------------------------------


def bombed(data: bytes, part: str, start: bytes, unit: bytes, megabytes: int, end: bytes) -> bytes:
    """A document with one part that decompresses to a huge size."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            if item.filename != part:
                new.writestr(item, old.read(item))
        with new.open(part, "w", force_zip64=True) as file:
            file.write(start)
            block = unit * ((1 << 20) // len(unit))
            for _ in range(megabytes):
                file.write(block)
            file.write(end)
    return buffer.getvalue()


WORD = b'<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>'
CELLS = b'<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>'


async def test_a_decompression_bomb_costs_neither_memory_nor_time(desk, folder, monkeypatch):
    monkeypatch.setattr(documents, "SECONDS", 10.0)
    monkeypatch.setattr(documents, "MEGABYTES", 300)
    unit, end = b"<w:p><w:r><w:t>boom</w:t></w:r></w:p>", b"</w:body></w:document>"
    (folder / "a.docx").write_bytes(bombed(word("x"), "word/document.xml", WORD, unit, 100, end))
    unit, end = b"<row><c><v>1</v></c></row>", b"</sheetData></worksheet>"
    (folder / "a.xlsx").write_bytes(bombed(sheet([[1]]), "xl/worksheets/sheet1.xml", CELLS, unit, 60, end))
    assert (folder / "a.docx").stat().st_size < 2_000_000
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    others = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # the largest child of this process so far
    result = await desk.run("read_file", path="a.docx")
    assert result.status == "error"
    monkeypatch.setattr(documents, "SECONDS", 2.0)
    result = await desk.run("read_file", path="a.xlsx")  # rows are read one by one: what fits is shown
    assert result.status == "error" or "[lines 1 to" in result.content
    assert time.monotonic() - start < 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000
    most = max(350_000, others)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= most, "the parser used more memory than its limit"


async def test_parsing_a_document_times_out(desk, folder, monkeypatch):
    monkeypatch.setattr(documents, "SECONDS", 1.0)
    (folder / "a.pdf").write_bytes(pdf("x) Tj (" * 500_000))
    start = time.monotonic()
    await desk.fails("read_file", path="a.pdf")
    assert time.monotonic() - start < 20


async def test_a_long_text_is_truncated_with_a_note(desk, folder, monkeypatch):
    monkeypatch.setattr(documents, "MAX_TEXT_BYTES", 100)
    (folder / "a.docx").write_bytes(word(*[f"line {number}" for number in range(100)]))
    assert "the rest of the document is omitted" in await desk("read_file", path="a.docx")
