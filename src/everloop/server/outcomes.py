"""How a turn's end is told to an API client."""

from __future__ import annotations

from ..agents.requests import Outcome
from ..context.models import is_overflow
from ..log import TurnEnded
from .errors import (
    ApiError,
    bad_gateway,
    bad_request,
    conflict,
    gateway_timeout,
    too_many_requests,
    unavailable,
)

KEPT = frozenset({"length", "content_filter"})  # what a model's API says of its answer that a client must hear


def finish_of(outcome: Outcome) -> str:
    """Why the answer ends, in the API's words. A turn that a limit ended has said so in words: for clients it stops."""
    if outcome.reason == "handed":
        return "tool_calls"
    return outcome.finish_reason if outcome.reason == "answer" and outcome.finish_reason in KEPT else "stop"


def failure_of(outcome: Outcome) -> ApiError | None:
    """The error that a client is told, where the turn has no answer."""
    last = outcome.entries[-1] if outcome.entries else None
    if not isinstance(last, TurnEnded):
        return None
    match last.reason:
        case "error":
            return _model_error(last)
        case "budget":
            return ApiError(429, last.text, "insufficient_quota", code="insufficient_quota")
        case "timeout":
            return gateway_timeout(last.text)
        case "cancelled" | "aborted":
            return conflict(last.text, code="cancelled")
        case "replaced":
            return conflict("another message took the place of this one in its session", code="replaced")
        case "abandoned":
            return unavailable(last.text, code="abandoned")
        case _:
            return None


def _model_error(ended: TurnEnded) -> ApiError:
    """A failure of the model behind. Its own refusals of our key or address are no fault of the client."""
    text = ended.text
    if is_overflow(text):
        return bad_request(text, "messages", "context_length_exceeded")
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
