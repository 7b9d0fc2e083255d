"""Files in encrypted rooms of Matrix: AES-256 in counter mode, with the key in the encrypted message."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from typing import Any

import msgspec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from .base import Never


class FileKey(msgspec.Struct):
    k: str


class EncryptedFile(msgspec.Struct):
    """What a message says of its file."""

    url: str
    key: FileKey
    iv: str
    hashes: dict[str, str]


def encrypted(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """A file under a key of its own, and what a message says of it besides its address."""
    key, iv = secrets.token_bytes(32), secrets.token_bytes(8) + bytes(8)  # the counter begins at 0
    encryptor = Cipher(algorithms.AES(key), modes.CTR(iv)).encryptor()
    made = encryptor.update(data) + encryptor.finalize()
    web_key = {"kty": "oct", "alg": "A256CTR", "ext": True, "key_ops": ["encrypt", "decrypt"]}
    k = base64.urlsafe_b64encode(key).decode().rstrip("=")
    hashes = {"sha256": _to_base64(hashlib.sha256(made).digest())}
    return made, {"v": "v2", "key": {**web_key, "k": k}, "iv": _to_base64(iv), "hashes": hashes}


def decrypted(data: bytes, file: EncryptedFile) -> bytes:
    """The content of a file; a file that the server has changed is refused."""
    try:
        key, iv = _from_base64(file.key.k), _from_base64(file.iv)
        wanted = _from_base64(file.hashes["sha256"])
        if len(key) != 32 or not hmac.compare_digest(wanted, hashlib.sha256(data).digest()):
            raise ValueError("the file is another one")
        decryptor = Cipher(algorithms.AES(key), modes.CTR(iv)).decryptor()
        return decryptor.update(data) + decryptor.finalize()
    except (KeyError, ValueError):
        raise Never("the file cannot be decrypted") from None


def _from_base64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text.replace("+", "-").replace("/", "_") + "=" * (-len(text) % 4))


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode().rstrip("=")
