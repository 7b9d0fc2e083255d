"""What is asked for after untrusted text: exits, by which data leaves, and plants, which steer later sessions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ...messages import Message
from ..base import Plan
from ..context import CallContext
from ..web.urls import BadURL, parse_url
from .mentions import mentioned, on_a_page, same_site

READ_BEFORE = "untrusted content was read before, and"
PAGE_READ_BEFORE = "untrusted content was read before, such as a web page or a command's output, and"
FILE_READ_BEFORE = "a file that the agent did not write was read before, and"


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a call is asked for, and what a person's answer grants the session."""

    why: str
    always: tuple[str, ...] = ()  # granted by "always"
    once: tuple[str, ...] = ()  # granted by a plain yes


def objection(
    plan: Plan,
    context: CallContext,
    conversation: Sequence[Message],
    settings: Collection[str],
    steers: Callable[[Plan, CallContext], str],
) -> Objection | None:
    """What there is against a call after untrusted text; None where it may run.

    `settings` are the addresses that stand in the settings; `steers` says why a file that a plan writes must not
    be planted, or "".
    """
    if plan.url is not None and plan.sends:
        return _against_address(plan.url, context, conversation, settings)
    if plan.sends:
        return Objection(f"{READ_BEFORE} this call could send data out")
    # Outside of a sandbox every command has the network. The person's own files do not make each of them a question.
    if plan.unconfined and getattr(conversation, "outside", True):
        return Objection(f"{READ_BEFORE} a command outside of any sandbox could send data out")
    if plan.steers:
        read = FILE_READ_BEFORE if context.own_files else PAGE_READ_BEFORE
        return Objection(
            f"{read} this changes {plan.steers}, which steers later sessions",
            (f"steers:{plan.steers}",),
        )
    if plan.writes and (why := steers(plan, context)):
        return Objection(f"{READ_BEFORE} of this file: {why}", tuple(f"steers:{path}" for path in plan.paths))
    if plan.command is not None and (why := steers(plan, context)):
        # No "always": a command that is approved may write anything in the workspace.
        return Objection(f"{READ_BEFORE} this command writes {why}")
    return None


def is_free(url: str, conversation: Sequence[Message], settings: Collection[str]) -> bool:
    """Whether an address carries nothing that untrusted text could have put there: it stands in the person's own words,
    in the settings or in the results of a search."""
    return mentioned(url, conversation) or not {url, *same_site(url)}.isdisjoint(settings)


def _against_address(
    url: str, context: CallContext, conversation: Sequence[Message], settings: Collection[str]
) -> Objection | None:
    if is_free(url, conversation, settings):
        return None
    why = f"{READ_BEFORE} this address could carry data away"
    try:
        host = parse_url(url).authority
    except BadURL:
        return Objection(why)
    fetch, link = f"fetch:{host}", f"link:{host}"
    found = on_a_page(url, conversation)
    if fetch in context.granted or (found and link in context.granted):
        return None
    if found:
        why = f"{READ_BEFORE} this link was found on a page: a yes also allows other links to {host} found on pages"
    return Objection(why, (fetch,), (link,) if found else ())
