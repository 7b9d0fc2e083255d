"""Files of messages: attachments are saved to the workspace, and files to send are read from their copies."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import os
import re
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..text import clean, one_line
from ..threads import in_thread
from ..tools.files.images import image_kind
from ..tools.message import OutgoingFiles
from .base import Attachment, Later, Never, OutgoingFile

if TYPE_CHECKING:
    from ..runtime.owners import Owners

UPLOADS = "uploads"
MAX_FILES = 10  # per message
TRIES = 3
MEGABYTE = 1_000_000
PICTURES = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
Save = Callable[[str, str, bytes], Awaitable[str]]  # owner, name and content → the path


def saver(owners: Owners) -> Save:
    """Save files in the `uploads` folder of an owner's workspace."""

    async def save(owner: str, name: str, data: bytes) -> str:
        workspace = (await owners.agent(owner)).workspace
        return await in_thread(_write, workspace, name, data)

    return save


def _write(workspace: Path, name: str, data: bytes) -> str:
    """Write a file, replacing one of the same name. Links are not followed: the agent may have created one."""
    (workspace / UPLOADS).mkdir(parents=True, exist_ok=True)
    folder = os.open(workspace / UPLOADS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        draft = f".{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o644, dir_fd=folder), "wb") as file:
            file.write(data)
        os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)
    return os.path.abspath(workspace / UPLOADS / name)


def name_of(channel: str, message: str, number: int, given: str) -> str:
    """Return a file name that is the same for every delivery of a message, so that a repeat creates no second file."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(clean(given))).strip("-.")[-60:] or "file"
    return f"{channel}-{hashlib.sha256(f'{message} {number}'.encode()).hexdigest()[:12]}-{base}"


async def fetched(file: Attachment, limit: int) -> bytes | str:
    """Return the content of a file, or a note for the model about why it is missing."""
    shown = one_line(clean(file.name), 80)
    too_large = f"[{shown} is larger than {limit // MEGABYTE} MB, and was not taken.]"
    if file.size is not None and file.size > limit:
        return too_large
    for tries in range(1, TRIES + 1):
        try:
            data = await file.read(limit)
            return data if len(data) <= limit else too_large
        except Never:
            break
        except (Later, OSError, TimeoutError) as error:
            if tries < TRIES:
                await asyncio.sleep(min(error.seconds, 10.0) if isinstance(error, Later) else 0.5 * tries)
    return f"[{shown} could not be fetched.]"


async def opened(outgoing: OutgoingFiles, path: str, limit: int) -> OutgoingFile | str:
    """Return a file to send, or a note for the people in the chat about why it is not sent."""
    name = os.path.basename(path)
    shown = one_line(clean(name), 80)
    try:
        data = await in_thread(outgoing.read, path, limit)
    except OSError:
        return f"[{shown} is no longer there, and was not sent.]"
    if len(data) > limit:
        much = f"larger than {limit // MEGABYTE} MB" if limit >= MEGABYTE else "too large"
        return f"[{shown} is {much}, and was not sent.]"
    kind = image_kind(data[:64]) or ""
    guessed = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return OutgoingFile(name, PICTURES.get(kind, guessed), data, kind in PICTURES)


def refusal(name: str, reason: str = "") -> str:
    """Return the note for the people in a chat about a file that their network does not accept."""
    why = f" ({one_line(reason, 100)})" if reason else ""
    return f"[{one_line(clean(name), 80)} cannot be sent here{why}.]"
