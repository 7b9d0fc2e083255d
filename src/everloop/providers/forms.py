"""Forms with files for HTTP APIs (multipart/form-data)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import NamedTuple


class FormFile(NamedTuple):
    """A file of a form."""

    name: str
    type: str  # such as image/png
    data: bytes


def new_boundary() -> str:
    """Return a random boundary, which no file contains by chance."""
    return secrets.token_hex(16)


def form_type(boundary: str) -> str:
    return f"multipart/form-data; boundary={boundary}"


def form_body(fields: Mapping[str, str], files: Mapping[str, FormFile], boundary: str) -> bytes:
    """Encode a form."""
    parts: list[bytes] = []
    for name, value in fields.items():
        parts += [_head(boundary, name), value.encode("utf-8", "replace")]
    for name, file in files.items():
        parts += [_head(boundary, name, file), file.data]
    return b"".join([*parts, f"\r\n--{boundary}--\r\n".encode()])


def _head(boundary: str, name: str, file: FormFile | None = None) -> bytes:
    lines = ["", f"--{boundary}", f'Content-Disposition: form-data; name="{name}"']
    if file is not None:
        quoted = file.name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
        lines[-1] += f'; filename="{quoted}"'
        lines.append(f"Content-Type: {file.type}")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "replace")
