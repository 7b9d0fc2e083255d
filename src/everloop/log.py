"""The log of a session: what can stand in it, and the conversation it adds up to.

Everything that happens in a session is one of these entries, appended and never changed. The history sent to a
model, the crash journal, the activity log, replay and fork are all read from them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from .messages import Conversation, Message, assistant_message, tool_message

T_co = TypeVar("T_co", covariant=True)
Content = str | list[dict[str, Any]]
Status = Literal["ok", "error", "cancelled", "timeout", "aborted", "interrupted", "denied"]
AWAY = "(I wait for the results.)"
REPEATING_ADVICE = "find out why it fails, do something else, or tell the user what stands in the way."
Reason = Literal[
    "answer",
    "max_rounds",
    "cancelled",
    "timeout",
    "aborted",
    "replaced",
    "handed",
    "empty",
    "repeating",
    "budget",
    "error",
    "abandoned",
]


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call as it stands in the log; its id is unique within the session."""

    id: str
    name: str
    arguments: dict[str, Any] = {}
    error: str | None = None


class ResponseFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request of OpenAI's Responses API is shown with when its answer is read again."""

    previous: str = ""  # the response that it continues
    background: bool = False
    names: dict[str, str] = {}  # the client's, of tools that the model knows by another name
    custom: tuple[str, ...] = ()  # tools that take a text instead of arguments


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an API client sent along with what was said: its side of the conversation, its tools, its wishes."""

    before: tuple[Message, ...] = ()  # messages that stand before what was said, in OpenAI's shapes
    system: str = ""  # the client's own system text
    tools: tuple[Message, ...] = ()  # the client's: calls of them are handed back to it
    options: dict[str, Any] = {}  # of the model call: temperature, …
    model: str = ""
    metadata: dict[str, str] = {}  # the client's own notes
    kept: bool = False  # the session goes on after it; otherwise the request is all there is
    answer_only: bool = False  # no tool may be called, so none is offered
    model_only: bool = False  # the agent takes no part: neither its prompt nor its tools are used
    response: ResponseFacts | None = None  # it came by the Responses API, which keeps it
    via: str = ""  # the worker that has the client's connection, where another one runs the turn

    @property
    def client_tools(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)


class UserSaid(msgspec.Struct, frozen=True, omit_defaults=True, tag="user"):
    """A message from outside. The first one of a turn opens it; later ones were steered into it."""

    content: Content
    sender: str = ""
    now: str = ""  # the time, where a while has passed since the conversation last heard it
    inside: bool = False  # it came from inside the system, a sub-agent say: no person's word
    untrusted: bool = False  # it holds what came from outside
    loaded: str = ""  # skills that it names, read when it came: no word of the person
    request: Request | None = None  # it came by the API; with no words of its own, results of the client's tools did
    own_files: bool = False  # it is untrusted only because of files that the agent did not write
    before: tuple[Message, ...] = ()  # messages of an agent's definition that stand before it


class FailedAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt of a model call that failed, so that the model was asked once more."""

    error: str
    began: float = 0.0  # seconds after the model was first asked
    seconds: float = 0.0  # until it failed


class ModelAnswered(msgspec.Struct, frozen=True, omit_defaults=True, tag="answer"):
    content: str | None = None
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None
    finish_reason: str = "stop"
    usage: dict[str, int] = {}
    model: str = ""
    seconds: float = 0.0  # that the model took, with every try
    first_token: float = 0.0  # seconds until the first piece of it, where it was streamed to a subscriber
    untrusted: bool = False  # the model was shown tools whose descriptions came from outside
    logprobs: tuple[dict[str, Any], ...] = ()  # of each token, where the client of an API asked for it
    flushed: float = 0.0  # seconds that the turn waited for the disk since the step before
    worker: str = ""  # that went on with the turn here, where it was cut off, handed off or parked before
    prompt: str = ""  # the hash of the system prompt that was sent, where the store has kept it
    tools: str = ""  # the hash of the tools that were offered, as of the prompt
    failures: tuple[FailedAttempt, ...] = ()  # attempts before the one that gave this answer

    @property
    def empty(self) -> bool:
        return not self.calls and not (self.content or "").strip()

    @property
    def own_files(self) -> bool:
        """Whether it is untrusted only because of files that the agent did not write: never."""
        return False


class CallsBegun(msgspec.Struct, frozen=True, tag="begun"):
    """Intent: these calls are about to run and are not safe to repeat."""

    ids: tuple[str, ...]


class CallsAsked(msgspec.Struct, frozen=True, omit_defaults=True, tag="asked"):
    """These calls wait for a person's answer; the question went to the chat."""

    ids: tuple[str, ...]
    question: str
    grants: tuple[str, ...] = ()  # what the session is granted by the answer "always"
    once: tuple[str, ...] = ()  # and by a plain yes

    def decided(self, allowed: bool, by: str, note: str, always: bool) -> tuple[CallsDecided, tuple[str, ...]]:
        """Return the entry of a person's answer, and what it grants the session."""
        names = (*self.once, *(self.grants if always else ()))
        return CallsDecided(self.ids, allowed, by, note, always), tuple(dict.fromkeys(names)) if allowed else ()


class CallsDecided(msgspec.Struct, frozen=True, omit_defaults=True, tag="decided"):
    """A person's word on calls that were asked for."""

    ids: tuple[str, ...]
    allowed: bool
    by: str = ""
    note: str = ""  # what the person wants the model to know
    always: bool = False  # for the rest of the session


class CallEnded(msgspec.Struct, frozen=True, omit_defaults=True, tag="result"):
    id: str
    name: str
    content: str
    status: Status = "ok"
    seconds: float = 0.0
    untrusted: bool = False  # it holds what came from outside
    images: tuple[str, ...] = ()  # data URLs that belong to it
    repeats: int = 0  # how often the same call had failed before, with nothing new in between
    own_files: bool = False  # it is untrusted only because of files that the agent did not write
    flushed: float = 0.0  # as of an answer
    worker: str = ""


class TurnEnded(msgspec.Struct, frozen=True, omit_defaults=True, tag="end"):
    reason: Reason
    text: str = ""
    status: int = 0  # the HTTP status of the model's server, where that ended the turn
    error: str = ""  # what went wrong, where the reason is "error"; `text` is how the chat is told

    @classmethod
    def failed(cls, error: str, status: int = 0) -> TurnEnded:
        """The end of a turn that an error ended."""
        return cls("error", apology(error), status, error)


def apology(error: str) -> str:
    """Return how a chat is told of an error."""
    return f"Sorry, I encountered an error: {error}"


class Noted(msgspec.Struct, frozen=True, tag="note"):
    """A message put into the history from outside, without a turn (a library's `Session.add_message`)."""

    message: dict[str, Any]


class Cleared(msgspec.Struct, frozen=True, tag="new"):
    """`/new`: the conversation starts afresh here; what stands before stays readable."""


class Compacted(msgspec.Struct, frozen=True, omit_defaults=True, tag="compacted"):
    """From here on the model is shown less: what stands up to `until` as a summary, some long results as a pointer to
    a file. The entries themselves stay. It builds on the one before it, which stands at `follows`."""

    until: int
    summary: str = ""
    turns: int = 0  # that the summary stands for, in all
    aside: dict[str, str] = {}  # the file that holds a result, by call
    trimmed: int = 0  # up to this position no pictures are shown, and of long arguments of calls only the beginning
    untrusted: bool = False  # something that came from outside stood in what is summarised
    own_files: bool = False  # only files that the agent did not write did
    stopgap: bool = False  # the summary was made without a model, until there is a better one
    usage: dict[str, int] = {}  # what the summary has cost
    follows: int = 0


Entry = (
    UserSaid
    | ModelAnswered
    | CallsBegun
    | CallsAsked
    | CallsDecided
    | CallEnded
    | TurnEnded
    | Noted
    | Cleared
    | Compacted
)

SAYS_ORIGIN = UserSaid | ModelAnswered | CallEnded  # entries that say whether text from outside came with them


class Logged(msgspec.Struct, frozen=True):
    """An entry with its place in the log."""

    seq: int
    turn: str | None
    at: float
    entry: Entry


MANY = 50  # messages of a client's history that are encoded one by one
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def kind_of(entry: Entry) -> str:
    """The name of an entry's kind, as it stands in the log."""
    return str(entry.__struct_config__.tag)


def encode_entry(entry: Entry) -> str:
    return entry_bytes(entry).decode()


def entry_bytes(entry: Entry) -> bytes:
    """An entry as UTF-8, for a store that takes bytes: to make a text of a long one takes longer than to encode it."""
    if isinstance(entry, UserSaid) and (request := entry.request) is not None and len(request.before) > MANY:
        # One by one: no other thread runs beside a single step over megabytes of text.
        before = tuple(msgspec.Raw(_encoder.encode(message)) for message in request.before)
        entry = msgspec.structs.replace(entry, request=msgspec.structs.replace(request, before=before))
    return _encoder.encode(entry)


def decode_entry(data: str | bytes) -> Entry:
    return _decoder.decode(data)


def open_turn(log: Sequence[Entry]) -> Sequence[Entry]:
    """The entries of the turn that has not ended; empty when there is none."""
    start = len(log)
    while start and not isinstance(log[start - 1], TurnEnded | Noted | Cleared):
        start -= 1
    while start < len(log) and isinstance(log[start], Compacted):  # it came between two turns
        start += 1
    return log[start:]


class Transcript:
    """Turns entries into messages, one at a time, so that a running turn never reads its history again.

    Results are held back until every call of their round has one and then come in the order of the calls,
    whatever order they finished in: what has come out so far is always a valid conversation.
    """

    def __init__(self) -> None:
        self._calls: tuple[Call, ...] = ()
        self._results: dict[str, Message] = {}
        self._images: dict[str, tuple[str, ...]] = {}
        self._last_role = ""

    def add(self, entry: Entry) -> list[Message]:
        """The messages that this entry completes."""
        messages = self._read(entry)
        if messages:
            self._last_role = messages[-1]["role"]
        return messages

    def _read(self, entry: Entry) -> list[Message]:
        match entry:
            case UserSaid():
                before = entry.request.before if entry.request is not None else entry.before
                said = [{"role": "user", "content": _whole(entry)}] if entry.content or not before else []
                return [*before, *said]
            case ModelAnswered():
                self._calls, self._results, self._images = entry.calls, {}, {}
                calls = [(call.id, call.name, call.arguments) for call in entry.calls]
                return [] if entry.empty else [assistant_message(entry.content, calls)]
            case CallEnded():
                content = with_notice(entry.content, entry.repeats) if entry.repeats else entry.content
                self._results[entry.id] = tool_message(entry.id, entry.name, content)
                if entry.images:
                    self._images[entry.id] = entry.images
                if len(self._results) < len(self._calls):
                    return []
                return [*(self._results[call.id] for call in self._calls), *self._shown_images()]
            case TurnEnded():
                if self._last_role == "assistant":
                    return []
                # Strict chat templates want an assistant's word between two messages of the user.
                return [assistant_message(AWAY if _away(entry) else entry.text)]
            case Noted():
                return [entry.message]
            case CallsBegun() | CallsAsked() | CallsDecided() | Cleared() | Compacted():
                return []

    def _shown_images(self) -> list[Message]:
        """The images of a round. A tool's message can hold only text, so they follow as the user's."""
        parts: list[dict[str, Any]] = []
        for number, call in enumerate(self._calls, 1):
            if images := self._images.get(call.id):
                # Without the id: the model may have chosen it, and this message counts as the person's.
                parts.append({"type": "text", "text": f"(what call {number} of this round, {call.name}, gave)"})
                parts += [{"type": "image_url", "image_url": {"url": url}} for url in images]
        return [{"role": "user", "content": parts}] if parts else []


def _whole(said: UserSaid) -> Content:
    """What was said, with what belongs to it: skills, and the time where that is told. It is in the log, so that no
    later request differs."""
    further = [said.loaded] if said.loaded else []
    further += [f"[It is now {said.now}.]"] if said.now else []
    if not further:
        return said.content
    if isinstance(said.content, str):
        return "\n\n".join([said.content, *further])
    return [*said.content, *({"type": "text", "text": text} for text in further)]


def _away(ended: TurnEnded) -> bool:
    """Whether nothing was said with calls that were handed to a client."""
    return ended.reason == "handed" and not ended.text


def hear(conversation: Conversation, transcript: Transcript, entry: Entry) -> None:
    """Add what an entry completes to a conversation, with what is to be known of it."""
    messages = transcript.add(entry)
    if isinstance(entry, SAYS_ORIGIN) and entry.untrusted:
        conversation.untrusted = True
        conversation.outside |= not entry.own_files
    if isinstance(entry, UserSaid) and (entry.inside or entry.loaded):
        conversation.own_words[len(conversation) + len(messages) - 1] = "" if entry.inside else entry.content
    conversation.extend(messages)


def day_in_words(at: float) -> str:
    """A day as the model reads it. With the time, each conversation would begin with other bytes than the last one."""
    return time.strftime("%A, %Y-%m-%d", time.localtime(at))


def in_words(at: float) -> str:
    """A moment as the model reads it, in the local time zone."""
    return time.strftime("%A, %Y-%m-%d %H:%M", time.localtime(at))


def with_notice(content: str, repeats: int) -> str:
    """The result of a call that keeps failing, with a word about that: in its JSON if it has any."""
    notice = f"This same call has now failed {repeats + 1} times. Do not make it again: {REPEATING_ADVICE}"
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = None
    if isinstance(body, dict):
        return msgspec.json.encode({**body, "notice": notice}).decode()
    return f"{content}\n[{notice}]"


def tokens_of(entries: Iterable[Entry]) -> dict[str, int]:
    """The tokens of all model calls in these entries, by their kind."""
    total: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry, ModelAnswered):
            for name, count in entry.usage.items():
                total[name] = total.get(name, 0) + count
    return total


def text_of(content: Any) -> str:
    """A message's text, whatever a library has put there; what is no text is named."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else "" if content is None else str(content)
    parts = (part if isinstance(part, dict) else {"type": "text", "text": part} for part in content)
    return "\n".join(str(part.get("text")) if part.get("type") == "text" else f"[{part.get('type')}]" for part in parts)


def messages_of(entries: Iterable[Entry]) -> Iterator[Message]:
    """The conversation that a log adds up to."""
    transcript = Transcript()
    for entry in entries:
        yield from transcript.add(entry)


class Written(Awaitable[T_co], Protocol[T_co]):
    """A write to a log under way. It cannot be cancelled: what was handed to the disk gets there, and a task that is
    cancelled while it waits hears of it when the write is done."""

    def done(self) -> bool: ...

    def result(self) -> T_co: ...

    def exception(self) -> BaseException | None: ...
