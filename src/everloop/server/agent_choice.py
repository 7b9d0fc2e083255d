"""Decides which agent answers a request without `tools`: the server's own, or none, because the client is one.

The server's settings, the token, a header and the model's name decide. A side request of a client, such as for a title,
never gets the agent's tools; detecting one can only take tools away.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..config import Agent
from ..log import text_of
from .errors import bad_request
from .requests import ChatRequest

HEADER = "X-Agent"
# Names under which the server's default model is offered, with the agent they select.
MODELS: Mapping[str, Agent] = {"everloop/agent": "own", "everloop/chat": "client"}
INSTRUCTION = 800  # characters at the start of a message, where a client's own prompt states its purpose
CLOSING = 500  # characters at its end, after the text that it is about
SHORT = 200  # messages up to this many characters are examined in full
MAX_SENTENCES = 2  # leading sentences of a system message that state a request's purpose; an agent's rules follow them

_CHAT = r"(?:chats?|conversations?|threads?|sessions?|discussions?|dialogues?|exchange|topic)"
# The chat that the request belongs to, not any chat.
_THIS = rf"(?:(?:this|the|our|following|above|previous|user's)\ (?:\w+\ ){{0,2}}{_CHAT}|(?:chat|conversation)\ history)"
_MAKE = r"(?:generat\w+|creat\w+|writ\w+|provid\w+|giv\w+|mak\w+|suggest\w*|craft\w*|reply|output|propos\w+|nam\w+)"
_NAME = r"(?:titles?|names?|headings?|headlines?|descriptions?|subject)"
# Phrases from the prompts of Open WebUI, LibreChat, Continue, Zed, goose, aider, Claude Code and others.
_TASK = re.compile(
    rf"""
    \b{_MAKE}\b.{{0,60}}\b{_NAME}\b.{{0,60}}\b{_THIS}\b          # "Generate a title for this chat"
    |\b{_MAKE}\ {_THIS}\ an?\ (?:\w+\ ){{0,2}}{_NAME}\b           # "give this conversation a name"
    |\bsummari[sz](?:e|ing)\ {_THIS}\b                            # "summarize this conversation"
    |\b{_MAKE}\b.{{0,40}}\bsummary\ of\ {_THIS}\b
    |\b{_MAKE}\b.{{0,30}}\btags\b.{{0,60}}\b{_THIS}\b             # "1-3 broad tags categorizing the themes of …"
    |\b{_MAKE}\b.{{0,30}}\bfollow-?\ ?up\ (?:questions|prompts)\b.{{0,60}}\b(?:the\ user\b|{_THIS}\b)
    |\b{_THIS}\b.{{0,60}}\b{_MAKE}\ search\ quer(?:y|ies)\b
    """,
    re.I | re.X,
)
# Roles in prompts for models that have no other task.
_ROLE = re.compile(
    r"""
    \byou\ are\ (?:an?|the)\ (?:\w+\ ){0,4}?
    (?:(?:thread\ |chat\ |conversation\ )?title\ generator|conversation\ summari[sz]er|hole\ filler
      |(?:text\ |code\ |inline\ )?auto-?\ ?complet(?:ion|e)\ (?:system|engine|assistant|model)
      |(?:code|inline|text)\ completion\ (?:system|engine|assistant|model)
      |tasked\ with\ (?:summari[sz]ing|naming|titling)\ (?:\w+\ )?conversations
      |in\ crafting\ (?:\w+\ )?titles\ for\ (?:\w+\ )?conversations)\b
    """,
    re.I | re.X,
)
# Fill-in-the-middle markers; two are required, because a question may be about one of them.
_GAPS = (
    re.compile(r"<\|?fim[_-]?(?:prefix|suffix|middle|begin|hole|end)\|?>|<\uff5cfim\u2581\w+\uff5c>"),
    re.compile(r"<(?:PRE|SUF|MID)>"),
    re.compile(r"\[(?:SUFFIX|PREFIX)\]"),
)
# Words that no side request contains: they ask for an effect elsewhere, or are about something elsewhere.
_WORK = re.compile(
    r"""
    \b(?:save|store|append|commit|push|send|mail|post|upload|insert|rename|refactor|implement|install)\b
    |\b(?:files?|folders?|director(?:y|ies)|repo(?:sitory)?|database|tables?|inbox|issues?|tickets?|channel|slack
      |functions?|methods?|class(?:es)?|scripts?|modules?|components?|endpoints?|pages?|apps?|api|tests?)\b
    |[\w-]{2,}\.[a-z]\w{0,4}\b|/\w+/                              # a path
    """,
    re.I | re.X,
)
_RULE = re.compile(r"\b(?:when|whenever|if|can|may|able|also|once)\b", re.I)  # one of several things that an agent does
_QUOTE = re.compile(r"""[:\n"“«`<]""")  # may be followed by the chat's subject
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def model_of(name: str | None) -> str:
    """Return the model that a request names; "" for the server's default."""
    return "" if name is None or name in MODELS else name


def agent_of(chat: ChatRequest, headers: Mapping[str, str], token: str, default: Agent) -> Agent:
    """Return whose tools a request uses if it brings none.

    The header and the model's name take precedence over the token, and the token over the server's settings. A token
    restricted to "client" cannot be overridden, and if header and model name disagree, the agent's tools are not used.
    """
    asked = {header_of(headers), MODELS.get(chat.model or "")} - {None}
    if token == "client" or "client" in asked or chat.client_is_agent or is_side_request(chat):
        return "client"
    return "own" if asked or token == "own" else default


def is_side_request(chat: ChatRequest) -> bool:
    """Return whether a client is asking for a title, a summary, tags or a completion, judging by its prompt."""
    said = next((text_of(one["content"]) for one in reversed(chat.messages) if one["role"] == "user"), "")
    if _has_gap(said) or _ROLE.search(said[:SHORT]) or _ROLE.search(chat.system[:SHORT]):
        return True
    rules = [one for one in _sentences(chat.system[:INSTRUCTION])[:MAX_SENTENCES] if not _RULE.search(one)]
    if any(_asks_aside(sentence) for sentence in rules):
        return True
    if len(said) <= SHORT and not _QUOTE.search(said) and _WORK.search(said):
        return False
    texts = (said[:INSTRUCTION], said[max(INSTRUCTION, len(said) - CLOSING) :])
    return any(_asks_aside(sentence) for text in texts for sentence in _sentences(text))


def _asks_aside(sentence: str) -> bool:
    """Return whether a sentence makes only a side request. Anything it quotes from the chat is ignored."""
    task = _TASK.search(sentence)
    if task is None:
        return False
    quote = _QUOTE.search(sentence, task.end())
    return _WORK.search(sentence[: quote.start() if quote else None]) is None


def _sentences(text: str) -> list[str]:
    return [sentence for sentence in _SENTENCE.split(text) if sentence]


def _has_gap(text: str) -> bool:
    """Return whether a text is to be filled in: it has two different markers of one model's format."""
    return any(len(set(mark.findall(text))) >= 2 for mark in _GAPS)


def header_of(headers: Mapping[str, str]) -> Agent | None:
    """Return the choice in the header, if there is one."""
    match headers.get(HEADER, "").strip().lower():
        case "":
            return None
        case "own":
            return "own"
        case "client":
            return "client"
    raise bad_request(f'{HEADER}: must be "own" or "client"', HEADER, "invalid_value")
