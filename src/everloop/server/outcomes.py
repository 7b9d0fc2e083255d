"""How a turn's end is told to an API client."""

from __future__ import annotations

from ..context.window import is_overflow
from ..log import TurnEnded
from ..runtime.api_requests import Outcome
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


def failure_of(outcome: Outcome, own: bool) -> ApiError | None:
    """The error that a client is told, where the turn has no answer. Only the person of the machine (`own`) reads
    where the model behind is and what it says of our key."""
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
            return conflict("another message took the place of this one in its session", code="replaced")
        case "abandoned":
            return unavailable(last.text, code="abandoned")
        case _:
            return None


def _model_error(ended: TurnEnded, own: bool) -> ApiError:
    """A failure of the model behind. Its own refusals of our key or address are no fault of the client."""
    if is_overflow(ended.text):
        what = ended.text if own else "the conversation is longer than the model's window"
        return bad_request(what, "messages", "context_length_exceeded")
    why = f" (it answered {ended.status})" if ended.status else ""
    text = ended.text if own else f"the model behind the server failed{why}; the server's log has more"
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
