"""The log of a session: its entries, and the conversation they add up to.

Everything that happens in a session is one of these entries, appended and never changed. The history sent to a model,
the crash journal, the activity log, replay and fork are all derived from them.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from .messages import Conversation, Message, assistant_message, tool_message
from .text import clean

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


UNTIMED = 0.0  # a field with a number is only left out of the JSON if it is this very object


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call as recorded in the log; its id is unique within the session."""

    id: str
    name: str
    arguments: dict[str, Any] = {}
    error: str | None = None


class ResponseFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields of an OpenAI Responses API request that are echoed when its response is retrieved."""

    previous: str = ""  # the response that it continues
    background: bool = False
    names: dict[str, str] = {}  # the client's names for tools that the model knows under other names
    custom: tuple[str, ...] = ()  # tools that take text instead of arguments


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an API client sent with its message: its history, its tools and its options."""

    before: tuple[Message, ...] = ()  # messages before this one, in OpenAI's format
    system: str = ""  # the client's system prompt
    tools: tuple[Message, ...] = ()  # the client's tools: calls of them are handed back to it
    options: dict[str, Any] = {}  # options of the model call: temperature, …
    model: str = ""
    metadata: dict[str, str] = {}  # the client's own metadata
    kept: bool = False  # the session continues after it; otherwise the request is self-contained
    answer_only: bool = False  # no tools are offered
    model_only: bool = False  # bypass the agent: neither its prompt nor its tools are used
    response: ResponseFacts | None = None  # the request came through the Responses API, which stores it
    via: str = ""  # the worker that holds the client's connection, if another one runs the turn

    @property
    def client_tools(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)


class UserSaid(msgspec.Struct, frozen=True, omit_defaults=True, tag="user"):
    """An incoming message. The first one of a turn opens it; later ones were steered into it."""

    content: Content
    sender: str = ""
    now: str = ""  # the time, if a while has passed since the conversation last mentioned it
    inside: bool = False  # from inside the system, such as a sub-agent: not a person's words
    untrusted: bool = False  # contains external content
    loaded: str = ""  # skills that the message names, loaded when it arrived: not the person's words
    job: str = ""  # the scheduled job that sent it
    note: str = ""  # what the model is told of that job
    # set for API requests; if the content is empty, results of the client's tools opened the turn
    request: Request | None = None
    own_files: bool = False  # untrusted only because of files that the agent did not write
    before: tuple[Message, ...] = ()  # initial messages from an agent's definition

    def with_note(self) -> Content:
        """Return the content, followed by the note of the job that sent it."""
        return _extended(self.content, [f"[{self.note}]"]) if self.note else self.content


class FailedAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A failed attempt at a model call, after which the model was called again."""

    error: str
    began: float = 0.0  # seconds since the start of the first attempt
    seconds: float = 0.0  # until it failed


class ModelAnswered(msgspec.Struct, frozen=True, omit_defaults=True, tag="answer"):
    content: str | None = None
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None
    finish_reason: str = "stop"
    usage: dict[str, int] = {}
    model: str = ""
    seconds: float = UNTIMED  # duration of the model call, including retries
    first_token: float = UNTIMED  # seconds to the first token, if it was streamed to a subscriber
    untrusted: bool = False  # the model saw tools with external descriptions
    logprobs: tuple[dict[str, Any], ...] = ()  # per token, if the API client asked for them
    flushed: float = UNTIMED  # seconds that the turn spent on flushes since the previous step
    worker: str = ""  # the worker that resumed the turn here, after a crash, a handoff or an answer to a parked turn
    prompt: str = ""  # hash of the system prompt, if the store has it
    tools: str = ""  # hash of the tools, likewise
    failures: tuple[FailedAttempt, ...] = ()  # failed attempts before this answer

    @property
    def empty(self) -> bool:
        return not self.calls and not (self.content or "").strip()

    @property
    def own_files(self) -> bool:
        """Return whether it is untrusted only because of files that the agent did not write: never."""
        return False


class CallsBegun(msgspec.Struct, frozen=True, tag="begun"):
    """Intent record: these calls are about to run and are not safe to repeat."""

    ids: tuple[str, ...]


class CallsAsked(msgspec.Struct, frozen=True, omit_defaults=True, tag="asked"):
    """These calls wait for a person's answer; the question was sent to the chat."""

    ids: tuple[str, ...]
    question: str
    grants: tuple[str, ...] = ()  # granted to the session by the answer "always"
    once: tuple[str, ...] = ()  # granted even by a plain yes

    def decided(self, allowed: bool, by: str, note: str, always: bool) -> tuple[CallsDecided, tuple[str, ...]]:
        """Return the entry for a person's answer, and the grants it gives the session."""
        names = (*self.once, *(self.grants if always else ()))
        return CallsDecided(self.ids, allowed, by, note, always), tuple(dict.fromkeys(names)) if allowed else ()


class CallsDecided(msgspec.Struct, frozen=True, omit_defaults=True, tag="decided"):
    """A person's answer to calls that needed approval."""

    ids: tuple[str, ...]
    allowed: bool
    by: str = ""
    note: str = ""  # passed on to the model
    always: bool = False  # for the rest of the session


class CallEnded(msgspec.Struct, frozen=True, omit_defaults=True, tag="result"):
    id: str
    name: str
    content: str
    status: Status = "ok"
    seconds: float = UNTIMED
    untrusted: bool = False  # contains external content
    images: tuple[str, ...] = ()  # data URLs of the result's images
    repeats: int = 0  # previous consecutive failures of the same call, with nothing new in between
    own_files: bool = False  # untrusted only because of files that the agent did not write
    flushed: float = UNTIMED  # as in `ModelAnswered`
    worker: str = ""


class TurnEnded(msgspec.Struct, frozen=True, omit_defaults=True, tag="end"):
    reason: Reason
    text: str = ""
    status: int = 0  # the HTTP status from the model's server, if that ended the turn
    error: str = ""  # the error, if the reason is "error"; `text` is the message shown in the chat

    @classmethod
    def failed(cls, error: str, status: int = 0) -> TurnEnded:
        """Return the end of a turn that failed with an error."""
        return cls("error", apology(error), status, error)


def apology(error: str) -> str:
    """Return the chat message for an error."""
    return f"Sorry, I encountered an error: {error}"


class Noted(msgspec.Struct, frozen=True, tag="note"):
    """A message added to the history from outside, without a turn (a library's `Session.add_message`)."""

    message: dict[str, Any]


class Cleared(msgspec.Struct, frozen=True, tag="new"):
    """`/new`: a new conversation starts here; what precedes it stays readable."""


class Compacted(msgspec.Struct, frozen=True, omit_defaults=True, tag="compacted"):
    """A compaction: from here on the model sees a shorter conversation.

    Entries up to `until` are replaced by a summary, and some long results by a pointer to a file. The entries
    themselves are kept. It builds on the previous compaction, at position `follows`.
    """

    until: int
    summary: str = ""
    turns: int = 0  # number of turns that the summary covers in total
    aside: dict[str, str] = {}  # the file that holds a result, by call id
    trimmed: int = 0  # up to this position images are dropped and long call arguments are truncated
    untrusted: bool = False  # the summarised part contained external content
    own_files: bool = False  # only because of files that the agent did not write
    stopgap: bool = False  # the summary was made without a model and will be replaced
    usage: dict[str, int] = {}  # token usage of the summary
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

SAYS_ORIGIN = UserSaid | ModelAnswered | CallEnded  # entries that record whether they contain external content


class Logged(msgspec.Struct, frozen=True):
    """An entry with its position in the log."""

    seq: int
    turn: str | None
    at: float
    entry: Entry


MANY = 50  # above this many messages, a client's history is encoded one message at a time
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def kind_of(entry: Entry) -> str:
    """Return the tag of an entry's kind, as stored in the log."""
    return str(entry.__struct_config__.tag)


def encode_entry(entry: Entry) -> str:
    return entry_bytes(entry).decode()


def entry_bytes(entry: Entry) -> bytes:
    """Encode an entry as UTF-8, for stores that take bytes.

    Decoding a long entry to str would take longer than encoding it.
    """
    if isinstance(entry, UserSaid) and (request := entry.request) is not None and len(request.before) > MANY:
        # One at a time: a single call that encodes megabytes would hold the GIL and block all other threads.
        before = tuple(msgspec.Raw(_encoder.encode(message)) for message in request.before)
        entry = msgspec.structs.replace(entry, request=msgspec.structs.replace(request, before=before))
    return _encoder.encode(entry)


def decode_entry(data: str | bytes) -> Entry:
    entry = _decoder.decode(data)
    if isinstance(entry, UserSaid) and entry.sender == "cron" and not entry.job:
        return _read_old_note(entry)
    return entry


OLD_NOTE = "This is scheduled work: the job "


def _read_old_note(said: UserSaid) -> UserSaid:
    """Return the message of a job with its note in a field: an earlier version appended it to the content."""
    text, opening, rest = said.content.rpartition(f"\n\n[{OLD_NOTE}") if isinstance(said.content, str) else ("", "", "")
    if not opening or not rest.endswith("]"):
        return said
    job = rest.partition(",")[0].partition(" ")[0]
    return msgspec.structs.replace(said, content=text, job=job, note=OLD_NOTE + rest[:-1])


def open_turn(log: Sequence[Entry]) -> Sequence[Entry]:
    """Return the entries of the open turn; empty if there is none."""
    start = len(log)
    while start and not isinstance(log[start - 1], TurnEnded | Noted | Cleared):
        start -= 1
    while start < len(log) and isinstance(log[start], Compacted):  # it was written between two turns
        start += 1
    return log[start:]


class Transcript:
    """Converts entries to messages one at a time, so that a running turn never rereads its history.

    Results are held back until every call of their round has one, and then come in the order of the calls, whatever
    order they finished in: the messages so far always form a valid conversation.
    """

    def __init__(self) -> None:
        self._calls: tuple[Call, ...] = ()
        self._results: dict[str, Message] = {}
        self._images: dict[str, tuple[str, ...]] = {}
        self._last_role = ""

    def add(self, entry: Entry) -> list[Message]:
        """Return the messages that this entry completes."""
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
                # Strict chat templates require an assistant message between two user messages.
                return [assistant_message(AWAY if _away(entry) else entry.text)]
            case Noted():
                return [entry.message]
            case CallsBegun() | CallsAsked() | CallsDecided() | Cleared() | Compacted():
                return []

    def _shown_images(self) -> list[Message]:
        """Return the images of a round. A tool message can only hold text, so they follow in a user message."""
        parts: list[dict[str, Any]] = []
        for number, call in enumerate(self._calls, 1):
            if images := self._images.get(call.id):
                # Omit the call id: the model may have chosen it, and this message counts as the person's.
                parts.append({"type": "text", "text": f"(what call {number} of this round, {call.name}, gave)"})
                parts += [{"type": "image_url", "image_url": {"url": url}} for url in images]
        return [{"role": "user", "content": parts}] if parts else []


def _whole(said: UserSaid) -> Content:
    """Return the message with the note of its job, its skills, and the time if set.

    All of them come from the log, so that every later request is identical.
    """
    further = [said.loaded] if said.loaded else []
    further += [f"[It is now {said.now}.]"] if said.now else []
    return _extended(said.with_note(), further)


def _extended(content: Content, further: list[str]) -> Content:
    """Return the content of a message with further paragraphs."""
    if not further:
        return content
    if isinstance(content, str):
        return "\n\n".join([content, *further])
    return [*content, *({"type": "text", "text": text} for text in further)]


def _away(ended: TurnEnded) -> bool:
    """Return whether calls were handed to a client without any text."""
    return ended.reason == "handed" and not ended.text


def extend_conversation(conversation: Conversation, transcript: Transcript, entry: Entry) -> None:
    """Add the messages that an entry completes to a conversation, and update the conversation's flags."""
    messages = transcript.add(entry)
    if isinstance(entry, SAYS_ORIGIN) and entry.untrusted:
        conversation.untrusted = True
        conversation.outside |= not entry.own_files
    if isinstance(entry, UserSaid) and (entry.inside or entry.loaded or entry.note):
        conversation.own_words[len(conversation) + len(messages) - 1] = "" if entry.inside else entry.content
    conversation.extend(messages)


def day_in_words(at: float) -> str:
    """Return a date in the format shown to the model.

    With the time of day, every conversation would start with a different prefix.
    """
    return time.strftime("%A, %Y-%m-%d", time.localtime(at))


def in_words(at: float) -> str:
    """Return a point in time in the format shown to the model, in the local time zone."""
    return time.strftime("%A, %Y-%m-%d %H:%M", time.localtime(at))


def with_notice(content: str, repeats: int) -> str:
    """Return the result of a call that keeps failing with a notice added, inside its JSON if it is JSON."""
    notice = f"This same call has now failed {repeats + 1} times. Do not make it again: {REPEATING_ADVICE}"
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = None
    if isinstance(body, dict):
        return msgspec.json.encode({**body, "notice": notice}).decode()
    return f"{content}\n[{notice}]"


def error_content(message: str, advice: str) -> str:
    """The result of a failed call, in the one form that the model sees."""
    return msgspec.json.encode({"status": "error", "message": clean(message), "advice": advice}).decode()


def error_in(content: str) -> str | None:
    """The message in the result of a failed call; None for any other result."""
    if not content.startswith('{"status":'):
        return None
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:  # a tool's own text that begins alike
        return None
    return str(body["message"]) if body["status"] == "error" and "message" in body else None


# The end of a command's result: its exit status, and notes after it.
_EXIT_STATUS = re.compile(r"\n?^\[exit status (\d+)[^\]\n]*\](?:\n\[[^\n]*\])*\s*\Z", re.M)


def exit_status(code: int) -> str:
    """Describe the exit status of a command, in the one form that results have."""
    if code > 128:
        try:
            return f"exit status {code}, {signal.Signals(code - 128).name}"
        except ValueError:
            pass  # not a signal number: the command's own exit status
    return f"exit status {code}"


def split_exit_status(content: str) -> tuple[str, int | None]:
    """Return the output in a command's result, and the exit status; None if it has none, because it is 0 or it runs."""
    found = _EXIT_STATUS.search(content)
    return (content[: found.start()], int(found[1])) if found is not None else (content, None)


def tokens_of(entries: Iterable[Entry]) -> dict[str, int]:
    """Return the total tokens of all model calls in these entries, by kind."""
    total: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry, ModelAnswered):
            for name, count in entry.usage.items():
                total[name] = total.get(name, 0) + count
    return total


def text_of(content: Any) -> str:
    """Return a message's text, whatever a library has put there; parts that are not text are named by their type."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else "" if content is None else str(content)
    parts = (part if isinstance(part, dict) else {"type": "text", "text": part} for part in content)
    return "\n".join(str(part.get("text")) if part.get("type") == "text" else f"[{part.get('type')}]" for part in parts)


def messages_of(entries: Iterable[Entry]) -> Iterator[Message]:
    """Yield the messages of the conversation that a log adds up to."""
    transcript = Transcript()
    for entry in entries:
        yield from transcript.add(entry)


class Written(Awaitable[T_co], Protocol[T_co]):
    """An in-flight write to a log.

    It cannot be cancelled: data handed to the disk gets there. A task that is cancelled while it waits sees the
    cancellation once the write is done.
    """

    def done(self) -> bool: ...

    def result(self) -> T_co: ...

    def exception(self) -> BaseException | None: ...
