"""E-mail: IMAP with IDLE in, SMTP out, by the standard library in threads.

A mail is accepted once, by its Message-ID and sender. The cursor, the last UID, moves only once the mail is on disk. A
mail can name any sender, so the receiving server's verdict on SPF, DKIM or DMARC decides whether the sender is trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import imaplib
import mimetypes
import re
import select
import smtplib
import socket
import ssl
from collections.abc import Iterator
from email import message_from_bytes
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from email.message import EmailMessage, Message
from email.parser import BytesHeaderParser
from email.policy import Compat32, compat32, default
from email.utils import formatdate, parseaddr
from html.parser import HTMLParser
from typing import Any, NamedTuple

from ..text import one_line
from ..threads import in_thread
from .base import Attachment, Can, Inbox, Later, Never, Options, Part, Received, fold_case

CONNECT_SECONDS = 30.0
IDLE_SECONDS = 9 * 60.0  # servers end an IDLE after half an hour, and routers drop silent connections sooner
# A mail that arrives just as the server scans its folder is only noticed at the next scan.
SETTLE_SECONDS = 2.0
MAX_HEAD = 1_000_000  # bytes read of every mail; the rest is mostly attachments
MAX_MAIL = 36_000_000  # bytes read of a mail whose sender is known
MAX_ATTACHED = 18_000_000  # bytes of files in a mail: many servers accept 25 MB, and encoding adds a third
MAX_HEADERS = 64_000  # bytes: no person writes a mail with more
MAX_HEADER = 2_000  # characters of a part's header
MAX_TEXT, MAX_HTML = 400_000, 300_000  # bytes of a mail's text, and characters of one in HTML
MAX_MULTIPARTS, MAX_PARTS = 40, 5_000  # of a mail: the parser takes minutes for more
NAMES_ONLY = {"punycode", "idna"}  # codecs for host names, which are slow on long texts
AT_ONCE = 50
SUBJECT = "A message"
POLICY = default.clone(max_line_length=900)  # shorter lines would break long message ids, and with them threads
UNREADABLE = "[This mail has too many parts, and was not read.]"
NOBODY = re.compile(r"^(mailer-daemon|postmaster|no-?reply|do-?not-?reply|bounces?)([+._-].*)?@", re.I)
MESSAGE_ID = re.compile(r"<(?![^>]*=\?)[!-;=?-~]{1,248}>")  # without encoded words, which may hide a line end
ADDRESS = re.compile(r"[^\s<>()\[\]\\,:;@\"]+@[^\s<>()\[\]\\,:;@\"]+")
TLS = ("implicit", "starttls", "none")


class Connection:
    """A connection that one thread opens and another may close, even before it is open."""

    def __init__(self) -> None:
        self._server: imaplib.IMAP4 | None = None
        self._is_closed = False

    def open(self, server: imaplib.IMAP4) -> None:
        self._server = server
        if self._is_closed:
            self.close()

    def close(self) -> None:
        self._is_closed = True
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.socket().shutdown(socket.SHUT_RDWR)  # ends a thread that waits in IDLE
            with contextlib.suppress(OSError, imaplib.IMAP4.error):
                self._server.shutdown()


class Email:
    """A mailbox."""

    can = Can(
        text=100_000,
        form="html",
        repeats="none",
        threads=True,
        always_threads=True,
        media=MAX_ATTACHED,
        attaches=True,
        case=False,
    )

    def __init__(self, options: Options) -> None:
        self.name = options.name
        self._address = options.text("address")
        self._user = options.text("user", self._address)
        self._password = options.secret("password")
        self._imap = (options.text("imap_host"), options.number("imap_port", 993))
        self._imap_tls = options.text("imap_tls", "implicit", choices=TLS)
        self._smtp = (options.text("smtp_host"), options.number("smtp_port", 465))
        self._smtp_tls = options.text("smtp_tls", "implicit", choices=TLS)
        self._ca_file = options.text("ca_file", "")
        self._mailbox = options.text("mailbox", "INBOX")
        self._start = options.text("start", "new", choices=("new", "all"))
        self._auth_server = options.text("auth_server").lower()
        if "@" not in self._address or not parseaddr(self._address)[1]:
            raise options.problem("address is not an e-mail address")

    # ------------------------------------------------------------------------------------------ receiving

    async def receive(self, inbox: Inbox) -> None:
        connection = Connection()
        try:
            server = await in_thread(self._log_in, connection)
            last = await self._begin(server, inbox)
            await inbox.ready()
            wait = SETTLE_SECONDS
            while True:
                for mail in await in_thread(_fetch, server, last[1]):
                    wait = SETTLE_SECONDS
                    if (message := await self._received(mail, last[0], server, inbox)) is not None:
                        await inbox.accept(message)
                    last = (last[0], mail.uid)
                    await inbox.keep_cursor(f"{last[0]}:{mail.uid}")
                if not await in_thread(_has_new, server, last[1]):
                    wait = IDLE_SECONDS if await in_thread(_idle, server, wait) else SETTLE_SECONDS
        except (imaplib.IMAP4.error, ssl.SSLError) as error:
            raise OSError(one_line(str(error), 200)) from None
        finally:
            connection.close()

    async def _received(self, mail: Mail, validity: int, server: imaplib.IMAP4, inbox: Inbox) -> Received | None:
        """Convert a mail to a message. If the sender is not known, only its headers are parsed."""
        envelope = await in_thread(read_envelope, mail.data, self._address, self._auth_server)
        if envelope is None or not await inbox.knows(envelope.sender):
            return None
        data = mail.data
        if mail.size > len(data):
            data = (await in_thread(_fetch_one, server, mail.uid, MAX_MAIL)).data
        return await in_thread(received, envelope, data, mail.size, f"{validity}:{mail.uid}")

    async def check(self) -> str:
        """Log in at both servers."""
        connection = Connection()
        try:
            await in_thread(self._log_in, connection)
        finally:
            connection.close()
        await in_thread(lambda: self._connect_smtp().close())
        return self._address

    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self._ca_file or None)

    def _log_in(self, connection: Connection) -> imaplib.IMAP4:
        try:
            if self._imap_tls == "implicit":
                server: imaplib.IMAP4 = imaplib.IMAP4_SSL(
                    *self._imap, ssl_context=self._context(), timeout=CONNECT_SECONDS
                )
            else:
                server = imaplib.IMAP4(*self._imap, timeout=CONNECT_SECONDS)
            connection.open(server)
            if self._imap_tls == "starttls":
                server.starttls(self._context())
            server.login(self._user, self._password)
            status, data = server.select(_quoted(self._mailbox), readonly=True)
        except imaplib.IMAP4.error as error:
            raise OSError(f"IMAP: {one_line(str(error), 200)}") from None
        if status != "OK":
            raise Never(f"the mailbox {self._mailbox} cannot be opened: {one_line(str(data), 100)}")
        return server

    async def _begin(self, server: imaplib.IMAP4, inbox: Inbox) -> tuple[int, int]:
        """Return UIDVALIDITY and the last UID. In a new or recreated mailbox, receiving starts with the next mail."""
        validity = _number(server, "UIDVALIDITY")
        kept = await inbox.cursor()
        if kept:
            known, _, uid = kept.partition(":")
            if int(known) == validity:
                return validity, int(uid)
        last = max(_number(server, "UIDNEXT") - 1, 0) if self._start == "new" else 0
        await inbox.keep_cursor(f"{validity}:{last}")
        return validity, last

    # ------------------------------------------------------------------------------------------ sending

    async def send(self, part: Part, key: str) -> str:
        message = self._message(part, key)
        await in_thread(self._send, message)
        return str(message["Message-ID"])

    def _send(self, message: EmailMessage) -> None:
        """Send a mail. This thread closes the connection even if the caller was cancelled."""
        try:
            server = self._connect_smtp()
        except (OSError, smtplib.SMTPException) as error:
            raise Later(10.0, f"SMTP: {one_line(str(error), 200)}") from None
        try:
            server.send_message(message)
        except smtplib.SMTPRecipientsRefused as error:
            code, reason = next(iter(error.recipients.values()))
            raise _refusal(code, reason) from None
        except smtplib.SMTPResponseException as error:
            raise _refusal(error.smtp_code, error.smtp_error) from None
        except smtplib.SMTPNotSupportedError as error:  # such as non-ASCII letters in the address
            raise Never(f"SMTP: {one_line(str(error), 200)}") from None
        except smtplib.SMTPException as error:
            raise OSError(f"SMTP: {one_line(str(error), 200)}") from None
        finally:
            server.close()

    def _connect_smtp(self) -> smtplib.SMTP:
        domain = self._address.rpartition("@")[2]
        if self._smtp_tls == "implicit":
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                *self._smtp, local_hostname=domain, timeout=CONNECT_SECONDS, context=self._context()
            )
        else:
            server = smtplib.SMTP(*self._smtp, local_hostname=domain, timeout=CONNECT_SECONDS)
            if self._smtp_tls == "starttls":
                server.starttls(context=self._context())
        try:
            server.ehlo_or_helo_if_needed()
            if server.has_extn("auth"):
                server.login(self._user, self._password)
        except BaseException:
            server.close()
            raise
        return server

    def _message(self, part: Part, key: str) -> EmailMessage:
        if not ADDRESS.fullmatch(part.chat) or "=?" in part.chat:
            raise Never("the chat is not an e-mail address")
        message = EmailMessage(POLICY)
        subject = _undecodable(one_line(part.extra.get("subject", ""), 200))
        message["Subject"] = re.sub(r"^(re:\s*)*", "Re: ", subject, flags=re.I) if subject else SUBJECT
        message["From"], message["To"] = self._address, part.chat
        message["Date"] = formatdate(localtime=True)
        # A repeat has the same id, and many mail programs show it once.
        message["Message-ID"] = f"<{key}@{self._address.rpartition('@')[2]}>"
        message["Auto-Submitted"] = "auto-replied" if part.reply_to else "auto-generated"
        if MESSAGE_ID.fullmatch(answered := part.extra.get("message_id", "")):
            message["In-Reply-To"] = answered
            known = [one for one in MESSAGE_ID.findall(part.extra.get("references", "")) if one != answered][-20:]
            message["References"] = " ".join([*known, answered])
        _check_headers(message)
        message.set_content(part.plain)
        message.add_alternative(f'<div style="white-space: pre-wrap">{part.text}</div>', subtype="html")
        for file in part.files:
            kind, _, sort = file.type.partition("/")
            if kind in (
                "text",
                "message",
                "multipart",
            ):  # sent without converting characters or line ends
                kind, sort = "application", "octet-stream"
            message.add_attachment(file.data, maintype=kind, subtype=sort, filename=_undecodable(file.name))
        return message

    async def show(self, chat: str, key: str, text: str) -> None:
        """Nothing is shown before the answer."""


def _undecodable(text: str) -> str:
    """Return a header text without encoded words: the standard library would write them decoded, line ends included."""
    return text.replace("=?", "= ?")


def _check_headers(message: EmailMessage) -> None:
    """Refuse a mail if one of its headers, once serialized, injects another."""
    head = message.as_bytes().partition(b"\n\n")[0].decode("ascii", "replace")
    if [line.partition(":")[0] for line in head.split("\n") if line[:1] not in (" ", "\t")] != message.keys():
        raise Never("a header of the mail contains a line end")


def _refusal(code: int, reason: bytes | str) -> Exception:
    words = f"SMTP {code}: {one_line(reason, 200)}"
    return Later(60.0, words) if 400 <= code < 500 else Never(words)


# ---------------------------------------------------------------------------------------------------- the mailbox


def _quoted(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _number(server: imaplib.IMAP4, name: str) -> int:
    _, data = server.response(name)
    found = data[0] if data else None
    return int(found) if isinstance(found, bytes) else 0


def _uids(server: imaplib.IMAP4, last: int) -> list[int]:
    """Return the UIDs above the last one. Servers answer with the highest UID if there is none."""
    status, data = server.uid("SEARCH", f"UID {last + 1}:*")
    if status != "OK":
        raise OSError(f"IMAP: {one_line(str(data), 100)}")
    found = [int(uid) for line in data if line for uid in line.split()]
    return sorted(uid for uid in found if uid > last)


def _has_new(server: imaplib.IMAP4, last: int) -> bool:
    return bool(_uids(server, last))


class Mail(NamedTuple):
    """A mail of the mailbox, or the beginning of it."""

    uid: int
    data: bytes
    size: int  # of the whole mail


def _fetch(server: imaplib.IMAP4, last: int) -> list[Mail]:
    """Fetch the next mails, oldest first."""
    return [_fetch_one(server, uid, MAX_HEAD) for uid in _uids(server, last)[:AT_ONCE]]


def _fetch_one(server: imaplib.IMAP4, uid: int, most: int) -> Mail:
    status, data = server.uid("FETCH", str(uid), f"(RFC822.SIZE BODY.PEEK[]<0.{most}>)")
    if status != "OK":
        raise OSError(f"IMAP: {one_line(str(data), 100)}")
    bodies = [part[1] for part in data if isinstance(part, tuple)]
    words = b" ".join(part[0] if isinstance(part, tuple) else part for part in data if part)
    size = re.search(rb"RFC822\.SIZE (\d+)", words)
    body = bodies[0] if bodies else b""
    return Mail(uid, body, int(size[1]) if size else len(body))


def _idle(server: imaplib.IMAP4, seconds: float) -> bool:
    """Wait until the server reports something, or for some seconds. Return whether it reported nothing."""
    if "IDLE" not in server.capabilities:
        raise Never("the server has no IDLE")
    if server.untagged_responses.pop("EXISTS", None):  # reported with the response to an earlier command
        return False
    tag = server._new_tag()
    server.send(tag + b" IDLE\r\n")
    line, told = server.readline(), False
    while line.startswith(b"* "):
        line, told = server.readline(), True
    if not line.startswith(b"+"):
        raise OSError(f"IMAP: {one_line(line, 100)}")
    told = told or _has_unread(server)
    if not told:
        told = bool(select.select([server.socket()], [], [], seconds)[0])
    server.send(b"DONE\r\n")
    while not (line := server.readline()).startswith(tag):
        if not line:
            raise OSError("the server closed the connection")
    return not told


def _has_unread(server: imaplib.IMAP4) -> bool:
    """Return whether received bytes are waiting in a buffer, where `select` cannot see them."""
    file: Any = getattr(server, "_file", None) or server.file
    connection = server.socket()
    before = connection.gettimeout()
    connection.setblocking(False)
    try:
        return bool(file.peek(1))
    except ssl.SSLWantReadError:
        return False
    finally:
        connection.settimeout(before)


# ---------------------------------------------------------------------------------------------------- one mail


class Headers:
    """The raw headers of a mail. They are not decoded: an encoded word can hide text that would be read as syntax."""

    def __init__(self, head: bytes) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in BytesHeaderParser(policy=compat32).parsebytes(head).raw_items():
            raw = str(value).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            self._values.setdefault(name.lower(), []).append(re.sub(r"[\r\n]+", "", raw).strip())

    def all(self, name: str) -> list[str]:
        return self._values.get(name.lower(), [])

    def __getitem__(self, name: str) -> str:
        """The first header of this name; "" if there is none."""
        return next(iter(self.all(name)), "")


class Envelope(NamedTuple):
    """What the headers say about a mail."""

    sender: str
    name: str
    subject: str
    message_id: str  # "" if it has none that can be answered
    references: list[str]


def read_envelope(data: bytes, own: str, auth_server: str) -> Envelope | None:
    """Read the headers of a mail; None if no person wrote it, or if its sender may be forged."""
    end = re.search(rb"\r?\n\r?\n", data[:MAX_HEADERS])
    if end is None and len(data) >= MAX_HEADERS:
        return None
    headers = Headers(data[: end.end()] if end is not None else data)
    sender = sender_of(headers)
    if sender is None or sender == fold_case(own) or _is_automatic(headers, sender):
        return None
    if auth_server != "none" and not is_authentic(headers, sender, auth_server):
        return None
    message_id = MESSAGE_ID.fullmatch(headers["Message-ID"])
    return Envelope(
        sender=sender,
        name=parseaddr(_decoded(headers["From"]))[0],
        subject=one_line(_decoded(headers["Subject"]), 200),
        message_id=message_id[0] if message_id is not None else "",
        references=MESSAGE_ID.findall(headers["References"]) or MESSAGE_ID.findall(headers["In-Reply-To"]),
    )


def received(envelope: Envelope, data: bytes, size: int, fallback: str) -> Received:
    """Convert a mail of this size to a message; `fallback` is its id if it has no usable Message-ID."""
    subject, references = envelope.subject, envelope.references
    mail, is_whole = parsed(data), size <= len(data)
    text = UNREADABLE if mail is None else body_of(mail)
    if not is_whole:
        text = f"{text}\n\n[The mail is too large: what is attached to it was not taken.]".strip()
    if subject and not references and not text.startswith("/"):
        text = f"Subject: {subject}\n\n{text}"
    id = envelope.message_id or fallback
    # The sender chooses the Message-ID: reusing that of another person's mail must not block that mail.
    by = hashlib.sha256(envelope.sender.encode()).hexdigest()[:16]
    return Received(
        id=f"{id} {by}",
        chat=envelope.sender,
        sender=envelope.sender,
        name=envelope.name,
        text=text,
        thread=references[0] if references else id,
        extra={"subject": subject, "message_id": envelope.message_id, "references": " ".join(references[-20:])},
        files=tuple(attachments_of(mail)) if mail is not None and is_whole else (),
    )


def sender_of(headers: Headers) -> str | None:
    """Return the address in the `From` header; None if the header is ambiguous."""
    if len(found := headers.all("From")) != 1:
        return None
    bare = _without_comments(found[0])
    addresses = ADDRESS.findall(bare)
    if len(addresses) != bare.count("@") or len(distinct := {fold_case(one) for one in addresses}) != 1:
        return None
    if "=?" in "".join(distinct):  # a program that decodes encoded words would read another address
        return None
    return distinct.pop()


def _is_automatic(headers: Headers, sender: str) -> bool:
    """Return whether a program wrote the mail: two programs must not answer each other endlessly."""
    submitted = headers["Auto-Submitted"].lower()
    bulk = headers["Precedence"].lower() in ("bulk", "junk", "list", "auto_reply")
    lists = any(headers[name] for name in ("List-Id", "List-Unsubscribe", "X-Autoreply", "X-Auto-Response-Suppress"))
    bounced = headers["Return-Path"] == "<>"
    return (submitted not in ("", "no")) or bulk or lists or bounced or NOBODY.match(sender) is not None


def is_authentic(headers: Headers, sender: str, auth_server: str) -> bool:
    """Return whether the receiving server has verified the sender.

    Only its own verdict counts, which is in the first header: any others may be forged by the sender, and so may quoted
    strings and comments in the first one. Servers differ in whether a quote can hide the end of a comment, so the
    verdict must hold in both readings.
    """
    verdict = headers["Authentication-Results"]
    without_quotes = re.sub(r"\"(?:[^\"\\]|\\.)*\"", " ", verdict)
    readings = (_without_comments(verdict), "" if '"' in without_quotes else _without_comments(without_quotes))
    return all(_says_pass(fold_case(one), sender.rpartition("@")[2], auth_server) for one in readings)


def _says_pass(verdict: str, domain: str, auth_server: str) -> bool:
    server, _, results = verdict.partition(";")
    if server.split()[:1] != [auth_server]:
        return False
    for result in results.split(";"):
        match result.split()[:1]:
            case ["dmarc=pass"] if _aligned(_property(result, "header.from"), domain):
                return True
            case ["dkim=pass"]:
                signer = _property(result, "header.d") or _property(result, "header.i").rpartition("@")[2]
                if _aligned(signer, domain):
                    return True
            case ["spf=pass"] if _aligned(_property(result, "smtp.mailfrom").rpartition("@")[2], domain):
                return True
    return False


def _without_comments(value: str) -> str:
    """Return a header without comments and quoted strings; "" if one of them is not closed."""
    kept: list[str] = []
    depth, is_quoted, is_escaped = 0, False, False
    for letter in value:
        if is_escaped:
            is_escaped = False
        elif letter == "\\" and (is_quoted or depth):
            is_escaped = True
        elif is_quoted:
            is_quoted = letter != '"'
        elif letter == '"' and not depth:
            is_quoted = True
            kept.append(" ")
        elif letter == "(":
            depth += 1
            kept.append(" ")
        elif letter == ")" and depth:
            depth -= 1
        elif not depth:
            kept.append(letter)
    return "" if is_quoted or depth else "".join(kept)


def _property(result: str, name: str) -> str:
    found = re.search(rf"(?<!\S){re.escape(name)}=(\S+)", result)
    return found[1] if found else ""


def _aligned(signer: str, domain: str) -> bool:
    """Return whether a verified domain covers the sender's: it is the same, or a parent domain."""
    return bool(signer) and "." in signer and (signer == domain or domain.endswith(f".{signer}"))


def _decoded(value: str) -> str:
    """Return a header with its encoded words decoded. The result may contain line ends."""
    try:
        return str(make_header(decode_header(value[:MAX_HEADER])))
    except (LookupError, ValueError, HeaderParseError):
        return value[:MAX_HEADER]


class _ShortHeaders(Compat32):
    """Truncates the headers of parts, so that parsing them stays fast."""

    def header_source_parse(self, sourcelines: list[str]) -> tuple[str, str]:
        name, value = super().header_source_parse(sourcelines)
        return name, value[:MAX_HEADER]


def parsed(data: bytes) -> Message | None:
    """Parse a mail; None if that would take too long."""
    multiparts = len(re.findall(rb"multipart/", data, re.I))
    if multiparts > MAX_MULTIPARTS or (multiparts and len(re.findall(rb"[\r\n]--", data)) > MAX_PARTS):
        return None
    return message_from_bytes(data, policy=_ShortHeaders())


def body_of(mail: Message) -> str:
    """Return the text of a mail without quoted text and signature."""
    bodies = _bodies(mail)
    if (found := bodies.get("text/plain") or bodies.get("text/html")) is None:
        return ""
    data = _content(found)[:MAX_TEXT]
    charset = str(found.get_content_charset("utf-8"))
    try:
        text = data.decode("utf-8" if charset in NAMES_ONLY else charset, "replace")
    except (LookupError, ValueError):
        text = data.decode("utf-8", "replace")
    if found.get_content_type() == "text/html":
        text = _text_of(text)
    return _without_quotes(text.replace("\r\n", "\n")).strip()


def attachments_of(mail: Message) -> Iterator[Attachment]:
    """Yield the files of a mail: every part that is neither its text nor a signature, inline pictures included."""
    bodies = list(_bodies(mail).values())
    for part in _leaves(mail):
        if any(part is body for body in bodies) or part.get_content_subtype().endswith("-signature"):
            continue
        name = _name_of(part) or f"file{mimetypes.guess_extension(part.get_content_type()) or ''}"
        yield _attachment(name, _content(part))


def _bodies(mail: Message) -> dict[str, Message]:
    """Return the versions of a mail's text by media type."""
    found: dict[str, Message] = {}
    for part in _leaves(mail):
        kind = part.get_content_type()
        is_file = part.get_content_disposition() == "attachment" or _name_of(part)
        if kind in ("text/plain", "text/html") and not is_file:
            found.setdefault(kind, part)
    return found


def _name_of(part: Message) -> str:
    try:
        return _decoded(part.get_filename() or "")
    except (LookupError, ValueError, TypeError):  # parameters that the standard library cannot parse
        return ""


def _content(part: Message) -> bytes:
    """Return the content of a part. An attached mail is a file."""
    try:
        if part.is_multipart():
            return b"".join(one.as_bytes() for one in part.get_payload() if isinstance(one, Message))
        data = part.get_payload(decode=True)
    except (LookupError, ValueError, TypeError, AttributeError):  # content that the standard library cannot parse
        return b""
    return data if isinstance(data, bytes) else b""


def _attachment(name: str, data: bytes) -> Attachment:
    async def read(limit: int) -> bytes:
        return data[: limit + 1]

    return Attachment(name, read, len(data))


def _leaves(part: Message) -> Iterator[Message]:
    """Yield the parts of a mail that have no parts themselves; an attached mail counts as one."""
    if part.get_content_maintype() == "multipart" and part.is_multipart():
        for inner in part.get_payload():
            if isinstance(inner, Message):
                yield from _leaves(inner)
    else:
        yield part


def _without_quotes(text: str) -> str:
    """Return the text without a quoted mail at the end and without the signature."""
    text = re.split(r"^-- ?$", text, maxsplit=1, flags=re.M)[0]
    lines = text.rstrip().split("\n")
    end = len(lines)
    while end and (lines[end - 1].startswith(">") or not lines[end - 1].strip()):
        end -= 1
    if 0 < end < len(lines) and lines[end - 1].rstrip().endswith(":"):  # On Monday, Anna wrote:
        end -= 1
        if end and lines[end - 1].startswith("On "):
            end -= 1
    kept = "\n".join(lines[:end]).strip()
    return kept or text.strip()


class _Words(HTMLParser):
    """Extracts the text of an HTML mail."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in ("style", "script", "head")
        if tag in ("br", "p", "div", "li", "tr", "blockquote"):
            self.words.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "script", "head") and self._hidden > 0

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words.append(data)


def _text_of(html: str) -> str:
    reader = _Words()
    reader.feed(html[:MAX_HTML])
    return re.sub(r"\n{3,}", "\n\n", "".join(reader.words)).strip()
