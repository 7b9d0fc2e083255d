"""Voice messages: transcribes recordings among a message's attachments when its turn starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ..providers.base import ProviderError
from ..providers.transcription import MAX_RECORDING, Transcriber, is_recording
from ..sandbox.reach import OutOfReach, Reach
from ..text import one_line
from ..threads import in_thread


async def with_transcripts(
    transcriber: Transcriber, text: str, media: Sequence[str], reach: Callable[[], Reach]
) -> str:
    """Return the text of a message followed by transcripts of its recordings, marked as such.

    `reach` returns which files may be read; it reads from disk, and is called in a thread.
    """
    words = [await _words(transcriber, path, reach) for path in media if is_recording(path)]
    return "\n\n".join([text, *words] if text else words)


async def _words(transcriber: Transcriber, path: str, reach: Callable[[], Reach]) -> str:
    try:
        data = await in_thread(_read, path, reach)
        words = await transcriber.transcribe(os.path.basename(path), data)
    except (OSError, OutOfReach, ProviderError) as error:
        why = one_line(str(error), 200) if isinstance(error, ProviderError) else "the recording cannot be read"
        return f"[A voice message could not be transcribed ({why}).]"
    if not words:
        return "[A voice message contained no recognisable words.]"
    return f"[transcript of a voice message]\n{words}"


def _read(path: str, reach: Callable[[], Reach]) -> bytes:
    with reach().open(path) as opened, open(opened.descriptor, "rb", closefd=False) as file:
        return file.read(MAX_RECORDING + 1)
