"""A small PDF, written by hand."""

from __future__ import annotations

_TEXT = b"BT /F1 12 Tf 20 50 Td (Beans want water) Tj ET"
_OBJECTS = (
    b"<< /Type /Catalog /Pages 2 0 R >>",
    b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
    b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 100] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
    b"<< /Length %d >>\nstream\n%b\nendstream" % (len(_TEXT), _TEXT),
    b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
)


def _pdf() -> bytes:
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, text in enumerate(_OBJECTS, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, text)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(_OBJECTS) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    return bytes(out) + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(_OBJECTS) + 1, start)


PDF = _pdf()
