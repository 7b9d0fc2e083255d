"""Speech to text through any endpoint with OpenAI's `/v1/audio/transcriptions`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from ..errors import ConfigError
from ..text import clean
from .base import ProviderError
from .endpoints import ENDPOINTS, key_for
from .forms import FormFile, form_body, form_type, new_boundary
from .http import Endpoint, Timeouts, endpoint_of

if TYPE_CHECKING:
    from ..config import Config

PATH = "/audio/transcriptions"
MAX_RECORDING = 25_000_000  # bytes of a recording, the limit of most endpoints
MAX_ANSWER = 4_000_000
SECONDS = 60.0
TRIES = 3
MAX_WAIT = 10.0
TYPES = {
    ".aac": "audio/aac",
    ".amr": "audio/amr",
    ".flac": "audio/flac",
    ".m4a": "audio/mp4",
    ".mp3": "audio/mpeg",
    ".mpga": "audio/mpeg",
    ".oga": "audio/ogg",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
    ".wav": "audio/wav",
    ".webm": "audio/webm",
}


class Transcript(msgspec.Struct):
    text: str


def is_recording(name: str) -> bool:
    """Return whether a file is a recording, by its name. WebM usually contains video unless the name says otherwise."""
    base = os.path.basename(name).lower()
    ending = os.path.splitext(base)[1]
    return ending in TYPES and (ending != ".webm" or "audio" in base or "voice" in base)


class Transcriber:
    """Transcribes recordings with one model."""

    def __init__(self, base_url: str, api_key: str, model: str, seconds: float = SECONDS) -> None:
        self._model = model
        self._boundary = new_boundary()
        headers = {"Content-Type": form_type(self._boundary)}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._endpoint = Endpoint(endpoint_of(base_url, PATH), headers, Timeouts(total=seconds), api_key or None)

    async def transcribe(self, name: str, data: bytes) -> str:
        """Return the words of a recording; "" if there are none. Raises ProviderError."""
        if len(data) > MAX_RECORDING:
            raise ProviderError(f"it is larger than {MAX_RECORDING // 1_000_000} MB")
        file = FormFile(name, TYPES.get(os.path.splitext(name)[1].lower(), "application/octet-stream"), data)
        fields = {"model": self._model, "response_format": "json"}
        answer = await self._ask(form_body(fields, {"file": file}, self._boundary))
        try:
            return clean(msgspec.json.decode(answer, type=Transcript).text).strip()
        except msgspec.MsgspecError:
            raise ProviderError(f"{self._endpoint.where} sent no transcript") from None

    async def _ask(self, body: bytes) -> bytes:
        tries = 1
        while True:
            try:
                return await self._endpoint.fetch((body,), MAX_ANSWER)
            except ProviderError as error:
                if not error.retryable or tries == TRIES:
                    raise
                await asyncio.sleep(min(error.retry_after or 0.5 * tries, MAX_WAIT))
                tries += 1

    async def close(self) -> None:
        await self._endpoint.close()


def make_transcriber(config: Config, environment: Mapping[str, str] = os.environ) -> Transcriber | None:
    """Return the transcriber that the settings describe; None if they name no model for it.

    The key of the model's provider is sent only to that provider's own address.
    """
    if not config.transcription_model:
        return None
    base_url, api_key = config.transcription_url, config.transcription_key
    if not base_url:
        known = ENDPOINTS.get(config.provider or "openai")
        base_url = config.base_url or (known.base_url if known is not None and known.api == "openai" else "")
        api_key = api_key or config.api_key
    if not base_url:
        raise ConfigError(
            f"[transcription] provider {config.provider} has no transcriptions: set base_url to an endpoint that does"
        )
    return Transcriber(base_url, api_key or key_for(base_url, environment), config.transcription_model)
