"""Whose agent answers a request without `tools`: the server's own, with its tools, or none, because the client is one.

The server's settings, the token, a header and the model's name decide. A request that a client makes on the side, for a
title say, never gets the agent's tools; recognising one can only take tools away.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..config import Agent
from ..log import text_of
from .errors import bad_request
from .requests import ChatRequest

HEADER = "X-Agent"
# Names under which the server's default model is offered, and whose tools are used with them.
MODELS: Mapping[str, Agent] = {"everloop/agent": "own", "everloop/chat": "client"}
INSTRUCTION = 1500  # characters at the beginning of a message, where a client's own prompt says what it is for
CLOSING = 700  # and at its end, behind the text that it is about

_CHAT = r"(?:chats?|conversations?|threads?|sessions?|discussions?|dialogues?|exchange|messages?|topic|history)"
_MAKE = r"(?:generat\w+|creat\w+|writ\w+|provid\w+|giv\w+|mak\w+|suggest\w*|craft\w*|reply|output|propos\w+|nam\w+)"
_NAME = r"(?:titles?|names?|headings?|headlines?|description|subject)"
# What the prompts of Open WebUI, LibreChat, Continue, Zed, opencode, aider, Claude Code and others have in common.
_SIDE = re.compile(
    rf"""
    \b{_MAKE}\b[^.]{{0,100}}\b{_NAME}\b[^.]{{0,100}}\b{_CHAT}\b       # "Generate a title for this chat"
    |\b{_CHAT}\b[^.]{{0,40}}\ba\ (?:short\ |concise\ |brief\ )?{_NAME}\b  # "give this conversation a name"
    |\b{_CHAT}\ (?:title|naming|summar)                               # "a thread title"
    |\b\w+-?\ ?words?(?:-or-less)?(?:\ or\ less)?,?\ title\b          # "a 3-5 word title"
    |\btitle\ generator\b|\btitles?\b[^.]{{0,30}}\b\w+\ words\b       # "a title of at most 5 words"
    |\bsummar(?:y|ies|i[sz]\w*)\b[^.]{{0,80}}\b{_CHAT}\b              # "summarize this conversation"
    |\b{_CHAT}\b[^.]{{0,40}}\bsummar(?:y|i[sz]\w*)\b
    |\btags?\b[^.]{{0,60}}\b(?:categori[sz]\w+|{_CHAT})\b             # "1-3 broad tags categorizing the themes"
    |\bfollow-?\ ?ups?\ (?:questions?|prompts?)\b
    |\b{_MAKE}\b[^.]{{0,40}}\bsearch\ quer(?:y|ies)\b
    |\bauto-?\ ?complet(?:ion|e)\b|\bcode\ completion\b|\bfill[- ]in[- ]the[- ](?:middle|blank)
    |<\|?(?:fim[_-]?(?:prefix|suffix|middle|begin|hole|end)|cursor)\|?>|<\uff5cfim\u2581
    |</?(?:PRE|SUF|MID|COMPLETION)>|\[(?:SUFFIX|PREFIX)\]|\{{\{{?FILL_HERE\}}?\}}
    """,
    re.I | re.X,
)


def model_of(name: str | None) -> str:
    """The model that a request names; "" for the server's default."""
    return "" if name is None or name in MODELS else name


def agent_of(chat: ChatRequest, headers: Mapping[str, str], token: str, default: Agent) -> Agent:
    """Whose tools a request uses if it brings none.

    The header and the model's name choose, then the token, then the server's settings. A token for clients only is a
    limit that neither of them lifts, and where the two differ, the agent's tools are not used.
    """
    asked = {header_of(headers), MODELS.get(chat.model or "")} - {None}
    if token == "client" or "client" in asked or chat.client_is_agent or is_side_request(chat):
        return "client"
    return "own" if asked or token == "own" else default


def is_side_request(chat: ChatRequest) -> bool:
    """Whether a client asks for a title, a summary, tags or a completion, by the words of its prompt."""
    said = next((text_of(one["content"]) for one in reversed(chat.messages) if one["role"] == "user"), "")
    texts = (chat.system[:INSTRUCTION], said[:INSTRUCTION], said[max(INSTRUCTION, len(said) - CLOSING) :])
    return any(_SIDE.search(text) for text in texts)


def header_of(headers: Mapping[str, str]) -> Agent | None:
    """What the header chooses, if it is there."""
    match headers.get(HEADER, "").strip().lower():
        case "":
            return None
        case "own":
            return "own"
        case "client":
            return "client"
    raise bad_request(f'{HEADER}: must be "own" or "client"', HEADER, "invalid_value")
