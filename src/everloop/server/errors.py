"""Errors as OpenAI's API words them: a status, and a body that every client of that API can read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """A request's end that its client is told of; raised anywhere under the door."""

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
        """The response's JSON object, which is also what an event of a stream says when it breaks off."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unauthorized(message: str, code: str = "invalid_api_key") -> ApiError:
    # Some clients tell a wrong key from a wrong request by the type alone.
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
    return ApiError(413, f"the request's body is larger than {limit} bytes; send less", code="request_too_large")


def unsupported_media_type(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")


def too_many_requests(message: str, retry_after: float = 1.0, code: str = "rate_limit_exceeded") -> ApiError:
    seconds = str(max(1, math.ceil(retry_after)))
    return ApiError(429, message, "rate_limit_error", code=code, headers={"Retry-After": seconds})


def internal_error(request_id: str | None = None) -> ApiError:
    """Says nothing of what went wrong: that may hold paths, keys or another owner's words. The log has it."""
    where = f" under the id {request_id}" if request_id else ""
    return ApiError(500, f"an error inside the server; its log has it{where}", "server_error", code="internal_error")


def bad_gateway(message: str, code: str = "model_error") -> ApiError:
    return ApiError(502, message, "server_error", code=code)


def unavailable(message: str, retry_after: float = 5.0, code: str = "unavailable") -> ApiError:
    seconds = str(max(1, math.ceil(retry_after)))
    return ApiError(503, message, "server_error", code=code, headers={"Retry-After": seconds})


def gateway_timeout(message: str, code: str = "model_timeout") -> ApiError:
    return ApiError(504, message, "server_error", code=code)
