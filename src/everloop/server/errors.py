"""Errors in OpenAI's format: a status, and a body that every client of that API can read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ..context.window import is_overflow
from ..log import TurnEnded
from ..runtime.api_requests import Outcome


class ApiError(Exception):
    """An error for the client; may be raised anywhere behind the guard."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers: Mapping[str, str] = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response, or of the event that ends a broken stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


# Ollama's API shares its prefix with the web page's API.
_OLLAMA = re.compile(
    r"/api/(?:chat|generate|tags|show|version|ps|embed|embeddings|pull|push|create|copy|delete|blobs)(?:/|$)"
)


def body_for(path: str, error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the format of the API that the path belongs to."""
    if path.startswith("/v1/messages"):
        return anthropic_body(error)
    return {"error": error.message} if _OLLAMA.match(path) else error.body()


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON object of an error in Anthropic's API."""
    return {"type": "error", "error": {"type": _anthropic_type(error.status), "message": error.message}}


def _anthropic_type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 404:
            return "not_found_error"
        case 413:
            return "request_too_large"
        case 429:
            return "rate_limit_error"
        case 503:
            return "overloaded_error"
        case 504:
            return "timeout_error"
    return "invalid_request_error" if status < 500 else "api_error"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unauthorized(message: str, code: str = "invalid_api_key") -> ApiError:
    # Some clients recognise an invalid key by the type alone.
    return ApiError(
        401, message, "authentication_error", code=code, headers={"WWW-Authenticate": 'Bearer realm="everloop"'}
    )


def forbidden(message: str, code: str = "forbidden") -> ApiError:
    return ApiError(403, message, "permission_error", code=code)


def not_found(message: str, param: str | None = None, code: str = "not_found") -> ApiError:
    return ApiError(404, message, param=param, code=code)


def method_not_allowed(method: str, allowed: str) -> ApiError:
    message = f"{method} is not allowed here; allowed: {allowed}"
    return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})


def too_slow(message: str) -> ApiError:
    return ApiError(408, message, code="request_timeout")


def conflict(message: str, param: str | None = None, code: str = "conflict") -> ApiError:
    return ApiError(409, message, param=param, code=code)


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {limit} bytes", code="request_too_large")


def unsupported_media_type(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")


def too_many_requests(message: str, retry_after: float = 1.0, code: str = "rate_limit_exceeded") -> ApiError:
    seconds = str(max(1, math.ceil(retry_after)))
    return ApiError(429, message, "rate_limit_error", code=code, headers={"Retry-After": seconds})


def internal_error(request_id: str | None = None) -> ApiError:
    """Return an error without details: they could contain paths, keys or another owner's text. The log has them."""
    where = f" under the id {request_id}" if request_id else ""
    return ApiError(500, f"internal error; the server's log has it{where}", "server_error", code="internal_error")


def bad_gateway(message: str, code: str = "model_error") -> ApiError:
    return ApiError(502, message, "server_error", code=code)


def unavailable(message: str, retry_after: float = 5.0, code: str = "unavailable") -> ApiError:
    seconds = str(max(1, math.ceil(retry_after)))
    return ApiError(503, message, "server_error", code=code, headers={"Retry-After": seconds})


def gateway_timeout(message: str, code: str = "model_timeout") -> ApiError:
    return ApiError(504, message, "server_error", code=code)


def failure_of(outcome: Outcome, own: bool) -> ApiError | None:
    """Return the error for a turn that has no answer.

    Only the person of the machine (`own`) may see the model's address and what it says about the key.
    """
    last = outcome.entries[-1] if outcome.entries else None
    if not isinstance(last, TurnEnded):
        return None
    match last.reason:
        case "error":
            return _model_error(last, own)
        case "budget":
            return ApiError(429, last.text, "insufficient_quota", code="insufficient_quota")
        case "timeout":
            return gateway_timeout(last.text)
        case "cancelled" | "aborted":
            return conflict(last.text, code="cancelled")
        case "replaced":
            return conflict("a newer message replaced this one in its session", code="replaced")
        case "abandoned":
            return unavailable(last.text, code="abandoned")
        case _:
            return None


def model_failure(text: str, status: int, own: bool) -> ApiError:
    """Return the error for a request that the model's server refused or failed."""
    return _model_error(TurnEnded("error", text, status), own)


def _model_error(ended: TurnEnded, own: bool) -> ApiError:
    """Return the error for a failed model call.

    If the model's server refuses our key or address, that is not the client's fault.
    """
    if is_overflow(ended.text):
        what = ended.text if own else "the conversation is longer than the model's context window"
        return bad_request(what, "messages", "context_length_exceeded")
    why = f" (status {ended.status})" if ended.status else ""
    text = ended.text if own else f"the server's model call failed{why}; the server's log has more"
    match ended.status:
        case 400 | 413 | 422:
            return bad_request(text, code="model_refused")
        case 429:
            return too_many_requests(text)
        case 408 | 504:
            return gateway_timeout(text)
        case 503 | 529:
            return unavailable(text, code="model_unavailable")
        case _:
            return bad_gateway(text)
